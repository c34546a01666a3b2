"""Exact recovery: from what is left after a failure to who restores what and who replays which iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..errors import RecoveryImpossible
from ..types import (
    CopySource,
    Direction,
    Inventory,
    Lost,
    Part,
    RecoveryPlan,
    Refusal,
    RefusalReason,
    ReplaySegment,
    Scope,
    Topology,
)
from .availability import (
    NONE,
    Everywhere,
    OperatorOrder,
    Operators,
    RankState,
    Record,
    StageState,
    Survey,
    copy_sources,
    numbers_of,
    rank_states,
    refusals,
    surveyed,
    whole,
)
from .rollback import Pipeline, Rollback, cheapest_rollbacks

Way = tuple[Pipeline, tuple[Rollback, ...] | None]
"""The pipeline as seen from a target, and the rollbacks if any lead there."""
ADVICE = "load an older checkpoint with --load and --ckpt-step"


def plan_recovery(
    inventory: Inventory,
    lost: Lost,
    topology: Topology,
    *,
    tied_embeddings: bool = False,
    target: int | None = None,
    order: OperatorOrder | None = None,
    everywhere: Everywhere | None = None,
) -> RecoveryPlan:
    """Plan an exact recovery, as under `full` and `sparse` (MoEvement 3.3, 3.4, App. A).

    Stages whose ranks all parked at the target wait; ranks one step behind roll forward with their kept gradients and
    the journaled norm. The others replay from the newest iteration that their copies allow, fed by boundary logs;
    contiguous ones jointly, unless only separate bases exist. Where logs or journal do not reach back far enough the
    scope widens, in the end to all stages.

    Args:
        inventory: What was found of all ranks; of some, with `everywhere`: then sources and refusals are theirs alone.
        lost: Ranks and nodes that failed.
        topology: The rank layout.
        tied_embeddings: First and last stage share embeddings, so that they replay together.
        target: The iteration to stand after; None takes the newest reachable one that a rank parked at or that all
            stages have snapshots of, otherwise any that can be reached.
        order: Of all operators; of those of the inventory by default.
        everywhere: Makes of what these ranks can rebuild what all can.

    Raises:
        RecoveryImpossible: No intact copies lead to the target.
        UsageError: The inventory leaves out a rank.
    """
    states = rank_states(inventory, lost, topology, (Part.MASTER_AND_MOMENTS, Part.COMPUTE), constants=True)
    order = order or order_of(inventory)
    survey = surveyed(states, inventory, lost, topology, order)
    survey = survey if everywhere is None else everywhere(survey)
    stages = whole(survey, topology)

    def rolled_back(to: int) -> Way:
        pipeline = pipeline_at(stages, survey.journal, topology, to, tied_embeddings)
        return pipeline, cheapest_rollbacks(pipeline)

    targets = _targets(stages, survey.journal) if target is None else [target]
    pipeline, rollbacks = _newest(targets, rolled_back) if target is None else rolled_back(target)
    if rollbacks is None:
        raise _impossible(stages, targets[0] if targets else None, order)
    wanted = pipeline.target
    segments = tuple(_segment(rollback, pipeline, stages, order) for rollback in rollbacks)
    restored = [source for segment in segments for source in _restored(segment, states, stages, topology, order)]
    replaying = {stage for segment in segments for stage in segment.stages}
    waiting = [state for rank, state in states.items() if topology.stage(rank) not in replaying]
    plan = RecoveryPlan(
        wanted,
        _scope(segments, topology),
        segments,
        (*restored, *_waiting(waiting, wanted)),
        (*refusals(states, wanted), *_incomplete(segments, states, topology)),
        _rolling(stages, survey.journal, wanted, replaying),
        lost=lost,
    )
    return replace(plan, wider=_wider(plan, survey, stages, topology, tied_embeddings))


def order_of(inventory: Inventory) -> OperatorOrder:
    """The numbers of all operators that the ranks of an inventory own."""
    return OperatorOrder(sorted(NONE.union(*set(inventory.required.values()))))


def _rolling(
    stages: Sequence[StageState], journal: frozenset[int], target: int, replaying: Iterable[int]
) -> tuple[int, ...]:
    """The ranks that wait and make the step of the target with the gradients that they kept."""
    if target not in journal:
        return ()
    waiting = (state for stage, state in enumerate(stages) if stage not in replaying)
    return tuple(rank for state in waiting for rank in numbers_of(state.rolling.get(target, 0)))


def _newest(targets: Sequence[int], rolled_back: Callable[[int], Way]) -> Way:
    """The way to the newest iteration at which all stages can stand, with as much of it kept as possible.

    Where all stages roll back together, nothing is gained by running further than until they are dense: from there on
    it is ordinary training. So an older iteration that leaves some stages alone may still be the better one.
    """
    dense = -1
    for wanted in targets:
        if wanted <= dense:
            break
        tried = pipeline, rollbacks = rolled_back(wanted)
        if rollbacks is None:
            continue
        reached = _dense_together(pipeline, rollbacks)
        if reached == wanted:
            return tried
        dense = max(dense, reached)
    return rolled_back(dense) if dense >= 0 else (Pipeline(-1, (), (), {}), None)


def _dense_together(pipeline: Pipeline, rollbacks: Sequence[Rollback]) -> int:
    """Up to where there is something to replay: the target, unless all stages roll back as one."""
    if len(rollbacks) != 1 or len(rollbacks[0].stages) < len(pipeline.bases):
        return pipeline.target
    return max(bases[rollbacks[0].base] for bases in pipeline.bases)


def _targets(stages: Sequence[StageState], journal: frozenset[int]) -> list[int]:
    """Iterations to try, the best first: where ranks parked or all stages are dense, then where any stage is."""
    likely = {iteration for stage in stages for iteration in stage.parked}
    for base in stages[0].dense:
        if all(base in stage.dense for stage in stages):
            dense = max(stage.dense[base] for stage in stages)
            if journal.issuperset(range(base + 1, dense + 1)):
                likely.add(dense)
    others = {dense for stage in stages for dense in stage.dense.values()} - likely
    return sorted(likely, reverse=True) + sorted(others, reverse=True)


def pipeline_at(
    stages: Sequence[StageState], journal: frozenset[int], topology: Topology, target: int, tied: bool
) -> Pipeline:
    """What the choice of rollbacks depends on.

    Args:
        stages: What each pipeline stage can rebuild.
        journal: Iterations whose global scalars are known.
        topology: The rank layout.
        target: The iteration to stand after.
        tied: First and last stage share embeddings.
    """
    return Pipeline(
        target,
        tuple(target in (stage.reaches if target in journal else stage.stands) for stage in stages),
        tuple(stage.bases(target) for stage in stages),
        {way: tuple(stage.logs_since(way, target) for stage in stages) for way in Direction},
        journal,
        circular=topology.vpp > 1,
        tied=tied,
    )


def _segment(
    rollback: Rollback, pipeline: Pipeline, stages: Sequence[StageState], order: OperatorOrder
) -> ReplaySegment:
    frozen = [0] * (pipeline.target - rollback.base)
    for stage in rollback.stages:
        for step, pending in enumerate(stages[stage].frozen(rollback.base, pipeline.target) or ()):
            if pending:
                frozen[step] |= pending
    feeding = sorted(set(_outside(rollback, pipeline))) if frozen else []
    named = tuple(map(order.named, frozen))
    return ReplaySegment(rollback.stages, rollback.base, pipeline.target, named, tuple(feeding))


def _outside(rollback: Rollback, pipeline: Pipeline) -> Iterator[int]:
    for stage in rollback.stages:
        for neighbour, _ in pipeline.neighbours(stage, 1):
            if neighbour not in rollback.stages:
                yield neighbour


def _scope(segments: Sequence[ReplaySegment], topology: Topology) -> Scope:
    if not segments:
        return Scope.NONE
    return Scope.GLOBAL if sum(len(segment.stages) for segment in segments) == topology.pp else Scope.LOCAL


def _restored(
    segment: ReplaySegment,
    states: Mapping[int, RankState],
    stages: Sequence[StageState],
    topology: Topology,
    order: OperatorOrder,
) -> Iterator[CopySource]:
    """Who loads which records for a segment."""
    for stage in segment.stages:
        if ranks := [rank for rank in topology.stage_ranks(stage) if rank in states]:
            pending = list(map(order.named, stages[stage].frozen(segment.base, segment.target) or ()))
            yield from copy_sources(states, ranks, partial(_records, base=segment.base, pending=pending))


def _records(state: RankState, base: int, pending: Sequence[Operators]) -> Iterator[Record]:
    """Which copy, by its index, gives which part of which operators; preferred tiers first."""
    before = state.required
    for iteration, frozen in enumerate(pending, start=base):
        wanted = {Part.MASTER_AND_MOMENTS: before - frozen, Part.COMPUTE: before & frozen}
        for index, copy in enumerate(state.copies):
            if copy.plan.iteration != iteration:
                continue
            for part, given in (
                (Part.MASTER_AND_MOMENTS, copy.plan.anchored),
                (Part.COMPUTE, copy.plan.giving(Part.COMPUTE)),
            ):
                served = wanted[part] & given - copy.corrupt
                if served:
                    wanted[part] -= served
                    yield index, part, served
        for index, constant in state.constants_at(iteration):
            if served := wanted[Part.MASTER_AND_MOMENTS] & constant:
                wanted[Part.MASTER_AND_MOMENTS] -= served
                yield index, Part.MASTER_AND_MOMENTS, served
        before &= frozen


def _waiting(states: Iterable[RankState], target: int) -> Iterator[CopySource]:
    """Ranks that resume from their parked state, at the target or one step before it."""
    for state in states:
        iteration = target if target in state.parked else target - 1
        parked = state.copies[state.parked[iteration]]
        yield CopySource(state.rank, iteration, parked.tier, parked.holder, Part.MASTER_AND_MOMENTS, state.required)


def _incomplete(
    segments: Sequence[ReplaySegment], states: Mapping[int, RankState], topology: Topology
) -> Iterator[Refusal]:
    """Intact copies newer than the base of their segment that take no part in rebuilding it."""
    for segment in segments:
        dense = segment.base + sum(1 for frozen in segment.frozen if frozen)
        for stage in segment.stages:
            for rank in filter(states.__contains__, topology.stage_ranks(stage)):
                for copy in states[rank].copies:
                    if dense < copy.plan.iteration <= segment.target:
                        yield Refusal(rank, copy.plan.iteration, copy.tier, copy.holder, RefusalReason.INCOMPLETE)


def _impossible(stages: Sequence[StageState], target: int | None, order: OperatorOrder) -> RecoveryImpossible:
    where = "any iteration" if target is None else f"iteration {target}"
    for stage, state in enumerate(stages):
        if not state.bases(target):
            return impossible(where, stage, order.named(_missing(state, target)))
    return RecoveryImpossible(
        f"{where} cannot be reached: each stage has copies, but from no common iteration do logs and journal lead on;"
        f" {ADVICE}"
    )


def _missing(state: StageState, limit: int | None) -> int:
    """Operators that stand in the way: without full state anywhere, or else without weights until it."""
    iterations = [
        iteration for iteration in state.lacks[Part.MASTER_AND_MOMENTS] if limit is None or iteration <= limit
    ]
    never = state.required
    for iteration in iterations:
        never &= state.lacking(Part.MASTER_AND_MOMENTS, iteration)
    return never or state.lacking(Part.MASTER_AND_MOMENTS, max(iterations))


def impossible(where: str, stage: int, missing: Operators) -> RecoveryImpossible:
    """The error that names the operators of a stage without sufficient copies.

    Args:
        where: What cannot be reached, for the message.
        stage: The pipeline stage that lacks copies.
        missing: Its operators without sufficient copies.
    """
    named = ", ".join(map(str, sorted(missing)[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return RecoveryImpossible(
        f"{where} cannot be reached: no intact copies of stage {stage} suffice for {named}; {ADVICE}"
    )


def _wider(plan: RecoveryPlan, survey: Survey, stages: Sequence[StageState], topology: Topology, tied: bool) -> str:
    """Why stages with parked state roll back, or an older iteration than the newest parked one is recovered.

    Empty where neither is so.
    """
    newest = max((iteration for stage in stages for iteration in stage.parked), default=-1)
    if newest < plan.target:
        return "no rank has parked its state" if plan.scope is Scope.GLOBAL else ""
    pipeline = pipeline_at(stages, survey.journal, topology, newest, tied)
    kept = {stage for stage in range(topology.pp) if pipeline.parked[stage]}
    moving = {stage for segment in plan.segments if segment.replayed for stage in segment.stages}
    if plan.target == newest and not kept & moving:
        return ""
    failed = sorted(set(range(topology.pp)) - kept)
    return _hindrance(pipeline, failed) or f"{_stages(failed)} cannot come to iteration {newest} alone"


def _hindrance(pipeline: Pipeline, failed: Sequence[int]) -> str:
    """What a replay of the `failed` stages alone lacks, as far as one look tells."""
    stages = len(pipeline.parked)
    if len(failed) == stages:
        return "ranks of every stage lost their state"
    if pipeline.tied and len({0, stages - 1} & set(failed)) == 1:
        return "tied embeddings or MTP couple the first and last stage, and one of them lost its state"
    for stage in failed:
        if not pipeline.bases[stage]:
            return f"no intact copies of stage {stage} lead to iteration {pipeline.target}"
        base = max(pipeline.bases[stage])
        unknown = sorted(set(range(base + 1, pipeline.target + 1)) - pipeline.journal)
        if unknown:
            return f"nobody knows how iteration {unknown[0]} came out"
        for neighbour, way in pipeline.neighbours(stage, 1):
            since = pipeline.logs_since[way][neighbour]
            if neighbour not in failed and since > base + 1:
                have = f"begin with iteration {since}" if since <= pipeline.target else "do not reach the target"
                return f"the logs of stage {neighbour} {have}; stage {stage} replays from iteration {base + 1} on"
    return ""


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
