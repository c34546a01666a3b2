"""Systems that checkpoint everything at once: CheckFreq, Gemini, and Megatron-Core's distributed checkpoints.

Intervals are those of the strategy `full`, but for Gemini's: its oracle knows the failures, and has no flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.moe.strategies import Costs

from ..behaviour import Behaviour, Nodes, RecoveryCost
from ..driver import COPIED_AFTER, ENDLESS, SETTLED_AFTER, Driver, layer_job
from ..ettr import ettr, expected_recovery_s, gemini_oracle
from .links import Replicas, SystemSetting


@dataclass(frozen=True)
class _Dense:
    """What a dense checkpoint costs.

    stall_s: added to training by each. latency: iterations until it can be used. load_s: to read it again, and
    load_per_node_s: for each node that was lost.
    """

    stall_s: float
    latency: int
    load_s: float
    load_per_node_s: float = 0.0

    def behaviour(
        self, name: str, setting: SystemSetting, interval: int, replicas: Replicas | None = None
    ) -> Behaviour:
        """The system that takes one every `interval` iterations; `replicas` where they are only in memory."""

        def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
            if replicas is None or replicas.survive(down):
                load_s = self.load_s + self.load_per_node_s * len(nodes)
                return setting.rewind(iteration, interval, self.latency, load_s)
            return setting.from_storage(iteration)

        lost_s = (interval / 2 + self.latency) * setting.iteration_s
        expected_s, overhead_s = self.fixed_s(setting) + lost_s, self.stall_s / interval
        if replicas is not None:
            expected_s, overhead_s = replicas.expected_s(expected_s), overhead_s + setting.persist_overhead_s
        return Behaviour(name, setting.iteration_s, interval, 1, overhead_s, expected_s, recover)

    def fixed_s(self, setting: SystemSetting) -> float:
        """The part of a recovery that no interval changes, but for the latency."""
        return setting.restart(self.load_s + self.load_per_node_s, 0, 0.0).total_s


@dataclass(frozen=True)
class CheckFreq:
    """Checkpoints go to storage, in the shortest interval in which they slow training by at most 3 % (MoEvement 5.2).

    While one is uploaded, iterations take longer. Nodes that survive have their snapshots in memory; what replaces the
    others reads from storage. interval: iterations; None: CheckFreq's policy.
    """

    interval: int | None = None
    name: str = "checkfreq"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`."""
        dense = replace(_uploaded(setting), load_s=0.0, load_per_node_s=setting.upload_s / setting.nodes)
        costs = Costs(setting.iteration_s, dense.stall_s, setting.upload_s)
        return dense.behaviour(self.name, setting, self.interval or adapted_interval("checkfreq", costs, mtbf_s))


