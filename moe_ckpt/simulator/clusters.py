"""Clusters by name, from presets/clusters.json, and from files that people wrote."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .inputs import Cluster

LARGEST_FILE_BYTES = 2**20

_FIELDS = {field.name for field in dataclasses.fields(Cluster)}
_TEXTS = ("name", "source")
_WHOLE = ("gpus_per_node", "host_memory_bytes", "nvlink_gpus")
_MAY_LACK = {"gpu_memory_bytes_per_s", "gemm_shares", "nvlink_gpus"}


def cluster(name: str) -> Cluster:
    """The preset of that name, in upper or lower case.

    Raises UsageError, with the closest name and all known ones, for a name that is none of theirs.
    """
    known = presets()
    found = known.get(name.casefold())
    if found is None:
        likely = difflib.get_close_matches(name.casefold(), known, n=1, cutoff=0.5)
        question = f" (did you mean {likely[0]}?)" if likely else ""
        raise UsageError(f"cluster {name!r} is not known{question}; known clusters: {', '.join(known)}")
    return found


@cache
def presets() -> dict[str, Cluster]:
    """All clusters that are known by name."""
    text = (files(__package__) / "presets" / "clusters.json").read_text(encoding="utf-8")
    return {name: cluster_from(values | {"name": name}, f"preset {name}") for name, values in json.loads(text).items()}


def load_cluster(path: Path) -> Cluster:
    """The cluster that a JSON file describes, by the fields of Cluster.

    `name` may be left out and is then the file's; keys of `peak_flops` are bytes per element.
    Raises UsageError for a file that cannot be read or is not JSON, and for keys and values that no cluster has.
    """
    return cluster_from({"name": path.stem, "source": str(path)} | read_object(path), str(path))


def read_object(path: Path, name: str = "") -> dict[str, Any]:
    """The JSON object in a file. Raises UsageError for a file that cannot be read or has something else.

    Args:
        path: The file, UTF-8, of at most `LARGEST_FILE_BYTES`.
        name: Name of the file in errors; empty: its path.
    """
    name = name or str(path)
    try:
        with path.open("rb") as opened:
            content = opened.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise UsageError(f"{name} has more than {LARGEST_FILE_BYTES} bytes; what is described takes a few thousand")
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{name} must have a JSON object, but has a {type(values).__name__}")
    return values


def cluster_from(values: dict[str, Any], where: str) -> Cluster:
    """The cluster with these fields. Raises UsageError for fields and values that no cluster has.

    Args:
        values: The fields by name, as JSON has them.
        where: Name of the source in errors, such as a path.
    """
    for key in values:
        if key not in _FIELDS:
            likely = difflib.get_close_matches(key[:100], _FIELDS, n=1)
            hint = f"did you mean {likely[0]}?" if likely else f"the fields are {', '.join(sorted(_FIELDS))}"
            raise UsageError(f"{where}: {key[:100]!r} is no field of a cluster; {hint}")
    missing = sorted(_FIELDS - _MAY_LACK - values.keys())
    if missing:
        raise UsageError(f"{where}: {missing[0]} is missing")
    return Cluster(**{key: _checked(where, key, value) for key, value in values.items()})


def _checked(where: str, key: str, value: Any) -> Any:
    if key in _TEXTS:
        return str(value)
    if key in ("peak_flops", "gemm_shares"):
        kind, needed = ("FLOPS", True) if key == "peak_flops" else ("shares", False)
        known = isinstance(value, dict) and all(width in ("1", "2", "4", "8") for width in value)
        if not known or (needed and not value):
            raise UsageError(f"{where}: {key} must be an object from bytes per element (1, 2, 4 or 8) to {kind}")
        return {int(width): _number(where, f"{key}[{width}]", rate) for width, rate in value.items()}
    number = _number(where, key, value)
    if key in _WHOLE:
        if number != int(number):
            raise UsageError(f"{where}: {key} is {value}, but must be a whole number")
        return int(number)
    return number


def _number(where: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise UsageError(f"{where}: {key} is {str(value)[:100]!r}, but must be a number")
    return float(value)
