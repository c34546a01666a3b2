"""Which stored snapshots a recovery plan needs, and where each is taken from."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.policy.availability import OperatorOrder
from megatron.core.dist_checkpointing.moe.policy.rollback import base_for
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.inventory import Catalogue, SnapshotEntry
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import whole_windows
from megatron.core.dist_checkpointing.moe.recovery.sources import (
    GatheredMetadata,
    RefusedCopies,
    gather_metadata,
    logs_and_gradients,
    needs,
    with_trainer_states,
)
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import (
    GRADIENTS,
    LOG,
    CopySource,
    Direction,
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

HEAD = OperatorId(2, OperatorKind.HEAD)
SNAPSHOT, PLAN = SnapshotId(4, 0), SnapshotPlan(4, {HEAD: Part.MASTER_AND_MOMENTS})
ONE_NODE = (0, 0, 0)


@pytest.mark.parametrize("damaged", [0, 2])
def test_beside_a_damaged_copy_an_intact_one_on_the_same_node_is_taken(damaged: int) -> None:
    found = tuple(SnapshotEntry(SNAPSHOT, Tier.OWN_MEMORY, finder=finder, plan=PLAN) for finder in (0, 2))
    known = Catalogue(found, {0: frozenset([HEAD])}, ONE_NODE)
    gone = {(damaged, SNAPSHOT, Tier.OWN_MEMORY)}
    source = CopySource(0, 4, Tier.OWN_MEMORY, 0, Part.MASTER_AND_MOMENTS, frozenset([HEAD]))
    plan = RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), (source,), ())
    (need,) = needs(plan, known.inventory(gone), known.without(gone))
    assert need.found.finder == 2 - damaged
    assert need.parts == ((Part.MASTER_AND_MOMENTS, frozenset([HEAD])),)


PIPELINE = Topology(4, pp=4)
REQUIRED = {rank: frozenset[OperatorId]() for rank in range(4)}
NOTHING = frozenset[OperatorId]()


def logged(iteration: int, sender: int, finder: int, *, journal: bool = True) -> SnapshotEntry:
    snapshot, plan = SnapshotId(iteration, sender, LOG), SnapshotPlan(iteration, {})
    return SnapshotEntry(snapshot, Tier.OWN_MEMORY, finder=finder, plan=plan, has_journal=journal)


def local(*stages: int, rolling: tuple[int, ...] = ()) -> RecoveryPlan:
    segment = ReplaySegment(stages, 4, 6, (NOTHING, NOTHING))
    return RecoveryPlan(6, Scope.LOCAL, (segment,), (), roll_forward=rolling)


def test_a_segment_is_fed_by_the_ranks_on_both_sides_of_it_in_each_replayed_iteration() -> None:
    known = Catalogue(tuple(logged(at, rank, rank) for at in (5, 6) for rank in range(4)), REQUIRED, (0, 0, 1, 1))
    found = logs_and_gradients(local(1, 2), known, PIPELINE)
    assert [(one.rank, one.found.snapshot.rank, one.found.snapshot.iteration, one.feeds) for one in found] == [
        (1, 0, 5, (Direction.FORWARD,)),
        (1, 0, 6, (Direction.FORWARD,)),
        (2, 3, 5, (Direction.BACKWARD,)),
        (2, 3, 6, (Direction.BACKWARD,)),
    ]
    assert all(one.travels for one in found)


def test_with_two_stages_in_a_ring_one_log_feeds_both_sides() -> None:
    known = Catalogue(tuple(logged(at, 1, 1) for at in (5, 6)), REQUIRED, (0, 0))
    found = logs_and_gradients(local(0), known, Topology(2, pp=2, vpp=2))
    assert [one.feeds for one in found] == [(Direction.FORWARD, Direction.BACKWARD)] * 2


def test_a_log_that_the_reader_itself_holds_does_not_travel() -> None:
    known = Catalogue(tuple(logged(at, 0, finder) for at in (5, 6) for finder in (0, 1)), REQUIRED, (0, 0))
    assert [one.travels for one in logs_and_gradients(local(1), known, Topology(2, pp=2))] == [False, False]


def test_ranks_that_roll_forward_get_their_gradients_from_wherever_they_lie() -> None:
    kept = SnapshotEntry(SnapshotId(6, 0, GRADIENTS), Tier.OWN_MEMORY, finder=2, plan=SnapshotPlan(6, {}))
    plan = RecoveryPlan(6, Scope.NONE, (), (), roll_forward=(0,))
    (need,) = logs_and_gradients(plan, Catalogue((kept,), REQUIRED, (0, 0, 1, 1)), PIPELINE)
    assert (need.rank, need.found.finder, need.travels) == (0, 2, True)


def test_no_snapshot_travels_for_random_states_alone_where_a_log_tells_the_rest() -> None:
    own = SnapshotEntry(SnapshotId(5, 1), Tier.OWN_MEMORY, finder=3, plan=SnapshotPlan(5, {}), has_journal=True)
    nodes = (0, 0, 1, 1)
    only = Catalogue((own,), REQUIRED, nodes)
    assert [one.rank for one in with_trainer_states((), local(1), only, PIPELINE, ())] == [1]
    assert not with_trainer_states((), local(1), only, PIPELINE, {5})


@pytest.mark.parametrize(("led", "is_refused"), [([["b", 0]], False), ([["a", 0]], True), (None, True)])
def test_what_one_rank_tells_all_is_not_of_another_attempt_than_was_listed(led: Any, is_refused: bool) -> None:
    place = 0, SNAPSHOT, Tier.PERSISTENT
    scalars = {"timeline": led, "strategy": {"window": 2}}
    manifest = SimpleNamespace(snapshot=SNAPSHOT, facts=SimpleNamespace(scalars=scalars))
    shared: Any = SimpleNamespace(strategy=lambda at: place, journal=lambda at: None)
    alone: Any = SimpleNamespace(rank=0, merge=lambda value, combine: value)

    def gathered() -> GatheredMetadata:
        plan = RecoveryPlan(4, Scope.GLOBAL, (), ())
        reader: Any = nullcontext(SimpleNamespace(manifest=manifest))
        return gather_metadata(plan, shared, OperatorOrder(()), alone, lambda *_: reader, (("b", 0),))[1]

    if is_refused:
        with pytest.raises(RefusedCopies) as refused:
            gathered()
        assert list(refused.value.refused) == [place]
    else:
        assert gathered().strategy == {"window": 2}


# What a recovery takes of windows: snapshots of ranks without operators too, and whole windows only.

EXPERT = expert(0, 0)
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
        (found(0, 4, EXPERT), found(1, 4, HEAD), found(0, 5, HEAD), found(1, 5)), {0: NOTHING, 1: NOTHING}, (0, 0)
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
    known = Catalogue((found(0, 5, HEAD), found(1, 5)), {0: NOTHING, 1: NOTHING}, (0, 0))
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
