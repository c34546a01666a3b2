"""How much host memory a checkpoint system takes on the fullest node of a job: what `moe-ckpt plan` says of it."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig

from .behaviour import Behaviour
from .driver import Driver, strategy_job
from .inputs import TrainingJob
from .planning import node_bytes as planned_bytes
from .systems import CheckpointSystem
from .systems.links import SystemSetting


def node_bytes(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> int:
    """Bytes of host memory that checkpoints, their replicas and logs take on the fullest node.

    Of a strategy of this project, what its job reserves; of stock checkpoints in the background, one snapshot.

    Args:
        setting: The job on its cluster.
        system: The checkpoint system with its setting.
        behaviour: The same system in this job; gives its interval, window and share of experts.
    """
    if system.name in ("none", "torch_dist"):
        return 0
    if system.name == "torch_dist_async":
        return _on_a_node(setting.job, setting.model_bytes)
    config = MoECheckpointConfig(replicas=_replicas(setting, system), **_flags(setting, system, behaviour))
    training = setting.job
    job = strategy_job(training.shape, training.topology, training.precision, config, tokens=training.tokens)
    return planned_bytes(job, setting, Driver(job).strategy)


def _flags(setting: SystemSetting, system: CheckpointSystem, behaviour: Behaviour) -> dict[str, Any]:
    """The settings of the strategy that stands for a system."""
    if system.name == "moevement":
        recovery = "auto" if getattr(system, "local", True) else "global"
        return {"strategy": "sparse", "window": str(behaviour.window), "recovery": recovery}
    if system.name == "moc":
        experts = max(1, round(behaviour.k_share * setting.job.shape.num_experts))
        return {"strategy": "pec", "pec_k_snapshot": experts}
    if system.name == "moetion":
        return {"strategy": "selective"}
    return {"strategy": "full", "interval": behaviour.interval}


def _replicas(setting: SystemSetting, system: CheckpointSystem) -> int:
    """Peers that hold a copy, as many as there are; `checkfreq` has storage in their place."""
    asked = 0 if system.name == "checkfreq" else getattr(system, "replicas", None)
    most = setting.job.topology.world_size - 1
    return min(most, setting.constants.replicas if asked is None else int(asked))


def _on_a_node(job: TrainingJob, job_bytes: float) -> int:
    """The part of the fullest node, in proportion to the parameters that its ranks own."""
    topology = job.topology
    owned: dict[int, float] = {}
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        owned[at.node] = owned.get(at.node, 0.0) + job.rank_parameters[at.pp, at.ep]
    return math.ceil(job_bytes * max(owned.values()) / sum(owned.values()))
