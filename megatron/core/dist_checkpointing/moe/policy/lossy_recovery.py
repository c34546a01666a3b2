"""Lossy recovery: the newest copies merged, and every lost token counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ..types import Inventory, Lost, OperatorId, Part, RecoveryPlan, ReplaySegment, Scope, Topology
from .availability import RankState, Record, StageState, copy_sources, rank_states, refusals, stage_states
from .recovery import impossible

PARTS = (Part.MASTER, Part.MOMENTS)
Newest = Mapping[Part, Mapping[OperatorId, int]]


def plan_lossy_recovery(
    inventory: Inventory,
    lost: Lost,
    topology: Topology,
    tokens_between: Callable[[OperatorId, int, int], int],
    *,
    target: int | None = None,
) -> RecoveryPlan:
    """Plan a recovery under `pec` or `selective` (MoC 5.1, MOETION 6).

    All ranks go to the newest iteration (up to `target`, if given) at which every operator that is no expert can be
    had in full. Each expert takes the newest master weights and the newest moments up to there, from the preferred
    tier, the same iteration on all ranks that own a shard of it. `tokens_between(expert, after, upto)` counts the
    tokens routed to an expert in iterations after+1..upto; an update counts as lost when either part lacks it.

    Raises RecoveryImpossible when there is no such iteration, or an expert has no copy at all; UsageError when the
    inventory leaves out a rank.
    """
    states = rank_states(inventory, lost, topology, PARTS)
    stages = stage_states(states, topology)
    reached = _newest_iteration(stages, target)
    found: list[Newest] = [{part: stage.newest(part, reached) for part in PARTS} for stage in stages]
    for number, (stage, newest) in enumerate(zip(stages, found, strict=True)):
        if missing := stage.required - (newest[Part.MASTER].keys() & newest[Part.MOMENTS].keys()):
            raise impossible(f"iteration {reached}", target, number, missing)
    oldest = {
        operator: min(newest[part][operator] for part in PARTS) for newest in found for operator in newest[Part.MASTER]
    }
    stale = sorted(operator for operator, iteration in oldest.items() if iteration < reached)
    return RecoveryPlan(
        reached,
        Scope.GLOBAL,
        (ReplaySegment(tuple(range(topology.pp)), reached, reached),),
        tuple(
            source
            for stage, newest in enumerate(found)
            for source in copy_sources(states, topology.stage_ranks(stage), partial(_records, newest=newest))
        ),
        tuple(refusals(states, reached)),
        lost_tokens={operator: tokens_between(operator, oldest[operator], reached) for operator in stale},
        lost=lost,
    )


def _newest_iteration(stages: Sequence[StageState], target: int | None) -> int:
    """The newest iteration with all that is no expert; experts may be older."""
    where = "any iteration" if target is None else f"iteration {target} or one before it"
    candidates: set[int] | None = None
    for number, stage in enumerate(stages):
        dense = frozenset(operator for operator in stage.required if not operator.is_expert)
        complete = {
            iteration
            for iteration in stage.lacks[Part.MASTER]
            if (target is None or iteration <= target)
            and not any(dense & stage.lacking(part, iteration) for part in PARTS)
        }
        candidates = complete if candidates is None else candidates & complete
        if not candidates:
            raise impossible(where, target, number, dense)
    return max(candidates or ())


def _records(state: RankState, newest: Newest) -> Iterator[Record]:
    """Which copy, by its index, gives which part of which operators; preferred tiers first."""
    wanted = {part: {operator: newest[part][operator] for operator in state.required} for part in PARTS}
    for index, copy in enumerate(state.copies):
        given = {
            part: frozenset(
                operator
                for operator in (copy.plan.giving(part) & wanted[part].keys()) - copy.corrupt
                if wanted[part][operator] == copy.plan.iteration
            )
            for part in PARTS
        }
        both = given[Part.MASTER] & given[Part.MOMENTS]
        for part, operators in ((Part.MASTER_AND_MOMENTS, both), *((part, given[part] - both) for part in PARTS)):
            if operators:
                yield index, part, operators
        for part in PARTS:
            for operator in given[part]:
                del wanted[part][operator]
