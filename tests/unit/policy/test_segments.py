"""Who replays, from where, and what reaches them from outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.policy.rollback import (
    Pipeline,
    base_for,
    feeds,
    ranks_of,
    restored,
    segment_of,
    sends_all,
)
from megatron.core.dist_checkpointing.moe.types import (
    Direction,
    RecoveryPlan,
    ReplaySegment,
    Scope,
    Topology,
    expert,
)

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
FOUR = Topology(8, pp=4)


def fed(stages: tuple[int, ...], topology: Topology) -> list[tuple[int, int, Direction]]:
    segment, ranks = ReplaySegment(stages, 4, 6), range(topology.world_size)
    return [(rank, sender, way) for rank in ranks for sender, way in feeds(segment, rank, topology)]


def test_the_ranks_beside_a_segment_feed_its_edges_rank_by_rank() -> None:
    assert fed((1, 2), FOUR) == [(2, 0, FORWARD), (3, 1, FORWARD), (4, 6, BACKWARD), (5, 7, BACKWARD)]


def test_the_ends_of_the_pipeline_have_one_neighbour_unless_stages_are_virtual() -> None:
    assert fed((0,), Topology(3, pp=3)) == [(0, 1, BACKWARD)]
    assert fed((0,), Topology(3, pp=3, vpp=2)) == [(0, 2, FORWARD), (0, 1, BACKWARD)]
    assert fed((2,), Topology(3, pp=3, vpp=2)) == [(2, 1, FORWARD), (2, 0, BACKWARD)]


def test_tied_ends_that_replay_as_one_are_fed_from_between() -> None:
    assert fed((0, 3), Topology(4, pp=4)) == [(0, 1, BACKWARD), (3, 2, FORWARD)]


@pytest.mark.parametrize("topology", [Topology(2, pp=2), Topology(2, pp=2, vpp=2), Topology(2)])
def test_nothing_feeds_a_replay_of_all_stages(topology: Topology) -> None:
    assert not fed(tuple(range(topology.pp)), topology)


@given(st.integers(2, 6), st.integers(1, 3), st.booleans(), st.data())
def test_what_feeds_a_run_of_stages_is_what_the_planner_counts_on(
    stages: int, each: int, virtual: bool, data: st.DataObject
) -> None:
    topology = Topology(stages * each, pp=stages, vpp=2 if virtual else 1)
    start, length = data.draw(st.integers(0, stages - 1)), data.draw(st.integers(1, stages))
    if not virtual:
        length = min(length, stages - start)
    segment = tuple((start + at) % stages for at in range(length))
    pipeline = Pipeline(6, (False,) * stages, ({},) * stages, {}, circular=virtual)
    seen = {(topology.stage(sender), way) for _, sender, way in fed(segment, topology)}
    assert seen == set(pipeline.neighbours(start, length))
    assert all((rank - sender) % topology.ranks_per_stage == 0 for rank, sender, _ in fed(segment, topology))


def test_each_rank_begins_where_its_own_segment_does_or_where_it_parked() -> None:
    segments = (ReplaySegment((0,), 4, 6), ReplaySegment((2,), 5, 6))
    plan = RecoveryPlan(6, Scope.LOCAL, segments, (), roll_forward=(7,))
    assert [base_for(plan, rank, FOUR) for rank in range(8)] == [4, 4, 6, 6, 5, 5, 6, 5]
    assert segment_of(plan, 2, FOUR) is None
    assert ranks_of(segments[1], FOUR) == (4, 5)


def test_the_snapshots_that_make_a_segment_dense_end_where_nothing_is_frozen_any_more() -> None:
    one = frozenset({expert(0, 0)})
    assert restored(ReplaySegment((0,), 4, 8, (one, one, frozenset(), frozenset()))) == range(4, 7)
    assert restored(ReplaySegment((0,), 8, 8)) == range(8, 9)


def test_a_log_is_made_again_only_where_a_replay_sends_what_was_sent_at_first() -> None:
    one = frozenset({expert(0, 0)})

    def sent(stages: tuple[int, ...], topology: Topology = FOUR) -> list[bool]:
        segment = ReplaySegment(stages, 4, 6, (one, frozenset()))
        return [sends_all(segment, iteration, topology) for iteration in segment.replayed]

    assert sent((1, 2)) == sent((0,)) == sent((0, 3)) == [True, True]
    assert sent((0, 1)) == [False, True], "the frozen front needs no gradients, so the second stage sends none"
    assert sent((0,), Topology(4, pp=2, vpp=2)) == [False, True]
