"""Who takes part in which segment of a recovery, where each rank begins, and what reaches a segment from outside."""

from __future__ import annotations

from collections.abc import Iterator

from ..types import Direction, RecoveryPlan, ReplaySegment, Topology


def ranks_of(segment: ReplaySegment, topology: Topology) -> tuple[int, ...]:
    """The ranks of all stages of a segment, ascending."""
    return tuple(rank for stage in sorted(segment.stages) for rank in topology.stage_ranks(stage))


def segment_of(plan: RecoveryPlan, rank: int, topology: Topology) -> ReplaySegment | None:
    """The segment that a rank restores, with or without a replay; None where it resumes from its parked state."""
    return next((segment for segment in plan.segments if topology.stage(rank) in segment.stages), None)


def base_for(plan: RecoveryPlan, rank: int, topology: Topology) -> int:
    """The iteration whose state a rank restores at first."""
    segment = segment_of(plan, rank, topology)
    if segment is not None:
        return segment.base
    return plan.target - (rank in plan.roll_forward)


def restored(segment: ReplaySegment) -> range:
    """The iterations whose snapshots make a segment's state dense."""
    return range(segment.base, segment.base + sum(map(bool, segment.frozen)) + 1)


def sends_all(segment: ReplaySegment, iteration: int, topology: Topology) -> bool:
    """Whether a replay of `iteration` sends over all its stage boundaries what the iteration sent when it ran first.

    Gradients flow down to the lowest layer that is active anywhere; stages outside count as active for this. A stage
    with none of them in front of it may send zeros back, which the neighbour that is frozen does not need.
    """
    if not segment.frozen[iteration - segment.base - 1]:
        return True
    return 0 not in segment.stages or (1 not in segment.stages and topology.vpp == 1)


def feeds(segment: ReplaySegment, topology: Topology) -> Iterator[tuple[int, int, Direction]]:
    """Ranks at the edges of a segment, each with the rank outside that sent to it and the direction.

    With virtual stages the last stage is beside the first one, and with two of them each is on both sides of the other.
    """
    for stage in sorted(segment.stages):
        for step, way in ((-1, Direction.FORWARD), (1, Direction.BACKWARD)):
            other = stage + step
            if topology.vpp > 1:
                other %= topology.pp
            if other in range(topology.pp) and other not in segment.stages:
                for rank in topology.stage_ranks(stage):
                    yield rank, rank + (other - stage) * topology.ranks_per_stage, way
