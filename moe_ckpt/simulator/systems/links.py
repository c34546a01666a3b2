"""What all systems share: how fast copies move, what the pieces of a rank weigh, and how one starts again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.placement import Placement, place_replicas
from megatron.core.dist_checkpointing.moe.types import Part

from ..behaviour import Nodes, RecoveryCost
from ..constants import Constants
from ..driver import newest_usable
from ..inputs import Cluster, IterationCost, TrainingJob
from ..replicas import surviving


@dataclass(frozen=True)
class SystemSetting:
    """A job on a cluster, and what follows from both for every system."""

    job: TrainingJob
    cost: IterationCost
    cluster: Cluster
    constants: Constants

    def __post_init__(self) -> None:
        # A rank has no more peers than there are other ranks; where a system is given more by name, it refuses.
        most = self.job.topology.world_size - 1
        if self.constants.replicas > most:
            object.__setattr__(self, "constants", replace(self.constants, replicas=most))

    @cached_property
    def settled(self) -> dict[Any, Any]:
        """Plans and schedules of windows that were found before, by what was asked for."""
        return {}

    @property
    def iteration_s(self) -> float:
        """T_iter."""
        return self.cost.iteration_s

    @property
    def host_bytes_per_s(self) -> float:
        """From a GPU to its host's memory."""
        return self.cluster.host_link_bytes_per_s * self.constants.host_share

    def peer_bytes_per_s(self, replicas: int) -> float:
        """How fast a rank's snapshot reaches the host and all of its replicas, each of which crosses the NIC."""
        if not replicas:
            return self.host_bytes_per_s
        return min(self.host_bytes_per_s, self.fetch_bytes_per_s / replicas)

    @property
    def fetch_bytes_per_s(self) -> float:
        """From a peer's memory to one rank."""
        return self.cluster.inter_node_bytes_per_s * self.constants.network_share

    @property
    def free_s(self) -> float:
        """Seconds of an iteration in which the NIC is not training's."""
        return max(0.0, self.iteration_s - self.cost.network_busy_s)

    def slowed_s(self, nbytes: float, replicas: int) -> float:
        """Seconds that training loses to the copy of a rank's snapshot: it crosses the GPU's link to the host once, and
        the host's links to the NIC once for each replica, which training uses too.

        Args:
            nbytes: Bytes of the snapshot.
            replicas: Peers that receive a copy.
        """
        busy_s = nbytes * (1 + replicas) / self.cluster.host_link_bytes_per_s
        return self.contention * busy_s

    @property
    def contention(self) -> float:
        """`Constants.contention`; by the roofline what the link takes of the memory's rate, all where none is known."""
        if self.constants.contention is not None:
            return self.constants.contention
        known = self.cluster.gpu_memory_bytes_per_s
        return min(1.0, self.cluster.host_link_bytes_per_s / known) if known else 1.0

    @property
    def launch_s(self) -> float:
        """Until all processes run again, with their model."""
        return self.constants.launch_s(self.job.topology.world_size)

    @property
    def meet_s(self) -> float:
        """Until all ranks are connected."""
        topology = self.job.topology
        return self.constants.meet_s(topology.world_size, topology.ranks_per_node)

    @property
    def stage_restart_s(self) -> tuple[float, float]:
        """Until what replaces the ranks of some stages runs, and until it is connected with all others."""
        return (self.launch_s, self.meet_s) if self.constants.restarts_all else (self.constants.local_restart_s, 0.0)

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return len(self.job.topology.ranks_by_node)

    @property
    def dense_bytes(self) -> float:
        """Of the busiest rank in a dense checkpoint: compute weights and the optimizer's state."""
        return self.job.busiest_rank_parameters * self._everything

    @property
    def copied_parameter_bytes(self) -> int:
        """Of one parameter, what copies in memory have."""
        return self._everything if self.constants.copies_weights else self.job.precision.full_bytes

    @property
    def whole_bytes(self) -> float:
        """A whole snapshot in memory of the busiest rank."""
        return self.job.busiest_rank_parameters * self.copied_parameter_bytes

    @property
    def load_s(self) -> float:
        """To read a whole snapshot from a peer's memory."""
        return self.whole_bytes / self.fetch_bytes_per_s

    @property
    def model_bytes(self) -> float:
        """A dense checkpoint of the whole model."""
        return self.job.shape.total_parameters * self._everything

    @property
    def upload_s(self) -> float:
        """That on its way to storage, or back."""
        return self.model_bytes / self.cluster.storage_bytes_per_s

    @property
    def upload_iterations(self) -> int:
        """Iterations until a checkpoint that is on its way to storage can be used."""
        return math.ceil(self.upload_s / self.iteration_s)

    @property
    def persist_s(self) -> float:
        """A whole snapshot of the model on its way from memory to storage, or back."""
        return self.job.shape.total_parameters * self.copied_parameter_bytes / self.cluster.storage_bytes_per_s

    @property
    def persist_iterations(self) -> int:
        """Iterations until such a state in storage can be used."""
        return math.ceil(self.persist_s / self.iteration_s)

    @property
    def persist_overhead_s(self) -> float:
        """What states on their way to storage add to an iteration of a system in memory, on average."""
        return self.constants.persist_slowdown * self.persist_s / self.persist_interval

    @property
    def persist_interval(self) -> int:
        """Iterations between the states in storage of a system that checkpoints to memory: one at a time."""
        return max(1, round(self.constants.persist_every_s / self.iteration_s), 2 * self.persist_iterations)

    def restart(self, load_s: float, iterations: int, replay_s: float, *, from_storage: bool = False) -> RecoveryCost:
        """All ranks start again from one state and train what came after it again.

        Copies in memory do not wait for that, but only for the nodes.

        Args:
            load_s: Seconds to load the state.
            iterations: Iterations to train again.
            replay_s: Seconds that these take.
            from_storage: Whether the state comes from storage.
        """
        constants = self.constants
        return RecoveryCost(
            constants.detect_s,
            self.launch_s,
            load_s,
            replay_s,
            iterations,
            from_storage=from_storage,
            refill_s=constants.detect_s + sum(self.stage_restart_s) + load_s,
            rendezvous_s=self.meet_s,
        )

    def rewind(self, iteration: int, interval: int, latency: int, load_s: float) -> RecoveryCost:
        """The recovery of checkpoints that are taken at once: back to the newest usable one, and train again.

        Args:
            iteration: Number of the iteration that the fault cuts off, counted from 0.
            interval: Iterations between two checkpoints.
            latency: Iterations from a checkpoint until it can be used.
            load_s: Seconds to load the state.
        """
        again = since(iteration, interval, latency)
        return self.restart(load_s, again, again * self.iteration_s)

    def from_storage(self, iteration: int) -> RecoveryCost:
        """The recovery when memory has lost a copy for good."""
        again = since(iteration, self.persist_interval, self.persist_iterations)
        return self.restart(self.persist_s, again, again * self.iteration_s, from_storage=True)

    @property
    def expected_from_storage_s(self) -> float:
        """Mean seconds of that, with the iteration that is cut off."""
        again = self.persist_interval / 2 + self.persist_iterations
        return self.restart(self.persist_s, 0, again * self.iteration_s, from_storage=True).total_s

    @property
    def _everything(self) -> int:
        return self.job.precision.bytes_per_parameter(Part.EVERYTHING)


