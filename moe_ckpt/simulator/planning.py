"""What the checkpoints of a job will be: its own strategy, driven with what copies and tokens are expected to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.strategies import Job, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.strategies.memory_report import memory_report
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorSize, Part, SnapshotPlan

from .behaviour import Behaviour
from .driver import SETTLED_AFTER, Counts, Driver, SettledSnapshot, plan_bytes, strategy_job
from .memory import logs_of_stage
from .shards import owned_operators
from .systems import CheckpointSystem, Gemini, Moc, Moetion, MoEvement
from .systems.links import SystemSetting
from .systems.sparse import LONGEST, SETTLED, expected_costs

LAST = 100_000
"""Iterations that a strategy is driven through, at most."""

FEWEST = 64
"""Snapshots that are looked at, at least, where no number of them has every expert."""

Lane = tuple[int, int]
"""(pipeline stage, expert-parallel rank): its ranks have the same operators."""


@dataclass(frozen=True)
class PlannedJob:
    """A job with its strategy, as it is when it has settled.

    start: a driver at the first iteration. turn: snapshots until each operator was saved once. interval: iterations
    from one to the next. given_up: what the strategy gave up so that memory has room, in words.
    """

    setting: SystemSetting
    job: Job
    start: Callable[[], Driver] = field(repr=False)
    strategy: Strategy = field(repr=False)
    turn: tuple[SettledSnapshot, ...] = field(repr=False)
    interval: int
    given_up: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Peers that keep a copy of each snapshot."""
        return self.job.replicas

    @property
    def exact(self) -> bool:
        """Whether a recovery gives back every update."""
        return self.strategy.report() is None

    @property
    def logs(self) -> bool:
        """Whether boundary logs confine a recovery to the stages that lost their state."""
        return keeps_logs(self.job, self.strategy)

    @property
    def window(self) -> int:
        """Iterations over which a checkpoint spreads."""
        return len(self.turn[0].pieces[0].span)

    @cached_property
    def lanes(self) -> dict[Lane, Mapping[OperatorId, OperatorSize]]:
        """What a rank owns of each operator."""
        owned = owned_operators(self.setting.job.shape, self.setting.job.topology)
        return dict(zip(owned, self.job.sizes.values(), strict=True))

    @cached_property
    def copied(self) -> dict[Lane, tuple[int, ...]]:
        """Bytes that a rank copies to host memory, of each snapshot of the turn."""
        return {lane: tuple(self._nbytes(one.plan, own) for one in self.turn) for lane, own in self.lanes.items()}

    @cached_property
    def sent(self) -> dict[Lane, tuple[int, ...]]:
        """Bytes that a rank sends to all of its peers."""
        plans = [_sent(taken) for taken in self.turn]
        return {
            lane: tuple(self.replicas * self._nbytes(plan, own) for plan in plans) for lane, own in self.lanes.items()
        }

    @property
    def busiest(self) -> Lane:
        """The first of those that copy most."""
        return max(self.copied, key=lambda lane: (max(self.copied[lane]), [-at for at in lane]))

    def stall_s(self, lane: Lane, index: int) -> float:
        """Seconds that training waits for a snapshot that does not fit into an iteration.

        Args:
            lane: Pipeline stage and expert-parallel rank of the ranks that are asked for.
            index: Number of the snapshot in the turn.
        """
        return max(0.0, self.copied[lane][index] / self.setting.host_bytes_per_s - self.setting.iteration_s)

    def lag_s(self, lane: Lane, index: int) -> float:
        """Seconds by which replicas of a snapshot take longer than training leaves the network alone until the next.

        Args:
            lane: Pipeline stage and expert-parallel rank of the ranks that are asked for.
            index: Number of the snapshot in the turn.
        """
        has_s = self.interval * self.setting.free_s
        return max(0.0, self.sent[lane][index] / self.setting.fetch_bytes_per_s - has_s)

    @property
    def is_late(self) -> bool:
        """Whether replicas of a snapshot are not there when the next one is due."""
        return any(self.lag_s(lane, index) for lane in self.lanes for index in range(len(self.sent[lane])))

    def node_bytes(self) -> int:
        """What checkpoints take of the memory of a full node."""
        return node_bytes(self.job, self.setting, self.strategy)

    def behaviour(self, mtbf_s: float) -> Behaviour | None:
        """What the checkpoints cost over a training; None for a strategy or interval that no system is modelled for."""
        config, iteration_s = self.job.config, self.setting.iteration_s
        if config.strategy in ("pec", "selective") and self.interval > 1:
            return None
        threshold = 1.0 if config.plt_threshold is None else config.plt_threshold
        share = config.pec_k_snapshot / max(1, self.job.num_experts)
        systems: dict[str, CheckpointSystem] = {
            "full": Gemini(self.interval, shortest=True),
            "sparse": MoEvement(self.window, self.logs),
            "pec": Moc(share, threshold * 3600 / iteration_s),
            "selective": Moetion(),
        }
        system = systems.get(config.strategy)
        return None if system is None else system.behaviour(self.setting, mtbf_s)

    def _nbytes(self, plan: SnapshotPlan, sizes: Mapping[OperatorId, OperatorSize]) -> int:
        return plan_bytes(plan, sizes, self.setting.job.precision)


