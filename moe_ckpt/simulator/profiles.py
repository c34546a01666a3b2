"""What `moe-ckpt profile` measured, as inputs of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .clusters import cluster_from, read_object
from .cost import Utilisation
from .inputs import Cluster

FORMAT, VERSION = "moe-ckpt-profile", 1


@dataclass(frozen=True)
class Profile:
    """A machine: its rates, the share of them that training reaches, and how much a frozen layer saves.

    frozen_saves: share of a layer's forward and backward time that is saved where all of it is frozen. measured: all
    that was measured, by name, as it stands in the file.
    """

    cluster: Cluster
    utilisation: Utilisation
    frozen_saves: float
    measured: dict[str, Any]


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises UsageError for a file that cannot be read, or is no profile of this version."""
    values = read_object(path)
    if values.get("format") != FORMAT:
        raise UsageError(f"{path} is no profile: its format is not {FORMAT!r}; make one with `moe-ckpt profile --out`")
    if values.get("version") != VERSION:
        raise UsageError(f"{path} has version {values.get('version')!r} of profiles, but must have {VERSION}")
    names = [field.name for field in fields(Utilisation)]
    utilisation, cluster, measured = (values.get(key) for key in ("utilisation", "cluster", "measured"))
    if not isinstance(utilisation, dict) or sorted(utilisation) != sorted(names):
        raise UsageError(f"{path}: utilisation must have the fields {', '.join(names)}")
    if not isinstance(cluster, dict) or not isinstance(measured, dict):
        raise UsageError(f"{path}: cluster and measured must be objects")
    shares = {name: _number(path, name, utilisation[name]) for name in names if name != "source"}
    saves = _number(path, "frozen_saves", values.get("frozen_saves"))
    if not 0 <= saves < 1:
        raise UsageError(f"{path}: frozen_saves is {saves}, but must be from 0 to below 1")
    return Profile(
        cluster_from(cluster, str(path)),
        Utilisation(**shares, source=str(utilisation["source"])),
        saves,
        measured,
    )


def as_data(profile: Profile) -> dict[str, Any]:
    """The JSON object that `load_profile` reads."""
    cluster = {field.name: getattr(profile.cluster, field.name) for field in fields(Cluster)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "cluster": cluster | {"peak_flops": {str(width): flops for width, flops in cluster["peak_flops"].items()}},
        "utilisation": {field.name: getattr(profile.utilisation, field.name) for field in fields(Utilisation)},
        "frozen_saves": profile.frozen_saves,
        "measured": profile.measured,
    }


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{path}: {name} is {str(value)[:100]!r}, but must be a number")
    return float(value)
