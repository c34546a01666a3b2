"""Models that people name on the command line: a published one, or a JSON file: ours, or Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import ModelShape

from ..simulator.clusters import read_object
from ..simulator.models import PRESETS, preset
from .hf_model import LARGEST_COUNT, is_hf_config, shape_values

LARGEST_SIZE = 2**31 - 1
LARGEST_OPERATOR_COUNT = 1_000_000

_FIELDS = {field.name: field for field in dataclasses.fields(ModelShape)}
_FROM_ZERO = ("num_experts", "moe_shared_expert_intermediate_size", "max_position_embeddings")
_COUNTS = ("num_layers", "num_experts", "moe_router_topk", "moe_layer_freq", "num_attention_heads", "num_query_groups")


def load_model(name_or_path: str) -> ModelShape:
    """The model that `--model` names: a preset, or a JSON file whose keys are the fields of ModelShape, or those of a
    `config.json` of Hugging Face.

    The fields have the names of Megatron's TransformerConfig; `name` may be left out and is then the file's. What is a
    preset's name, in upper or lower case, is never taken for a file.

    Raises UsageError for a name that is neither, for a file that cannot be read or is not JSON, and for keys and values
    that no model can have.
    """
    if name_or_path.casefold() in {name.casefold() for name in PRESETS}:
        return preset(name_or_path)
    path = Path(name_or_path)
    if name_or_path and (len(path.parts) > 1 or path.suffix or _exists(path)):
        return _read(path)
    try:
        return preset(name_or_path)
    except UsageError as error:
        raise UsageError(f"{error}; or give the path of a JSON file with the model's hyper-parameters") from None


def _read(path: Path) -> ModelShape:
    file = f"model {path if str(path).isprintable() else ascii(str(path))}"
    values = read_object(path, file)
    if is_hf_config(values):
        name = path.absolute().parent.name if path.stem == "config" else path.stem
        values = shape_values(values, file) | {"name": name}
    for key in values:
        if key not in _FIELDS:
            likely = difflib.get_close_matches(key[:100], _FIELDS, n=1)
            hint = f"did you mean {likely[0]}?" if likely else f"the fields are {', '.join(_FIELDS)}"
            raise UsageError(f"{file}: {_quoted(key)} is no field of a model; {hint}")
    values.setdefault("name", path.stem)
    checked: dict[str, Any] = {}
    for field in _FIELDS.values():
        if field.name in values:
            checked[field.name] = _checked(file, field, values[field.name])
        elif field.default is dataclasses.MISSING:
            raise UsageError(f"{file}: {field.name} is missing; it must be {_allowed(field)}")
    require_experts(file, checked["num_layers"], checked.get("num_experts", 0))
    # ModelShape speaks of the model by its name: until it has agreed, that is the file, which the user can look for.
    shape = ModelShape(**checked | {"name": file.removeprefix("model ")})
    return dataclasses.replace(shape, name=checked["name"])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or not encodable: no file has such a name
        return False


def _checked(file: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """The value as ModelShape takes it; a list of layers becomes a tuple."""
    kind = str(field.type)
    low, high = _range(field.name)
    fits = (
        (type(value) is bool and kind == "bool")
        or (isinstance(value, str) and kind == "str" and value.isprintable())
        or (value is None and "None" in kind)
        or (type(value) is int and kind.startswith("int") and low <= value <= high)
    )
    if isinstance(value, list) and "tuple" in kind:
        fits = all(type(item) is int and item in (0, 1) for item in value)
        value = tuple(value) if fits else value
    if not fits:
        raise UsageError(f"{file}: {field.name} is {_quoted(value)}, but must be {_allowed(field)}")
    return value


def require_size(what: str, name: str, value: int) -> None:
    """Raises UsageError for a number that this field of a model cannot be.

    Args:
        what: Name of the value in the error.
        name: The field of ModelShape.
        value: The number.
    """
    low, high = _range(name)
    if not low <= value <= high:
        raise UsageError(f"{what} is {_quoted(value)}, but must be {_allowed(_FIELDS[name])}")


def require_experts(place: str, layers: int, experts: int) -> None:
    """Raises UsageError for more experts than anything here can list.

    Args:
        place: Where the numbers are from, in the error.
        layers: Number of layers.
        experts: Experts of each.
    """
    if layers * experts > LARGEST_OPERATOR_COUNT:
        raise UsageError(
            f"{place}: num_layers {layers} x num_experts {experts} make {layers * experts} experts, but there must be"
            f" at most {LARGEST_OPERATOR_COUNT}"
        )


def _range(name: str) -> tuple[int, int]:
    return 0 if name in _FROM_ZERO else 1, LARGEST_COUNT if name in _COUNTS else LARGEST_SIZE


def _allowed(field: dataclasses.Field[Any]) -> str:
    kind = str(field.type)
    if kind == "bool":
        return "true or false"
    if kind == "str":
        return '"RMSNorm" or "LayerNorm"' if field.name == "normalization" else "text in quotes, on one line"
    low, high = _range(field.name)
    extra = ", or null" if "None" in kind else ", or a list with one 0 or 1 per layer" if "tuple" in kind else ""
    return f"an integer from {low} to {high}{extra}"


def _quoted(value: Any) -> str:
    """A value as it stands in the file, cut where it is long, with escapes for what cannot be printed."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