def planned_job(
    setting: SystemSetting,
    config: MoECheckpointConfig,
    counts: Callable[[int], Counts] = lambda iteration: (),
    *,
    limit_bytes: int | None = None,
    frozen_experts: bool = False,
) -> PlannedJob:
    """Drive the strategy of a job until it has settled.

    Args:
        setting: The job on its cluster.
        config: Its `--moe-ckpt-*` flags.
        counts: Tokens of an iteration.
        limit_bytes: Of a node, what checkpoints may take; the strategy gives up what it would in a job.
        frozen_experts: Whether training leaves the routed experts as they are.

    Raises:
        UsageError: The limit has no room for any snapshot, or the strategy never restores a state.
    """
    training = setting.job
    job = strategy_job(
        training.shape,
        training.topology,
        training.precision,
        config,
        tokens=training.tokens,
        frozen_experts=frozen_experts,
    )
    stored = replace(setting.constants, replicas=job.replicas, persist_slowdown=0.0)
    if config.persist_dir:
        every_s = config.persist_interval * setting.iteration_s
        stored = replace(setting.constants, replicas=job.replicas, persist_every_s=every_s)
    setting = replace(setting, constants=stored)

    def start() -> Driver:
        return Driver(
            job,
            counts,
            pace=Throughput(setting.iteration_s, setting.host_bytes_per_s, setting.fetch_bytes_per_s),
            costs=expected_costs(setting, job, job.replicas),
            fits=lambda strategy: limit_bytes is None or node_bytes(job, setting, strategy) <= limit_bytes,
        )

    driver = start()
    snapshots = driver.snapshots(LAST)
    turn = _turn(snapshots, frozenset(job.changing), max(FEWEST, job.num_experts))
    # The next two are planned before their costs are known.
    after = [taken.plan.iteration for taken in islice(snapshots, SETTLED_AFTER + 2)]
    if driver.strategy.gave_up:
        raise UsageError(
            f"--moe-ckpt-memory-limit {config.memory_limit} is less than snapshots and their replicas take: a job would"
            " train unprotected"
        )
    if not turn or len(after) < 2:
        raise UsageError(f"the strategy restores no state within {LAST} iterations")
    return PlannedJob(setting, job, start, driver.strategy, turn, after[-1] - after[-2], driver.given_up)


LOGS_UNDER_WAY = 2
"""Next to the logs that are kept: one that is recorded, and one that is sealed."""

_GRADIENT_BYTES = 4


def keeps_logs(job: Job, strategy: Strategy) -> bool:
    """Whether boundary logs are kept.

    Args:
        job: The job as the strategy sees it; gives the pipeline stages and `--moe-ckpt-recovery`.
        strategy: Says of how many iterations it needs logs.
    """
    return bool(strategy.logged) and job.topology.pp > 1 and job.config.recovery != "global"


def node_bytes(job: Job, setting: SystemSetting, strategy: Strategy) -> int:
    """Bytes of host memory that the ranks of a node take for snapshots, replicas, logs and parked state, each counted
    as the rank that needs most.

    Args:
        job: The job as the strategy sees it.
        setting: The same job on its cluster.
        strategy: Gives the buffers of a rank, and of how many iterations it needs logs.
    """
    topology, specs = setting.job.topology, strategy.buffer_specs()
    taken = 0
    for own in job.sizes.values():
        report = memory_report(specs, own, job.replicas)
        full_bytes = setting.job.precision.full_bytes
        parked = report.dense_bytes * (full_bytes + _GRADIENT_BYTES) // full_bytes if keeps_logs(job, strategy) else 0
        taken = max(taken, report.own_bytes + report.replica_bytes + parked)
    return min(topology.ranks_per_node, topology.world_size) * (taken + log_bytes(job, setting, strategy))


def log_bytes(job: Job, setting: SystemSetting, strategy: Strategy) -> int:
    """Bytes of boundary logs on a rank of the stage that sends most.

    Args:
        job: The job as the strategy sees it.
        setting: The same job on its cluster.
        strategy: Says of how many iterations it needs logs.
    """
    logged = strategy.logged + LOGS_UNDER_WAY if keeps_logs(job, strategy) else 0
    return max(logs_of_stage(setting.job, stage, logged) for stage in range(job.topology.pp))


def _turn(
    snapshots: Iterable[SettledSnapshot], operators: frozenset[OperatorId], most: int
) -> tuple[SettledSnapshot, ...]:
    """Snapshots until these operators are saved, or there are `most` of them, once such turns stay equally long."""
    turn: list[SettledSnapshot] = []
    missing, before, since = operators, 0, 0
    for number, snapshot in enumerate(snapshots):
        turn.append(snapshot)
        missing -= snapshot.plan.anchored
        if snapshot.plan.iteration == snapshot.pieces[0].span[-1] and (not missing or len(turn) >= most):
            since = since if len(turn) == before else number
            if number - since >= SETTLED or number >= LONGEST:
                break
            before, turn, missing = len(turn), [], operators
    return tuple(turn)


def _sent(taken: SettledSnapshot) -> SnapshotPlan:
    """Of a snapshot, what peers are sent."""
    parts: dict[OperatorId, Part] = {}
    for piece in taken.pieces:
        parts |= piece.plan.parts if piece.replicated else {}
    return SnapshotPlan(taken.plan.iteration, parts)
