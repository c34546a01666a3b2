"""What `moe-ckpt profile` measured, as inputs of a simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from .clusters import cluster_from, read_object
from .constants import Constants
from .cost import Utilisation, iteration_cost
from .inputs import Cluster, IterationCost, TrainingJob
from .layer_times import LayerTimes, Line
from .systems.links import SystemSetting

FORMAT, VERSION = "moe-ckpt-profile", 2


@dataclass(frozen=True)
class Profile:
    """A machine: its rates, the share of them that training reaches, and how much a frozen layer saves.

    frozen_saves: share of a layer's forward and backward time that is saved where all of it is frozen. measured: all
    that was measured, by name, as it stands in the file. layers: what Megatron-Core's layers took; None: not known.
    """

    cluster: Cluster
    utilisation: Utilisation
    frozen_saves: float
    measured: dict[str, Any]
    layers: LayerTimes | None = None

    def cost(self, job: TrainingJob) -> IterationCost:
        """Of a job on this machine: by its measured layers where they are the job's, else by the roofline.

        Raises UsageError as `iteration_cost`.
        """
        estimated = iteration_cost(job, self.cluster, self.utilisation)
        return estimated if self.layers is None else self.layers.cost(job, estimated)

    def setting(self, job: TrainingJob, constants: Constants) -> SystemSetting:
        """The job on this machine, where copies and cold restarts cost what they did here. The time in which a node is
        replaced, before processes can start, is not in that. Raises UsageError as `cost`."""
        constants = replace(constants, frozen_saves=self.frozen_saves)
        if self.layers is not None:
            connected_s = constants.connect_s * self.layers.ranks
            launch_s = max(0.0, self.layers.restart_s - connected_s)
            constants = replace(constants, contention=self.layers.contention, detect_s=0.0, cold_launch_s=launch_s)
        return SystemSetting(job, self.cost(job), self.cluster, constants)


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
        _layers(path, values.get("layers")),
    )


def as_data(profile: Profile) -> dict[str, Any]:
    """The JSON object that `load_profile` reads."""
    cluster = {field.name: getattr(profile.cluster, field.name) for field in fields(Cluster)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "cluster": cluster | {name: _by_width(cluster[name]) for name in ("peak_flops", "gemm_shares")},
        "utilisation": {field.name: getattr(profile.utilisation, field.name) for field in fields(Utilisation)},
        "frozen_saves": profile.frozen_saves,
        "measured": profile.measured,
        "layers": None if profile.layers is None else asdict(profile.layers),
    }


_LINES = ("moe", "dense", "ends", "reduce", "step")
_MAY_BE_NULL = ("moe", "dense")


def _layers(path: Path, values: Any) -> LayerTimes | None:
    if values is None:
        return None
    names = [field.name for field in fields(LayerTimes)]
    if not isinstance(values, dict) or sorted(values) != sorted(names) or not isinstance(values["shape"], dict):
        raise UsageError(f"{path}: layers must be null or have the fields {', '.join(names)}, shape an object")
    found: dict[str, Any] = {name: _line(path, name, values[name]) for name in _LINES}
    for name in ("ranks", "tp", "pp", "ep", "seq_length"):
        number = _number(path, f"layers.{name}", values[name])
        if number != int(number) or number < 1:
            raise UsageError(f"{path}: layers.{name} is {number}, but must be a whole number from 1")
        found[name] = int(number)
    for name in ("restart_s", "contention"):
        found[name] = _number(path, f"layers.{name}", values[name])
    shape = {name: tuple(value) if isinstance(value, list) else value for name, value in values["shape"].items()}
    return LayerTimes(shape=shape, **found)


def _line(path: Path, name: str, value: Any) -> Line | None:
    if value is None and name in _MAY_BE_NULL:
        return None
    if not isinstance(value, dict) or sorted(value) != ["each_s", "fixed_s"]:
        raise UsageError(f"{path}: layers.{name} must be an object with fixed_s and each_s")
    return Line(*(_number(path, f"layers.{name}.{part}", value[part]) for part in ("fixed_s", "each_s")))


def _by_width(values: dict[int, float]) -> dict[str, float]:
    return {str(width): value for width, value in values.items()}


def _number(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{path}: {name} is {str(value)[:100]!r}, but must be a number")
    return float(value)
