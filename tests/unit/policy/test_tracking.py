"""What the ranks agree on about snapshots under way, and whether another one may begin."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import CONFIG, Rank, job_of

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.policy.lifecycle import WindowState
from megatron.core.dist_checkpointing.moe.policy.tracking import (
    MAX_OPEN_SPANS,
    PLACES,
    CommitRounds,
    Status,
    TrackedPiece,
    TrackedWindow,
    may_begin,
)
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import Level, SnapshotPlan, expert, full_plan

OPERATORS = tuple(expert(0, index) for index in range(4))


def plan(iteration: int) -> SnapshotPlan:
    return full_plan(iteration, OPERATORS)


def begun(*iterations: int, span: range | None = None) -> CommitRounds:
    rounds = CommitRounds()
    for iteration in iterations:
        rounds = rounds.begun(Level.SNAPSHOT, plan(iteration), span or range(iteration, iteration + 1))
    return rounds


def window(span: range, state: WindowState = WindowState.PROTECTED, kind: str = "snapshot") -> TrackedWindow:
    pieces = tuple(TrackedPiece(Piece(kind, plan(iteration), span), Status.SEALED) for iteration in span)
    return TrackedWindow(span, state, pieces)


def single(iteration: int, kind: str = "snapshot") -> TrackedWindow:
    return window(range(iteration, iteration + 1), kind=kind)


def test_a_round_is_as_far_as_the_slowest_rank() -> None:
    reports = [Status.PROTECTED, Status.SEALED, Status.PROTECTED]
    after, updates = begun(3).after([min(reports)])
    assert [round_.agreed for round_ in updates] == [Status.SEALED]
    assert [round_.plan for round_ in after.open] == [plan(3)]


def test_one_failed_rank_fails_the_round_of_all() -> None:
    after, updates = begun(3).after([min(Status.FAILED, Status.PROTECTED)])
    assert [round_.agreed for round_ in updates] == [Status.FAILED]
    assert after.open == ()


def test_a_rank_that_still_replicates_keeps_an_under_replicated_round_open() -> None:
    after, _ = begun(3).after([min(Status.UNDER_REPLICATED, Status.SEALED)])
    assert len(after.open) == 1
    after, updates = after.after([min(Status.UNDER_REPLICATED, Status.PROTECTED)])
    assert [round_.agreed for round_ in updates] == [Status.UNDER_REPLICATED]
    assert not after.open


def test_what_is_reported_again_is_no_update() -> None:
    rounds, _ = begun(3).after([Status.SEALED])
    assert rounds.after([Status.SEALED])[1] == ()


def test_a_round_cannot_be_opened_twice() -> None:
    with pytest.raises(MoECheckpointError, match="iteration 1 is open already"):
        begun(1, 1)


def test_reports_for_other_rounds_than_are_open_mean_that_ranks_lost_step() -> None:
    with pytest.raises(MoECheckpointError, match="lost step"):
        CommitRounds().after([Status.SEALED])


def test_no_third_snapshot_begins_while_two_are_under_way() -> None:
    for number in range(MAX_OPEN_SPANS):
        assert may_begin(9, (), begun(*range(number)))
    rounds = begun(*range(MAX_OPEN_SPANS))
    assert not may_begin(9, (), rounds)
    assert may_begin(9, (), rounds.after([Status.PROTECTED, Status.PENDING])[0])


def test_what_stays_in_memory_takes_a_place_of_its_kind() -> None:
    rounds, open_and_kept = begun(7), [single(7), single(5)]
    assert may_begin(8, open_and_kept, rounds)
    assert not may_begin(8, [*open_and_kept, single(3)], rounds), "it is being written to storage"
    assert may_begin(8, [*open_and_kept, single(3, "experts")], rounds)


def test_the_snapshots_of_a_window_that_was_begun_always_may() -> None:
    held = [*(single(at) for at in range(PLACES)), window(range(4, 8), WindowState.COPYING)]
    assert all(may_begin(iteration, held, begun(2, 4)) for iteration in range(5, 8))
    assert not may_begin(8, held, begun(2, 4))


def test_a_window_that_is_given_up_takes_its_place_as_long_as_one_of_its_rounds_is_open() -> None:
    held = [window(range(4, 8), WindowState.GIVEN_UP), window(range(6, 10), WindowState.COPYING)]
    rounds = begun(5, span=range(4, 8))
    assert not may_begin(10, held, rounds)
    assert may_begin(10, held, rounds.after([Status.PROTECTED])[0])
    assert not may_begin(5, held[:1], begun(4, 5)), "no more comes of it"


@given(
    st.sampled_from(["1", "2", "3", "4"]),
    st.lists(st.lists(st.sampled_from(sorted(Status)), min_size=12, max_size=12), max_size=24),
)
@settings(max_examples=examples(50), deadline=None)
def test_at_most_two_windows_are_under_way_whatever_becomes_of_their_rounds(
    size: str, reports: list[list[Status]]
) -> None:
    rank = Rank(job_of(CONFIG.__class__(strategy="sparse", window=size)))
    for values in reports:
        rank.step(lambda at, values=values: values[at])  # type: ignore[misc]
        windows = rank.tracker.windows.values()
        copying = {held.span for held in windows if held.state is WindowState.COPYING}
        replicating = {round_.span for round_ in rank.tracker.rounds.open}
        assert len(copying | replicating) <= MAX_OPEN_SPANS
        assert replicating <= {held.span for held in windows}
