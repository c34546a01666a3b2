"""A strategy driven as a job drives it: `moe-ckpt plan` shows what the strategy itself decides.

The order is that of the coordinator (`snapshot/coordinator.py`): `plan(t)` when the step of iteration t has ended, then
what all ranks report of t. Nothing fails here and nothing is late: all ranks have sealed the snapshot of t, and have
it in storage where it goes there, before the snapshot of t + 2 is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.policy.copies import Level
from megatron.core.dist_checkpointing.moe.policy.shards import owned_operators, shard_sizes
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Piece, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan

from .options import PlannedJob

SETTLED_AFTER = 2
"""Iterations from a snapshot's plan until the strategy hears that all ranks have it."""


@dataclass(frozen=True)
class Taken:
    """A snapshot as the strategy planned it.

    persisted: what of it, and of the snapshots that it completes, went on to storage. data: what the strategy had to
    remember then.
    """

    plan: SnapshotPlan
    pieces: tuple[Piece, ...]
    persisted: tuple[SnapshotPlan, ...]
    data: Mapping[str, Any] = field(repr=False)


def job_of(planned: PlannedJob, config: MoECheckpointConfig, *, iterations: int = 1) -> Job:
    """What a strategy is told of the job.

    Ranks of one pipeline stage and expert-parallel rank own the same here: one of them stands for all. In a job the
    distributed optimizer cuts shards at any byte, so operators of a rank may differ from these by a few bytes.
    """
    shape, topology = planned.shape, planned.topology
    sizes = shard_sizes(shape, topology, planned.precision)
    owned = owned_operators(shape, topology).values()
    return Job(
        config,
        shape.operators,
        topology,
        tokens_per_iteration=1,
        iterations=iterations,
        topk=max(1, shape.moe_router_topk),
        tied_embeddings=tied_embeddings(planned),
        sizes={rank: {operator: sizes[operator] for operator in operators} for rank, operators in enumerate(owned)},
    )


def new_strategy(planned: PlannedJob, config: MoECheckpointConfig) -> Strategy:
    """The strategy that the job would run. Raises UsageError for settings that contradict it."""
    return STRATEGIES[config.strategy](job_of(planned, config))


def tied_embeddings(planned: PlannedJob) -> bool:
    """Whether the first and the last pipeline stage share the embeddings."""
    return not planned.shape.untie_embeddings_and_output_weights and planned.topology.pp > 1


def driven(
    strategy: Strategy,
    iterations: Iterable[int],
    counts: Callable[[int], Sequence[Sequence[int]]],
    pace: Throughput | None = None,
) -> Iterator[Taken]:
    """Train these iterations, ascending; what was snapshotted, as it comes.

    counts: tokens of an iteration by MoE layer and expert. pace: what every iteration has time for.
    """
    waiting: list[Taken] = []
    for iteration in iterations:
        while waiting and waiting[0].plan.iteration <= iteration - SETTLED_AFTER:
            yield _settled(strategy, waiting.pop(0))
        plan = strategy.plan(iteration)
        pieces = strategy.pieces(plan) if plan is not None else ()
        if strategy.counts_tokens:
            strategy.counted(iteration, counts(iteration))
        if strategy.needs_pace and pace is not None:
            strategy.paced(pace)
        if plan is not None:
            waiting.append(Taken(plan, pieces, (), strategy.to_data()))
    for taken in waiting:
        yield _settled(strategy, taken)


def _settled(strategy: Strategy, taken: Taken) -> Taken:
    """All ranks have sealed this snapshot, and have in storage what goes on to it."""
    strategy.settled(taken.plan, Level.SNAPSHOT, ok=True)
    persisted = strategy.persistent(taken.plan)
    for stored in persisted:
        strategy.settled(stored, Level.PERSIST, ok=True)
    return replace(taken, persisted=persisted)
