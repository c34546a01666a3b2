"""The models of the papers by name, from their published hyper-parameters in presets/models.json."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib.resources import files

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import ModelShape


@dataclass(frozen=True)
class PublishedModel:
    """A model's published size: all parameters, and where the figure stands."""

    total_parameters: int
    source: str


PRESETS: dict[str, ModelShape] = {}
PUBLISHED: dict[str, PublishedModel] = {}

for _name, _values in json.loads((files(__package__) / "presets" / "models.json").read_text(encoding="utf-8")).items():
    PUBLISHED[_name] = PublishedModel(_values.pop("published_parameters"), _values.pop("published_in"))
    if "moe_layer_freq" in _values:
        _values["moe_layer_freq"] = tuple(_values["moe_layer_freq"])
    PRESETS[_name] = ModelShape(_name, **_values)


def preset(name: str) -> ModelShape:
    """The published model of that name, in upper or lower case.

    Raises UsageError, with the closest name and all known ones, for a name that is none of theirs.
    """
    by_folded = {known.casefold(): shape for known, shape in PRESETS.items()}
    found = by_folded.get(name.casefold())
    if found is None:
        likely = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
        question = f" (did you mean {by_folded[likely[0]].name}?)" if likely else ""
        raise UsageError(f"model {name!r} is not known{question}; known models: {', '.join(PRESETS)}")
    return found
