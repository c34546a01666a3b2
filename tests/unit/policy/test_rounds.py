"""What the ranks agree on about snapshots under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.policy.copies import Level
from megatron.core.dist_checkpointing.moe.policy.rounds import MAX_OPEN_SNAPSHOTS, Rounds, Status
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan, expert, full_plan

OPERATORS = tuple(expert(0, index) for index in range(4))


def plan(iteration: int) -> SnapshotPlan:
    return full_plan(iteration, OPERATORS)


def test_a_round_is_as_far_as_the_slowest_rank() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(3))
    reports = [Status.PROTECTED, Status.SEALED, Status.PROTECTED]
    after, news = rounds.after([min(reports)])
    assert [one.agreed for one in news] == [Status.SEALED]
    assert after.sealed == plan(3)
    assert after.protected is None


def test_one_failed_rank_fails_the_round_of_all() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(3))
    after, news = rounds.after([min(Status.FAILED, Status.PROTECTED)])
    assert [one.agreed for one in news] == [Status.FAILED]
    assert (after.open, after.sealed, after.protected) == ((), None, None)


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
    for iteration in range(MAX_OPEN_SNAPSHOTS):
        assert rounds.may_begin
        rounds = rounds.begun(Level.SNAPSHOT, plan(iteration))
    assert not rounds.may_begin
    assert rounds.after([Status.PROTECTED, Status.PENDING])[0].may_begin


def test_writing_an_old_snapshot_to_storage_takes_the_place_of_one() -> None:
    rounds, _ = Rounds().begun(Level.SNAPSHOT, plan(1)).after([Status.PROTECTED])
    rounds = rounds.begun(Level.PERSIST, plan(1)).begun(Level.SNAPSHOT, plan(2))
    assert rounds.may_begin, "the snapshot that is written is still the one that is kept"
    rounds, _ = rounds.after([Status.PENDING, Status.PROTECTED])
    assert not rounds.begun(Level.SNAPSHOT, plan(3)).may_begin


def test_a_round_cannot_be_opened_twice() -> None:
    rounds = Rounds().begun(Level.SNAPSHOT, plan(1))
    with pytest.raises(MoECheckpointError, match="iteration 1 is open already"):
        rounds.begun(Level.SNAPSHOT, plan(1))


def test_reports_for_other_rounds_than_are_open_mean_that_ranks_lost_step() -> None:
    with pytest.raises(MoECheckpointError, match="lost step"):
        Rounds().after([Status.SEALED])


@given(st.lists(st.lists(st.sampled_from(sorted(Status)), min_size=2, max_size=2), max_size=12))
def test_the_newest_protected_snapshot_is_never_newer_than_the_newest_sealed_one(reports: list[list[Status]]) -> None:
    rounds, iteration = Rounds(), 0
    reached: dict[int, Status] = {}
    for values in reports:
        while rounds.may_begin:
            iteration += 1
            rounds = rounds.begun(Level.SNAPSHOT, plan(iteration))
            reached[iteration] = Status.PENDING
        said = []
        for one, value in zip(rounds.open, values, strict=False):
            # A rank's report never goes back, and one that is final stays.
            number = one.plan.iteration
            if not (reached[number] is Status.SEALED and value is Status.FAILED):
                reached[number] = max(reached[number], value) if value else value
            said.append(reached[number])
        rounds, _ = rounds.after(said)
        sealed = rounds.sealed.iteration if rounds.sealed else 0
        protected = rounds.protected.iteration if rounds.protected else 0
        assert protected <= sealed
        assert len(rounds.open) <= MAX_OPEN_SNAPSHOTS
