"""What the ranks agree on about snapshots under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.policy.copies import Level
from megatron.core.dist_checkpointing.moe.policy.rounds import MAX_OPEN_SPANS, PLACES, Rounds, Status
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan, expert, full_plan

OPERATORS = tuple(expert(0, index) for index in range(4))


def plan(iteration: int) -> SnapshotPlan:
    return full_plan(iteration, OPERATORS)


def test_a_round_is_as_far_as_the_slowest_rank() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(3))
    reports = [Status.PROTECTED, Status.SEALED, Status.PROTECTED]
    after, news = rounds.after([min(reports)])
    assert [one.agreed for one in news] == [Status.SEALED]
    assert [one.plan for one in after.open] == [plan(3)]


def test_one_failed_rank_fails_the_round_of_all() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(3))
    after, news = rounds.after([min(Status.FAILED, Status.PROTECTED)])
    assert [one.agreed for one in news] == [Status.FAILED]
    assert (after.open, after.windows) == ((), ())


def test_a_rank_that_still_replicates_keeps_an_exposed_round_open() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(3))
    after, _ = rounds.after([min(Status.EXPOSED, Status.SEALED)])
    assert len(after.open) == 1
    after, news = after.after([min(Status.EXPOSED, Status.PROTECTED)])
    assert [one.agreed for one in news] == [Status.EXPOSED]
    assert not after.open


def test_what_is_said_again_is_no_news() -> None:
    rounds, _ = Rounds().begun(Level.SNAPSHOT, plan(3)).after([Status.SEALED])
    assert rounds.after([Status.SEALED])[1] == ()


def test_no_third_snapshot_begins_while_two_are_under_way() -> None:
    rounds = Rounds()
    for iteration in range(MAX_OPEN_SPANS):
        assert rounds.may_begin(iteration)
        rounds = rounds.begun(Level.SNAPSHOT, plan(iteration))
    assert not rounds.may_begin(9)
    assert rounds.after([Status.PROTECTED, Status.PENDING])[0].may_begin(9)


def test_what_stays_in_memory_takes_a_place_of_its_kind() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(7))
    open_and_kept = [("snapshot", range(7, 8)), ("snapshot", range(5, 6))]
    assert rounds.may_begin(8, open_and_kept)
    assert not rounds.may_begin(8, [*open_and_kept, ("snapshot", range(3, 4))]), "it is being written to storage"
    assert rounds.may_begin(8, [*open_and_kept, ("experts", range(3, 4))])


def test_the_snapshots_of_a_window_that_was_begun_always_may() -> None:
    rounds, window = Rounds(), range(4, 8)
    full = [("snapshot", range(at, at + 1)) for at in range(PLACES)]
    rounds = rounds.begun(Level.SNAPSHOT, plan(2)).begun(Level.SNAPSHOT, plan(4), window)
    assert all(rounds.may_begin(iteration, full) for iteration in range(5, 8))
    assert not rounds.may_begin(8, full)


def test_a_window_is_under_way_between_its_rounds_until_the_last_has_ended() -> None:
    rounds = Rounds()
    for iteration in range(4, 7):
        rounds, _ = rounds.begun(Level.SNAPSHOT, plan(iteration), range(4, 7)).after([Status.PROTECTED])
        assert rounds.spans == ({range(4, 7)} if iteration < 6 else set())


def test_a_failed_round_ends_its_window_though_later_rounds_of_it_are_open() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(4), range(4, 8)).begun(Level.SNAPSHOT, plan(5), range(4, 8))
    rounds, _ = rounds.after([Status.FAILED, Status.PENDING])
    assert not rounds.continues(6)
    assert rounds.spans == {range(4, 8)}, "what is still being replicated takes its place"
    assert rounds.after([Status.PROTECTED])[0].spans == set()


def test_a_round_cannot_be_opened_twice() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(1))
    with pytest.raises(MoECheckpointError, match="iteration 1 is open already"):
        rounds.begun(Level.SNAPSHOT, plan(1))


def test_reports_for_other_rounds_than_are_open_mean_that_ranks_lost_step() -> None:
    with pytest.raises(MoECheckpointError, match="lost step"):
        Rounds().after([Status.SEALED])


@given(st.integers(1, 4), st.lists(st.lists(st.sampled_from(sorted(Status)), min_size=12, max_size=12), max_size=24))
def test_at_most_two_windows_are_under_way_whatever_becomes_of_their_rounds(
    size: int, reports: list[list[Status]]
) -> None:
    rounds, span = Rounds(), range(0)
    reached: dict[int, Status] = {}
    for iteration, values in enumerate(reports, start=1):
        if not rounds.continues(iteration):
            span = range(iteration, iteration + size)
        if rounds.may_begin(iteration):
            rounds = rounds.begun(Level.SNAPSHOT, plan(iteration), span)
            reached[iteration] = Status.PENDING
        said = []
        for one, value in zip(rounds.open, values, strict=False):
            # A rank's report never goes back, and one that is final stays.
            number = one.plan.iteration
            if not (reached[number] is Status.SEALED and value is Status.FAILED):
                reached[number] = max(reached[number], value) if value else value
            said.append(reached[number])
        rounds, _ = rounds.after(said[: len(rounds.open)])
        assert len(rounds.spans) <= MAX_OPEN_SPANS
        assert set(rounds.windows) <= rounds.spans
