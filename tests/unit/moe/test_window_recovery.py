"""What a recovery takes of windows: snapshots of ranks without operators too, and whole windows only."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.policy.rollback import base_for
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.inventory import Catalogue, SnapshotEntry
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import whole_windows
from megatron.core.dist_checkpointing.moe.recovery.sources import needs, with_trainer_states
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import (
    CopySource,
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    ReplaySegment,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

HEAD, EXPERT = OperatorId(2, OperatorKind.HEAD), expert(0, 0)
NONE: frozenset[OperatorId] = frozenset()
TWO = Topology(2)


def found(rank: int, iteration: int, *operators: OperatorId, journal: bool = True) -> SnapshotEntry:
    plan = SnapshotPlan(iteration, dict.fromkeys(operators, Part.MASTER_AND_MOMENTS))
    snapshot = SnapshotId(iteration, rank)
    return SnapshotEntry(snapshot, Tier.OWN_MEMORY, window=(4, 5), has_journal=journal, finder=rank, plan=plan)


def planned(*sources: CopySource) -> RecoveryPlan:
    return RecoveryPlan(5, Scope.GLOBAL, (ReplaySegment((0,), 4, 5, (frozenset({HEAD}),)),), sources)


def source(rank: int, iteration: int, operator: OperatorId) -> CopySource:
    return CopySource(rank, iteration, Tier.OWN_MEMORY, 0, Part.MASTER_AND_MOMENTS, frozenset({operator}))


def test_a_rank_reads_each_replayed_iteration_even_where_it_owns_no_operator_of_the_snapshot() -> None:
    known = Catalogue(
        (found(0, 4, EXPERT), found(1, 4, HEAD), found(0, 5, HEAD), found(1, 5)), {0: NONE, 1: NONE}, (0, 0)
    )
    plan = planned(source(0, 4, EXPERT), source(0, 5, HEAD), source(1, 4, HEAD))
    read = with_trainer_states(needs(plan, known.inventory(), known), plan, known, TWO, ())
    assert sorted((need.rank, need.found.snapshot.iteration, bool(need.parts)) for need in read) == [
        (0, 4, True),
        (0, 5, True),
        (1, 4, True),
        (1, 5, False),
    ]


def test_nothing_more_is_read_where_nothing_is_replayed() -> None:
    known = Catalogue((found(0, 5, HEAD), found(1, 5)), {0: NONE, 1: NONE}, (0, 0))
    plan = RecoveryPlan(5, Scope.GLOBAL, (ReplaySegment((0,), 5, 5),), (source(0, 5, HEAD),))
    assert [need.rank for need in with_trainer_states(needs(plan, known.inventory(), known), plan, known, TWO, ())] == [
        0
    ]


def test_the_base_is_where_the_replay_begins_and_the_target_without_one() -> None:
    assert base_for(planned(), 1, TWO) == 4
    assert base_for(RecoveryPlan(5, Scope.NONE, (), ()), 1, TWO) == 5


def piece(iteration: int, span: range = range(0), kind: str = "window") -> Piece:
    return Piece(kind, SnapshotPlan(iteration, {HEAD: Part.MASTER_AND_MOMENTS}), span)


def test_a_window_that_lacks_an_iteration_is_not_kept_at_all() -> None:
    whole, torn = [piece(at, range(4, 7)) for at in (4, 5, 6)], [piece(at, range(7, 10)) for at in (7, 9)]
    assert list(whole_windows([*whole, *torn])) == whole


def test_windows_that_overlap_do_not_complete_each_other() -> None:
    given_up, begun_again = [piece(4, range(4, 6))], [piece(5, range(5, 7)), piece(6, range(5, 7))]
    assert list(whole_windows([*given_up, *begun_again])) == begun_again


def test_snapshots_that_restore_a_state_by_themselves_are_kept_each() -> None:
    pieces = [piece(4, kind="dense"), piece(4, kind="expertsa"), piece(6, kind="dense")]
    assert list(whole_windows(pieces)) == pieces