@dataclass(frozen=True)
class Gemini:
    """Checkpoints go to peers' memory, in the interval that is best for the mean time between failures (5.2).

    Copies move while training leaves the NIC alone; for what an iteration has no time for, training waits.
    interval: iterations; None: the oracle's. shortest: instead that of `full_interval`, with which jobs run. replicas:
    None as in the constants.
    """

    interval: int | None = None
    replicas: int | None = None
    name: str = "gemini"
    shortest: bool = False

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`."""
        count = setting.constants.replicas if self.replicas is None else self.replicas
        dense = _lagging(setting, count, self.interval) if self.shortest else _in_memory(setting, count)
        interval = self.interval or (
            full_interval(setting, mtbf_s, count) if self.shortest else _oracle(dense, setting, mtbf_s)
        )
        return dense.behaviour(self.name, setting, interval, Replicas(setting, count))


@dataclass(frozen=True)
class TorchDistSystem:
    """Megatron-Core's distributed checkpoints, in the interval that Daly's estimate gives.

    asynchronous: training waits for the snapshot and continues while it is uploaded. interval: iterations; None:
    Daly's.
    """

    asynchronous: bool = False
    interval: int | None = None

    @property
    def name(self) -> str:
        """Name of the system."""
        return "torch_dist_async" if self.asynchronous else "torch_dist"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`."""
        snapshot_s = setting.dense_bytes / setting.host_bytes_per_s
        if self.asynchronous:
            uploaded = _uploaded(setting)
            dense = _Dense(uploaded.stall_s + snapshot_s, uploaded.latency, uploaded.load_s)
        else:
            dense = _Dense(setting.constants.persist_stall_s + snapshot_s + setting.upload_s, 0, setting.upload_s)
        costs = Costs(setting.iteration_s, dense.stall_s, setting.upload_s if self.asynchronous else 0.0)
        return dense.behaviour(self.name, setting, self.interval or adapted_interval("daly", costs, mtbf_s))


def adapted_interval(policy: str, costs: Costs, mtbf_s: float) -> int:
    """Iterations between two snapshots of `full` with `--moe-ckpt-interval-policy`, once it has measured these costs.

    What a snapshot has plays no part in that: the model is one operator.

    Args:
        policy: Value of the flag.
        costs: Seconds of an iteration and of a snapshot, as a job measures them.
        mtbf_s: Mean time between failures that the job is configured with, in seconds; below 1 counts as 1.
    """
    job = layer_job(0, 1, 1, ENDLESS, strategy="full", interval_policy=policy, mtbf_s=max(1.0, mtbf_s))
    driver = Driver(job, costs=lambda plan: costs)
    taken: list[int] = []
    # The first two are planned before the first one's costs are known.
    while len(taken) < 2 + SETTLED_AFTER:
        taken += [] if driver.iterate() is None else [driver.iteration]
    return taken[-1] - taken[-2]


def _uploaded(setting: SystemSetting) -> _Dense:
    """A checkpoint that is uploaded while training continues."""
    constants = setting.constants
    stall_s = constants.persist_stall_s + constants.upload_slowdown * setting.upload_s
    return _Dense(stall_s, setting.upload_iterations, setting.upload_s)


NEAR = 0.005
"""Of ETTR, what a shorter interval of `full` may cost: less than the model can tell."""


def full_interval(setting: SystemSetting, mtbf_s: float, replicas: int) -> int:
    """The interval that a job with `full` should have: the shortest in which there is time to copy, and which costs at
    most `NEAR` of the ETTR of the best one.

    Args:
        setting: The job on its cluster.
        mtbf_s: Mean time between failures of the whole job, in seconds.
        replicas: Peers that keep a copy of each snapshot.
    """
    dense, iteration_s = _lagging(setting, replicas), setting.iteration_s
    restart_s = dense.fixed_s(setting) + dense.latency * iteration_s

    def quality(interval: int) -> float:
        recovery_s = expected_recovery_s(iteration_s, interval, restart_s)
        return ettr(iteration_s, dense.stall_s, interval, recovery_s, mtbf_s)

    best = max(dense.latency, _oracle(dense, setting, mtbf_s))
    return next(one for one in range(dense.latency, best + 1) if quality(one) >= quality(best) - NEAR)


def _lagging(setting: SystemSetting, replicas: int, interval: int | None = None) -> _Dense:
    """As a job with `full` has it: training waits for the copy to the host alone, and replicas may take iterations; of
    an interval that is given, as many as it has, before training waits for them too."""
    at_once = _in_memory(setting, replicas)
    host_s = max(0.0, setting.whole_bytes / setting.host_bytes_per_s - setting.iteration_s)
    copy_s = setting.whole_bytes / setting.peer_bytes_per_s(replicas)
    latency = max(COPIED_AFTER, math.ceil(copy_s / max(setting.free_s, 1e-6 * setting.iteration_s)))
    late_s = replicas * setting.load_s - interval * setting.free_s if interval else 0.0
    if late_s > 0:
        host_s, latency = max(host_s, late_s), COPIED_AFTER
    return replace(at_once, stall_s=host_s + setting.slowed_s(setting.whole_bytes, replicas), latency=latency)


def _in_memory(setting: SystemSetting, replicas: int) -> _Dense:
    """A checkpoint in the memory of a node and of peers, of which training waits for what it has no time for."""
    copy_s = setting.whole_bytes / setting.peer_bytes_per_s(replicas)
    stall_s = max(0.0, copy_s - setting.free_s) + setting.slowed_s(setting.whole_bytes, replicas)
    return _Dense(stall_s, COPIED_AFTER, setting.load_s)


def _oracle(dense: _Dense, setting: SystemSetting, mtbf_s: float) -> int:
    """Looked for up to twice the interval at which ETTR is highest if intervals need not be whole."""
    iteration_s = setting.iteration_s
    fixed_s = dense.fixed_s(setting) + dense.latency * iteration_s
    highest = math.sqrt(2 * dense.stall_s * (mtbf_s + fixed_s)) / iteration_s
    return gemini_oracle(iteration_s, dense.stall_s, mtbf_s, 2 * math.ceil(highest) + 1, fixed_s)