def since(iteration: int, interval: int, latency: int) -> int:
    """Whole iterations that a fault undoes.

    States are captured after each `interval` iterations, and at the start.

    Args:
        iteration: Number of the iteration that the fault cuts off, counted from 0.
        interval: Iterations between two checkpoints.
        latency: Iterations from a checkpoint until it can be used.
    """
    return iteration - newest_usable(iteration, latency) // interval * interval


def needs_experts(system: str, job: TrainingJob) -> None:
    """Raises UsageError unless the model has experts.

    Args:
        system: Name of the system in the error.
        job: The job whose model is looked at.
    """
    if not job.shape.moe_layers:
        raise UsageError(f"{system} leaves experts out of checkpoints, but {job.shape.name} has none: choose another")


@dataclass(frozen=True)
class Replicas:
    """Which losses of nodes the memory of the others survives."""

    setting: SystemSetting
    count: int

    def survive(self, nodes: Nodes) -> bool:
        """Whether each rank's snapshot is still in some node's memory."""
        if len(nodes) <= min(self.count, self.setting.nodes - 1):
            return True
        return not surviving(self._placement, nodes).lost

    def expected_s(self, in_memory_s: float) -> float:
        """E[R] of a fault of one node.

        Args:
            in_memory_s: The same where the memory of the others survives it.
        """
        survives = self.survive(frozenset((next(iter(self.setting.job.topology.ranks_by_node)),)))
        return in_memory_s if survives else self.setting.expected_from_storage_s

    @cached_property
    def _placement(self) -> Placement:
        return place_replicas(self.setting.job.topology, self.count)
