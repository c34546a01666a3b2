"""What goes over stage boundaries, and which logs of it a replay needs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.rollback import (
    covered_since,
    covers,
    kept,
    log_keys,
    receives,
    sends,
    sent_bytes,
    tensor_shape,
)
from megatron.core.dist_checkpointing.moe.types import Direction, Topology

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ITERATIONS = st.integers(0, 60)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Topology, int, int]:
    """A topology, microbatches, and the group that chunks take in turn, as Megatron-Core allows them."""
    pp, vpp = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    group = draw(st.integers(pp, pp + 3))
    last = draw(st.integers(0, 1)) * draw(st.integers(pp, group))
    return Topology(pp, pp=pp, vpp=vpp), draw(st.integers(1, 3)) * group + last % group, group


def test_in_1f1b_a_stage_sends_each_microbatch_once_in_order() -> None:
    topology = Topology(4, pp=4)
    assert sends(topology, 1, 3, FORWARD) == sends(topology, 1, 3, BACKWARD) == ((0, 0), (0, 1), (0, 2))


def test_the_ends_of_a_pipeline_send_in_one_direction_only() -> None:
    topology = Topology(2, pp=2)
    assert sends(topology, 0, 4, BACKWARD) == sends(topology, 1, 4, FORWARD) == ()
    assert len(sends(topology, 0, 4, FORWARD)) == len(sends(topology, 1, 4, BACKWARD)) == 4


def test_with_virtual_stages_chunks_take_turns_and_backward_begins_with_the_last() -> None:
    topology = Topology(2, pp=2, vpp=2)
    forward = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3))
    assert sends(topology, 0, 4, FORWARD) == forward
    assert sends(topology, 1, 4, BACKWARD) == tuple((1 - chunk, microbatch) for chunk, microbatch in forward)


def test_with_virtual_stages_the_ends_are_connected_except_for_the_models_own_ends() -> None:
    topology = Topology(2, pp=2, vpp=2)
    assert sends(topology, 1, 2, FORWARD) == ((0, 0), (0, 1))
    assert sends(topology, 0, 2, BACKWARD) == ((1, 0), (1, 1))


def test_the_last_group_may_be_smaller_than_the_others() -> None:
    topology = Topology(2, pp=2, vpp=2)
    table = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (0, 4), (1, 3), (1, 4))
    assert sends(topology, 0, 5, FORWARD, group=3) == table


def test_without_a_pipeline_nothing_is_sent() -> None:
    assert log_keys(Topology(4), 0, 8) == ()


@pytest.mark.parametrize(
    ("stage", "microbatches", "group", "told"),
    [(2, 4, None, "stages 0 to 1"), (-1, 4, None, "stage -1"), (0, 0, None, "microbatches is 0"), (0, 4, 0, "group")],
)
def test_numbers_that_cannot_be_are_refused(stage: int, microbatches: int, group: int | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        sends(Topology(2, pp=2), stage, microbatches, FORWARD, group)


@given(pipelines())
def test_what_a_stage_sends_is_what_its_neighbour_waits_for(given_: tuple[Topology, int, int]) -> None:
    """Each (chunk, microbatch) that has one before it in the model gets its activation, from the stage before, and the
    k-th one to arrive is the k-th one that is needed."""
    topology, microbatches, group = given_
    for stage in range(topology.pp):
        first = stage == 0
        sender = (stage - 1) % topology.pp
        sent = sends(topology, sender, microbatches, FORWARD, group)
        arriving = [(chunk + first, microbatch) for chunk, microbatch in sent]
        every = set(range(topology.vpp)) - ({0} if first else set())
        assert sorted(arriving) == sorted((chunk, one) for chunk in every for one in range(microbatches))
        for chunk in every:
            assert [one for at, one in arriving if at == chunk] == list(range(microbatches))


@given(pipelines())
def test_each_microbatch_crosses_each_boundary_of_the_model_once_in_both_directions(
    given_: tuple[Topology, int, int],
) -> None:
    topology, microbatches, group = given_
    stages = range(topology.pp)
    for direction in Direction:
        crossed = [(stage, *one) for stage in stages for one in sends(topology, stage, microbatches, direction, group)]
        assert len(crossed) == len(set(crossed)) == (topology.pp * topology.vpp - 1) * microbatches


def test_keys_are_unique_and_of_each_direction_in_the_order_of_sending() -> None:
    keys = log_keys(Topology(2, pp=2, vpp=2), 0, 2)
    assert keys == (
        "forward/chunk0/microbatch0",
        "forward/chunk0/microbatch1",
        "forward/chunk1/microbatch0",
        "forward/chunk1/microbatch1",
        "backward/chunk1/microbatch0",
        "backward/chunk1/microbatch1",
    )


def test_the_sequence_is_split_as_megatron_splits_it() -> None:
    topology = Topology(8, tp=2, pp=2, cp=2)
    assert tensor_shape(topology, 64, 3, 40, sequence_parallel=False) == (32, 3, 40)
    assert tensor_shape(topology, 64, 3, 40, sequence_parallel=True) == (16, 3, 40)


def test_bytes_of_an_iteration_count_both_directions() -> None:
    topology = Topology(4, pp=4)
    one = 16 * 2 * 8 * 2
    assert [sent_bytes(topology, stage, 4, (16, 2, 8), 2) for stage in range(4)] == [4 * one, 8 * one, 8 * one, 4 * one]


def test_a_replay_that_starts_from_a_base_needs_the_logs_after_it() -> None:
    assert kept(range(1, 9), oldest_base=5, newest=8, lookback=10) == {6, 7, 8}
    assert covers({6, 7, 8}, oldest_base=5, newest=8) == ""


def test_logs_older_than_the_bound_go_although_a_window_would_need_them() -> None:
    assert kept(range(1, 9), oldest_base=0, newest=8, lookback=3) == {6, 7, 8}
    assert covers({6, 7, 8}, 0, 8) == "no boundary logs of iterations 1 to 5, needed to replay from iteration 0 to 8"


def test_without_a_base_the_newest_stay() -> None:
    assert kept(range(1, 9), oldest_base=None, newest=8, lookback=3) == {6, 7, 8}


def test_a_gap_is_named() -> None:
    assert covers({2, 4, 5, 9}, 1, 9).startswith("no boundary logs of iterations 3, 6 to 8,")
    assert covers({2}, 1, 3).startswith("no boundary logs of iteration 3,")
    assert covers(set(range(0, 40, 2)), 0, 20).startswith("no boundary logs of iterations 1, 3, 5, 7 and 6 more,")


def test_coverage_begins_after_the_last_gap() -> None:
    assert covered_since({1, 2, 4, 5}, 5) == 4
    assert covered_since({1, 2}, 2) == 1
    assert covered_since({1, 2, 4}, 3) is None
    assert covered_since(set(), 3) is None


@given(st.sets(ITERATIONS), ITERATIONS, ITERATIONS, st.integers(1, 20))
def test_what_is_kept_covers_a_replay_exactly_where_what_was_held_did_within_the_bound(
    held: set[int], base: int, newest: int, lookback: int
) -> None:
    staying = kept(held, base, newest, lookback)
    assert staying <= held
    assert len([one for one in staying if one <= newest]) <= lookback
    within = newest - base <= lookback
    assert (covers(staying, base, newest) == "") == ((covers(held, base, newest) == "" and within) or newest <= base)


@given(st.sets(ITERATIONS, min_size=1), st.lists(ITERATIONS, min_size=2), st.integers(1, 20))
def test_later_bases_never_need_what_earlier_ones_let_go(held: set[int], bases: list[int], lookback: int) -> None:
    newest = max(held)
    staying = [kept(held, base, newest, lookback) for base in sorted(bases)]
    assert all(later <= earlier for earlier, later in pairwise(staying))


@given(st.sets(ITERATIONS), ITERATIONS, ITERATIONS)
def test_a_replay_is_covered_exactly_from_where_the_unbroken_row_begins(held: set[int], base: int, newest: int) -> None:
    since = covered_since(held, newest)
    covered = base >= newest or (since is not None and since <= base + 1)
    assert (covers(held, base, newest) == "") == covered


@given(pipelines())
def test_all_that_is_sent_one_way_is_received_by_somebody(pipeline: tuple[Topology, int, int]) -> None:
    topology, microbatches, group = pipeline
    for way in Direction:
        stages = range(topology.pp)
        sent = [len(sends(topology, stage, microbatches, way, group)) for stage in stages]
        came = [receives(topology, stage, microbatches, way, group) for stage in stages]
        moved = came[1:] + came[:1] if way is FORWARD else came[-1:] + came[:-1]
        assert sent == moved


def test_the_ends_of_a_pipeline_receive_from_one_side_only() -> None:
    topology = Topology(2, pp=2)
    assert [receives(topology, stage, 4, FORWARD) for stage in (0, 1)] == [0, 4]
    assert [receives(topology, stage, 4, BACKWARD) for stage in (0, 1)] == [4, 0]
