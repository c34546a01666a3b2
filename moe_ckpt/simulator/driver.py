"""A strategy of a job without the job: the real object, called as the coordinator calls it.

What the ranks tell each other after the step of an iteration is heard before the next step, and the snapshot of an
iteration is copied and replicated during the one after it. So before `plan(t)` come, as in `snapshot/coordinator.py`,

    counted(t - 1)                    what was routed
    settled(plan of t - 2), measured  that all replicas are there, and what that cost
    persistent(plan of t - 2)         what of it goes to storage, which it has reached at once
    throughput_measured                             how fast copies are

`Driver` makes these calls for the simulator and for `moe-ckpt plan`, with costs and counts that they expect. Nothing
fails and nothing is late. tests/unit/ettr/test_driver.py compares its plans, snapshot by snapshot, with those of a job
under the real coordinator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Costs, Job, Piece, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.types import (
    Copy,
    Inventory,
    Level,
    Lost,
    ModelShape,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Part,
    Precision,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

from .shards import owned_operators, shard_sizes

Counts = Sequence[Sequence[int]]
"""Tokens of one iteration, by MoE layer and expert."""

SETTLED_AFTER = 2
"""Iterations from a snapshot's plan until the strategy hears that all ranks have it."""

NON_EXPERT = OperatorId(0, OperatorKind.NON_EXPERT)

_REMEMBERED = 1024
"""Newest snapshots that are kept as if no one freed them."""

COPIED_AFTER = 1
"""Iterations from a snapshot's own until a fault finds it complete: copies end before the next optimizer step."""

ENDLESS = 10**9
"""Iterations of a training whose end plays no part."""


@dataclass(frozen=True)
class SettledSnapshot:
    """A snapshot that has settled.

    stored: the strategy with what it had to remember then. persisted: what of it, and of the snapshots that it
    completes, continued to storage.
    """

    plan: SnapshotPlan
    pieces: tuple[Piece, ...]
    stored: Strategy = field(repr=False)
    persisted: tuple[SnapshotPlan, ...] = ()


def newest_usable(iteration: int, latency: int = COPIED_AFTER) -> int:
    """The newest iteration whose snapshot a fault finds complete; 0: none.

    The fault strikes before the optimizer step of the iteration that it cuts off. After that step, a job can have one
    snapshot more.

    Args:
        iteration: Number of the iteration that the fault cuts off, counted from 0: as many have ended.
        latency: Iterations from a snapshot until it can be used.
    """
    return max(0, iteration - latency)


class Driver:
    """One strategy from its beginning, iteration by iteration.

    Args:
        job: What the strategy is told of its job.
        counts: Tokens of an iteration, for a strategy that counts them.
        pace: Of every iteration, for a strategy that wants it.
        costs: What a snapshot costs, by its plan; None: nothing is measured.
        fits: Whether memory has room for what the strategy asks for; where it has not, the strategy asks for less.

    Attributes:
        given_up: What it gave up for that, in words.
    """

    def __init__(
        self,
        job: Job,
        counts: Callable[[int], Counts] = lambda iteration: (),
        *,
        pace: Throughput | None = None,
        costs: Callable[[SnapshotPlan], Costs] | None = None,
        fits: Callable[[Strategy], bool] = lambda strategy: True,
    ) -> None:
        self.strategy: Strategy = STRATEGIES[job.config.strategy](job)
        self.given_up: tuple[str, ...] = ()
        self._fits = fits
        self._fit()
        self.iteration = 0
        self._job, self._counts, self._pace, self._costs = job, counts, pace, costs
        self._stored = self.strategy
        self._plans: tuple[SnapshotPlan, ...] = ()
        self._waiting: tuple[SettledSnapshot, ...] = ()
        self._has_news = False

    def iterate(self) -> SnapshotPlan | None:
        """Train one iteration; what is snapshotted after it."""
        self._hear()
        return self._plan()

    def snapshots(self, last: int) -> Iterator[SettledSnapshot]:
        """Train up to iteration `last`; each snapshot, once it has settled."""
        while self.iteration < last and not self.strategy.gave_up:
            yield from self._hear()
            self._plan()
        yield from self._hear()
        yield from self._settle(last)

    def fork(self) -> Driver:
        """Another driver that continues from here by itself."""
        other = copy.copy(self)
        other.strategy = copy.copy(self.strategy)
        return other

    def recovered(self) -> RecoveryPlan:
        """Lose the iteration under way and the newest snapshot, which is still being copied, and continue from the one
        before, by the strategy's own plan on one rank. Right after another recovery nothing is being copied."""
        newest = newest_usable(self.iteration, COPIED_AFTER if self._has_news else 0)
        usable = tuple(plan for plan in self._plans if plan.iteration <= newest)
        copies = tuple(Copy(0, plan, Tier.PEER_MEMORY, 0) for plan in usable)
        inventory = Inventory({0: frozenset(self._job.operators)}, {0: copies})
        plan = self.strategy.recover(inventory, Lost(), self._job.topology)
        data = self._stored.to_data()
        self.strategy = STRATEGIES[self._job.config.strategy](self._job)
        plan = self.strategy.resumed(plan, data, self.iteration)
        self.iteration, self._has_news, self._waiting = plan.target, False, ()
        self._plans = tuple(snapshot for snapshot in usable if snapshot.iteration <= plan.target)
        return plan

    def _plan(self) -> SnapshotPlan | None:
        self.iteration += 1
        self._has_news = True
        plan = self.strategy.plan(self.iteration)
        if plan is not None and self._fit():
            plan = self.strategy.plan(self.iteration)
        if plan is not None:
            self._plans = (*self._plans, plan)[-_REMEMBERED:]
            self._waiting = (*self._waiting, SettledSnapshot(plan, self.strategy.pieces(plan), self.strategy))
        return plan

    def _fit(self) -> bool:
        """As `snapshot.memory_limit` in a job; whether anything was given up."""
        before = len(self.given_up)
        while not self._fits(self.strategy) and (instead := self.strategy.buffers_refused()):
            self.given_up += (instead,)
        return len(self.given_up) > before

    def _hear(self) -> list[SettledSnapshot]:
        """What the ranks tell each other of this iteration; the snapshot before it, which has settled."""
        if self._has_news and self.strategy.counts_tokens:
            self.strategy.on_token_counts(self.iteration, self._counts(self.iteration))
        settled = self._settle(self.iteration - 1)
        if self._has_news and self.strategy.needs_throughput and self._pace is not None:
            self.strategy.throughput_measured(self._pace)
        self._has_news = False
        # What the strategy has to remember now is stored with the snapshot of this iteration. Its state is made of
        # values, so that a shallow copy keeps it.
        self._stored = copy.copy(self.strategy)
        self._waiting = tuple(replace(taken, stored=self._stored) for taken in self._waiting)
        return settled

    def _settle(self, last: int) -> list[SettledSnapshot]:
        """All ranks have sealed the snapshots up to `last`, and have in storage what continues to it."""
        settled = []
        for taken in self._waiting:
            if taken.plan.iteration <= last:
                self.strategy.on_commit(taken.plan, Level.SNAPSHOT, ok=True)
                self.strategy.on_commit(taken.plan, Level.REPLICAS, ok=True)
                if self._costs is not None:
                    self.strategy.on_costs(self._costs(taken.plan))
                persisted = self.strategy.persistent(taken.plan)
                for plan in persisted:
                    self.strategy.on_commit(plan, Level.PERSIST, ok=True)
                settled.append(replace(taken, persisted=persisted))
        self._waiting = self._waiting[len(settled) :]
        return settled


