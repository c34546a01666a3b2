"""One rank of a job under `sparse` with the real tracker: what it holds in memory and storage, whatever the news."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.tracking import Status
from megatron.core.dist_checkpointing.moe.snapshot.persister import PersistTask
from megatron.core.dist_checkpointing.moe.snapshot.tracker import SnapshotTracker
from megatron.core.dist_checkpointing.moe.snapshot.workers import BackgroundWork, SnapshotTask
from megatron.core.dist_checkpointing.moe.strategies import Costs, Job, Throughput
from megatron.core.dist_checkpointing.moe.strategies.sparse import Sparse
from megatron.core.dist_checkpointing.moe.strategies.sparse.windows import Timetable, timetable
from megatron.core.dist_checkpointing.moe.types import (
    Level,
    OperatorId,
    OperatorKind,
    OperatorSize,
    SnapshotPlan,
    Topology,
    expert,
)

LAYERS, EXPERTS = 2, 4
CONFIG = MoECheckpointConfig(strategy="sparse", persist_dir="/storage", persist_interval=7, window="3")


def bytes_per_step(table: Timetable, own: Mapping[OperatorId, OperatorSize]) -> tuple[int, ...]:
    """What a rank that owns operators of these sizes copies in each iteration of a window."""
    anchored = [[own[one] for one in group if one in own] for group in table.groups]
    weights = [sum(size.weights_bytes for size in group) for group in anchored]
    return tuple(
        sum(size.full_bytes for size in group) + sum(weights[step + 1 :]) for step, group in enumerate(anchored)
    )


def operators(layers: int = LAYERS, experts: int = EXPERTS) -> tuple[OperatorId, ...]:
    found = [OperatorId(-1, OperatorKind.EMBEDDING), OperatorId(layers, OperatorKind.HEAD)]
    for layer in range(layers):
        found.append(OperatorId(layer, OperatorKind.NON_EXPERT))
        if experts:
            found.append(OperatorId(layer, OperatorKind.ROUTER))
            found += [expert(layer, index) for index in range(experts)]
    return tuple(sorted(found))


def sizes_of(all_operators: tuple[OperatorId, ...], ranks: int) -> dict[int, dict[OperatorId, OperatorSize]]:
    """Experts by turns, all else on every rank; experts are ten times as large."""
    return {
        rank: {
            one: OperatorSize(120, 20) if one.is_expert else OperatorSize(12 + 12 * rank, 2 + 2 * rank)
            for one in all_operators
            if not one.is_expert or one.expert % ranks == rank
        }
        for rank in range(ranks)
    }


def job_of(config: MoECheckpointConfig = CONFIG, *, experts: int = EXPERTS, ranks: int = 2) -> Job:
    """A job of some ranks that own different operators."""
    model = operators(experts=experts)
    topology = Topology(ranks, ep=ranks if experts else 1, ranks_per_node=1)
    return Job(config, model, topology, 64, 1000, topk=2, sizes=sizes_of(model, ranks))


class DoneAtOnce:
    """A lane without a thread; what it is given to do is done when that is harmless."""

    def submit(self, work: Callable[[], None]) -> DoneAtOnce:
        work()
        return self

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> None:
        return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


@dataclass
class Tiers:
    """What lies in memory and in storage, by iteration; takes the place of the worker and of the persister."""

    memory: set[int] = field(default_factory=set)
    replicas: set[int] = field(default_factory=set)
    storage: set[int] = field(default_factory=set)

    def persist(self, task: PersistTask) -> None:
        iterations = {plan.iteration for plan in task.plans}
        assert iterations <= self.memory, "what is persisted is still in memory"
        self.storage |= iterations


@dataclass(frozen=True)
class Memory:
    """The worker's or the persister's view of the tiers."""

    tiers: Tiers
    storage: bool = False

    def behind(self, _: int) -> str:
        return ""

    def protect(self, task: SnapshotTask) -> None: ...

    def protect_again(self, task: SnapshotTask) -> None: ...

    def persist(self, task: PersistTask) -> None:
        self.tiers.persist(task)

    def free(self, names: Collection[Any], *, own: bool = True) -> None:
        if self.storage:
            self.tiers.storage -= set(names)
            return
        gone = {iteration for iteration, _ in names}
        self.tiers.replicas -= gone
        if own:
            self.tiers.memory -= gone


class Rank:
    """Trains; every iteration it hears how far all ranks are with the open rounds, as `statuses` says."""

    def __init__(self, job: Job, strategy: Sparse | None = None) -> None:
        self.job, self.strategy = job, strategy or Sparse(job)
        self.twin = Sparse(job)
        self.tiers = Tiers()
        background = BackgroundWork(lambda _: DoneAtOnce(), timeout_s=1.0, strict=False)  # type: ignore[arg-type]
        self.tracker = SnapshotTracker(
            job, self.strategy, Memory(self.tiers), Memory(self.tiers, storage=True), background
        )  # type: ignore[arg-type]
        self.iteration = 0
        self.plans: dict[int, SnapshotPlan] = {}
        self.spans: dict[int, range] = {}
        self.failed: set[int] = set()
        self.persisted: list[tuple[SnapshotPlan, ...]] = []

    def step(self, statuses: Callable[[int], Status], counts: list[list[int]] | None = None) -> SnapshotPlan | None:
        """One iteration: plan, copy, hear."""
        self.iteration += 1
        now, plan = self.iteration, None
        if self.tracker.may_begin(now):
            plan = self.strategy.plan(now)
        if plan is not None:
            self.plans[now] = plan
            (piece,) = self.strategy.pieces(plan)
            self.spans[now] = piece.span
            self.tiers.memory.add(now)
            assert len(self.tiers.memory) <= self.strategy.buffer_specs()[0].own, (now, sorted(self.tiers.memory))
            task = SnapshotTask(plan, (piece,), None)
            self.tracker.open(task)
            self.tracker.copied(task)
        if counts is not None and self.strategy.counts_tokens:
            self.strategy.on_token_counts(now, counts)
        open_ = self.tracker.rounds.open
        reports = self._in_order([statuses(at) for at in range(len(open_))])
        self.failed |= {
            one.plan.iteration
            for one, status in zip(open_, reports, strict=True)
            if status is Status.FAILED and one.level is Level.SNAPSHOT
        }
        if self.tracker.update(reports, now):
            self.strategy.on_costs(Costs(1.0, 0.0, 0.1))
        self._replicate(
            [
                one.plan.iteration
                for one, status in zip(open_, reports, strict=True)
                if one.level is Level.SNAPSHOT and status >= Status.SEALED
            ]
        )
        return plan

    def _in_order(self, said: list[Status]) -> list[Status]:
        """What can be reported: snapshots are sealed and replicated one after the other, and nothing goes back.

        A copy can fail at any time before it is sealed. Storage knows no replicas.
        """
        possible, waits = [], False
        for one, status in zip(self.tracker.rounds.open, said, strict=True):
            if one.level is Level.PERSIST:
                possible.append(Status.PENDING if status in (Status.SEALED, Status.UNDER_REPLICATED) else status)
                continue
            if one.agreed is Status.SEALED:
                status = max(status, Status.SEALED)
            elif waits and status is not Status.FAILED:
                status = Status.PENDING
            possible.append(status)
            waits = waits or not status.is_final
        return possible

    def _replicate(self, iterations: list[int]) -> None:
        """Replicas of another rank that is where this one is; they wait for room as long as news may bring it."""
        self.tiers.replicas |= set(iterations) & self.tiers.memory
        assert len(self.tiers.replicas) <= max(1, self.strategy.buffer_specs()[0].replica), self

    def restorable(self) -> set[int]:
        """Last iterations of windows that are whole in memory."""
        return {
            span[-1]
            for iteration, span in self.spans.items()
            if iteration in self.tiers.memory and self.tiers.memory.issuperset(span) and span[-1] in self.spans
        }

    def __repr__(self) -> str:
        return f"iteration {self.iteration}, memory {sorted(self.tiers.memory)}, {self.tracker.rounds}"


def protected(_: int) -> Status:
    return Status.PROTECTED


def at_random(seed: int, weights: Mapping[Status, int]) -> Callable[[int], Status]:
    """News as they come, with these weights."""
    source = random.Random(seed)
    return lambda _: source.choices(list(weights), list(weights.values()))[0]


def auto(**flags: Any) -> MoECheckpointConfig:
    return replace(CONFIG, window="auto", **flags)


def pace(strategy: Sparse, nbytes: float, times: int = 4) -> None:
    """Iterations that have time for so many bytes, as measured."""
    for _ in range(times):
        strategy.throughput_measured(Throughput(2.0, nbytes / 2.0))


def peak(window: int) -> int:
    """Bytes of the largest snapshot of a window of this size."""
    return timetable(job_of(), {}, window=window).peak_bytes


def shards_of(model: tuple[OperatorId, ...], world: int) -> dict[int, dict[OperatorId, OperatorSize]]:
    """What the distributed optimizer gives each rank; every other one has the same half of the experts."""
    found: dict[int, dict[OperatorId, OperatorSize]] = {}
    for rank in range(world):
        own: dict[OperatorId, OperatorSize] = {}
        half, part = rank % 2, rank // 2
        for members, index, parts in (
            ([one for one in model if not one.is_expert], rank, world),
            ([one for one in model if one.is_expert and one.expert // 8 == half], part, world // 2),
        ):
            elements = [100 if one.is_expert else 60 for one in members]
            first, last = sum(elements) * index // parts, sum(elements) * (index + 1) // parts
            start = 0
            for one, number in zip(members, elements, strict=True):
                inside = min(start + number, last) - max(start, first)
                start += number
                if inside > 0:
                    own[one] = OperatorSize(12 * inside, 2 * inside)
        found[rank] = own
    return found
