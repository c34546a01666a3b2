"""A strategy of a running job without its job: the real object, called as the coordinator calls it.

What the ranks tell each other after the step of an iteration is heard before the next step, and the snapshot of an
iteration is copied and replicated during the one after it. So before `plan(t)` come, as in `snapshot/coordinator.py`,

    counted(t - 1)                    what was routed
    settled(plan of t - 2), measured  that all replicas are there, and what that cost
    paced                             how fast copies are

`Driver` makes these calls with costs and counts that the simulator expects. tests/unit/ettr/test_driver.py compares its
plans, snapshot by snapshot, with those of a job under the real coordinator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.copies import Level
from megatron.core.dist_checkpointing.moe.policy.shards import owned_operators, shard_sizes
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Costs, Job, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.types import (
    Copy,
    Inventory,
    Lost,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Part,
    RecoveryPlan,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

from .inputs import TrainingJob

Counts = Sequence[Sequence[int]]
"""Tokens of one iteration, by MoE layer and expert."""

SETTLED_AFTER = 2
"""Iterations from a snapshot's plan until the strategy hears that all ranks have it."""

NON_EXPERT = OperatorId(0, OperatorKind.NON_EXPERT)

_REMEMBERED = 1024
"""Newest snapshots that are kept as if no one freed them."""

ENDLESS = 10**9
"""Iterations of a training whose end plays no part."""


class Driver:
    """One strategy from its beginning, iteration by iteration.

    Args:
        job: What the strategy is told of its job.
        counts: Tokens of every iteration, for a strategy that counts them.
        pace: Of every iteration, for a strategy that wants it.
        costs: What a snapshot costs, by its plan; None: nothing is measured.
    """

    def __init__(
        self,
        job: Job,
        *,
        counts: Counts = (),
        pace: Throughput | None = None,
        costs: Callable[[SnapshotPlan], Costs] | None = None,
    ) -> None:
        self.strategy: Strategy = STRATEGIES[job.config.strategy](job)
        self.iteration = 0
        self._job, self._counts, self._pace, self._costs = job, counts, pace, costs
        self._stored = self.strategy
        self._plans: tuple[SnapshotPlan, ...] = ()
        self._is_told = False

    @property
    def experts(self) -> int:
        """Of a layer."""
        return self._job.num_experts

    @property
    def tokens(self) -> int:
        """Tokens that a layer routes in an iteration."""
        return sum(self._counts[0])

    def iterate(self) -> SnapshotPlan | None:
        """Train one iteration; what is snapshotted after it."""
        self.iteration += 1
        if self._is_told:
            self._hear()
        self._is_told = True
        # What the strategy had to remember at the end of the iteration before is stored with the snapshot of that one.
        # Its state is made of values, so that a shallow copy keeps it.
        self._stored = copy.copy(self.strategy)
        plan = self.strategy.plan(self.iteration)
        if plan is not None:
            self._plans = (*self._plans, plan)[-_REMEMBERED:]
        return plan

    def fork(self) -> Driver:
        """Another driver that goes on from here by itself."""
        other = copy.copy(self)
        other.strategy = copy.copy(self.strategy)
        return other

    def recovered(self) -> RecoveryPlan:
        """Lose the iteration under way and the newest snapshot, which is still being copied, and go on from the one
        before, by the strategy's own plan on one rank."""
        usable = tuple(plan for plan in self._plans if plan.iteration < self.iteration)
        copies = tuple(Copy(0, plan, Tier.PEER_MEMORY, 0) for plan in usable)
        inventory = Inventory({0: frozenset(self._job.operators)}, {0: copies})
        plan = self.strategy.recover(inventory, Lost(), self._job.topology)
        data = self._stored.to_data()
        self.strategy = STRATEGIES[self._job.config.strategy](self._job)
        plan = self.strategy.resumed(plan, data, self.iteration)
        self.iteration, self._is_told = plan.target, False
        self._plans = tuple(snapshot for snapshot in usable if snapshot.iteration <= plan.target)
        return plan

    def _hear(self) -> None:
        if self.strategy.counts_tokens:
            self.strategy.counted(self.iteration - 1, self._counts)
        for plan in self._plans[-SETTLED_AFTER:]:
            if plan.iteration == self.iteration - SETTLED_AFTER:
                self.strategy.settled(plan, Level.SNAPSHOT, True)
                if self._costs is not None:
                    self.strategy.measured(self._costs(plan))
        if self.strategy.needs_pace and self._pace is not None:
            self.strategy.paced(self._pace)


def strategy_job(job: TrainingJob, **flags: Any) -> Job:
    """What a strategy is told of a training job; one rank stands for all at the same stage and expert-parallel rank."""
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    lanes = owned_operators(job.shape, job.topology).values()
    own = {rank: {operator: sizes[operator] for operator in operators} for rank, operators in enumerate(lanes)}
    return Job(
        MoECheckpointConfig(**flags),
        job.shape.operators,
        job.topology,
        job.tokens,
        ENDLESS,
        topk=max(1, job.shape.moe_router_topk),
        sizes=own,
    )


def layer_job(experts: int, topk: int, tokens: int, iterations: int, **flags: Any) -> Job:
    """A job of one MoE layer on one rank, which stands for all layers where these are alike."""
    operators = tuple(sorted([NON_EXPERT, *(expert(0, index) for index in range(experts))]))
    return Job(MoECheckpointConfig(**flags), operators, Topology(1), tokens, iterations, topk=topk)


def plan_bytes(plan: SnapshotPlan, sizes: Mapping[OperatorId, OperatorSize]) -> int:
    """What a rank that owns operators of these sizes copies of a snapshot."""
    return sum(
        size.full_bytes if Part.MASTER_AND_MOMENTS in plan.parts[operator] else size.weights_bytes
        for operator, size in sizes.items()
        if operator in plan.parts
    )