def strategy_job(
    shape: ModelShape,
    topology: Topology,
    precision: Precision,
    config: MoECheckpointConfig,
    *,
    tokens: int = 1,
    iterations: int = ENDLESS,
    frozen_experts: bool = False,
) -> Job:
    """The job as a strategy sees it.

    One rank stands for all at the same pipeline stage and expert-parallel rank. In a job the distributed optimizer cuts
    shards at any byte, so operators of a rank may differ from these by a few bytes.

    Args:
        shape: The model.
        topology: The rank layout.
        precision: Bytes per parameter of each part of the state.
        config: The checkpoint flags.
        tokens: Tokens of one iteration.
        iterations: Length of the job, in iterations.
        frozen_experts: Whether routed experts are not trained.
    """
    sizes = shard_sizes(shape, topology, precision, frozen_experts=frozen_experts)
    lanes = owned_operators(shape, topology).values()
    return Job(
        config,
        shape.operators,
        topology,
        tokens,
        iterations,
        topk=max(1, shape.moe_router_topk),
        tied_embeddings=tied_embeddings(shape, topology),
        sizes={rank: {operator: sizes[operator] for operator in operators} for rank, operators in enumerate(lanes)},
        unchanging=frozenset(one for one in shape.operators if one.is_expert and frozen_experts),
    )


def tied_embeddings(shape: ModelShape, topology: Topology) -> bool:
    """Whether the first and the last pipeline stage share the embeddings.

    Args:
        shape: The model; says whether embedding and output layer share their weights.
        topology: The rank layout; with one pipeline stage nothing is shared between stages.
    """
    return not shape.untie_embeddings_and_output_weights and topology.pp > 1


def layer_job(experts: int, topk: int, tokens: int, iterations: int, **flags: Any) -> Job:
    """A job of one MoE layer on one rank, which stands for all layers where these are alike.

    Args:
        experts: Number of experts of the layer; 0: a dense layer.
        topk: Experts that the router chooses for each token.
        tokens: Tokens of one iteration.
        iterations: Length of the job, in iterations.
        **flags: Fields of `MoECheckpointConfig`.
    """
    operators = tuple(sorted([NON_EXPERT, *(expert(0, index) for index in range(experts))]))
    return Job(MoECheckpointConfig(**flags), operators, Topology(1), tokens, iterations, topk=topk)


def plan_bytes(plan: SnapshotPlan, sizes: Mapping[OperatorId, OperatorSize], precision: Precision | None = None) -> int:
    """Bytes that a rank copies for one snapshot.

    Args:
        plan: The parts of each operator that the snapshot has.
        sizes: Operators of which the rank owns shards, with the bytes of these.
        precision: Bytes per parameter of each part, for plans with parts other than the complete state or the weights
            alone, as scopes of `pec` make them; None: the plan has no such parts.
    """
    total = 0
    for operator, size in sizes.items():
        part = plan.parts.get(operator, Part.NOTHING)
        if Part.MASTER_AND_MOMENTS in part:
            total += size.full_bytes
        elif precision is not None and part & Part.MASTER_AND_MOMENTS:
            total += size.full_bytes * precision.bytes_per_parameter(part) // precision.full_bytes
        elif part:
            total += size.weights_bytes
    return total
