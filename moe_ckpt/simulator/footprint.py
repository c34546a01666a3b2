"""How much host memory a checkpoint system takes on the fullest node of a job."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from megatron.core.dist_checkpointing.moe.types import Window

from .behaviour import Behaviour
from .inputs import TrainingJob
from .memory import memory_of
from .shards import owned_operators
from .systems import CheckpointSystem, MoEvement
from .systems.links import SystemSetting


def node_bytes(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """Bytes of host memory that checkpoints, their replicas and logs take on the fullest node.

    Each rank's snapshot lies in its own node's memory and in that of its replicas, which are spread evenly. Systems
    that checkpoint to storage hold one snapshot while it is uploaded; those that checkpoint to memory one that is
    complete and one under way. An unknown system is counted as the latter, with dense checkpoints.

    Args:
        setting: The job on its cluster.
        system: The checkpoint system with its setting.
        behaviour: The same system in this job; gives its window and share of experts.
    """
    return _HELD.get(system.name, _dense)(setting, system, behaviour)


Held = Callable[[SystemSetting, CheckpointSystem, Behaviour], int]


def _nothing(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    return 0


def _staged(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """One dense snapshot on its way to storage, of each rank on its own node."""
    return _on_a_node(setting.job, setting.model_bytes)


def _dense(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """Gemini, and MoC, whose K may rise to all experts."""
    dense = memory_of(setting.job, _dense_windows(setting.job)).gemini_bytes
    return _on_a_node(setting.job, dense * _copies(setting, system))


def _selective(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """The newest state of everything, and a snapshot of non-experts and the selected experts."""
    shape, full = setting.job.shape, setting.job.precision.full_bytes
    under_way = shape.total_parameters - (1 - behaviour.k_share) * shape.expert_parameters
    dense = memory_of(setting.job, _dense_windows(setting.job)).gemini_bytes
    held = dense - full * (shape.total_parameters - under_way)
    return _on_a_node(setting.job, held * _copies(setting, system))


def _sparse(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """Two windows with all their WEIGHTS, and the boundary logs, which stay with their sender."""
    assert isinstance(system, MoEvement)
    schedules = replace(system, window=behaviour.window).schedules(setting, None)
    memory = memory_of(setting.job, {lane: schedule.window for lane, schedule in schedules.items()})
    logs = memory.log_bytes * setting.job.topology.ranks_per_node if system.local else 0
    windows = memory.peak_bytes - memory.all_logs_bytes
    return _on_a_node(setting.job, windows * _copies(setting, system)) + logs


_HELD: dict[str, Held] = {
    "none": _nothing,
    "torch_dist": _nothing,
    "torch_dist_async": _staged,
    "checkfreq": _staged,
    "gemini": _dense,
    "moc": _dense,
    "moetion": _selective,
    "moevement": _sparse,
}


def _copies(setting: SystemSetting, system: CheckpointSystem) -> int:
    """In its own node's memory, and at its peers."""
    replicas = getattr(system, "replicas", None)
    return 1 + (setting.constants.replicas if replicas is None else int(replicas))


def _on_a_node(job: TrainingJob, job_bytes: float) -> int:
    """The part of the fullest node, in proportion to the parameters that its ranks own."""
    topology = job.topology
    owned: dict[int, float] = {}
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        owned[at.node] = owned.get(at.node, 0.0) + job.rank_parameters[at.pp, at.ep]
    return math.ceil(job_bytes * max(owned.values()) / sum(owned.values()))


def _dense_windows(job: TrainingJob) -> dict[tuple[int, int], Window]:
    return {lane: Window(0, (operators,)) for lane, operators in owned_operators(job.shape, job.topology).items()}
