"""Replays that diverged: noted by the ranks that saw it, known to all at the next start, and not tried again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.policy.lineage import Lineage
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.exactness import FILE, Divergence, DivergenceNotes
from megatron.core.dist_checkpointing.moe.recovery.findings import Judge, overview
from megatron.core.dist_checkpointing.moe.recovery.inventory import JudgedRow, listing
from megatron.core.dist_checkpointing.moe.types import LOG, PARKED, Tier

FIRST: Lineage = (("one", 0),)
LATER: Lineage = (("one", 0), ("two", 5))
NOTE = Divergence(6, 6, (0, 1), False, 4, 6, FIRST, "it gave the loss 1.0, recorded was 2.0")
ALONE = Divergence(6, 9, (1,), True, 4, 6, FIRST, "what it sent")


def seal(store: FakeStore, iteration: int, timeline: Lineage = FIRST, kind: str = "window") -> None:
    with store.reserve(SnapshotId(iteration, 0, kind), Layout.of([Field("w", "uint8", (4,))])) as writer:
        writer.put("w", bytes(4))
        scalars = {"operators": [[0, 0, 0, 3]], "timeline": [list(attempt) for attempt in timeline]}
        writer.seal(Facts("job", "", {}, scalars))  # type: ignore[arg-type]


def found(store: FakeStore, *notes: Divergence) -> tuple[Judge, list[JudgedRow]]:
    """What two ranks find, of which one has these notes."""
    rows = listing(store, Tier.OWN_MEMORY, {})
    judge = Judge(overview(rows) | overview((), notes), "job", lambda job: False)
    return judge, list(map(judge.judged, rows))


def usable(found: tuple[Judge, list[JudgedRow]]) -> list[int]:
    return [one.snapshot.iteration for one in found[1] if not one.why]


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore(Memory(), 0, (4096,) * 12)
    for iteration in (3, 4, 5, 6, 7):
        seal(store, iteration)
    return store


def test_what_a_replay_was_made_from_is_not_used_again_whoever_noted_it(store: FakeStore) -> None:
    assert usable(found(store)) == [3, 4, 5, 6, 7]
    told = found(store, NOTE, NOTE)
    assert usable(told) == [3, 7]
    assert told[0].diverged == (NOTE,)
    assert {one.why for one in told[1] if one.why} == {str(NOTE)}


def test_of_another_past_the_same_iterations_are_used(store: FakeStore) -> None:
    seal(store, 8, LATER)
    other = FakeStore(Memory(), 0, (4096,) * 4)
    seal(other, 6, LATER)
    told = found(other, NOTE)
    assert usable(told) == [6]
    assert not told[0].diverged, "nothing is left of what diverged, so it need not be told again"


def test_stages_that_diverged_alone_speak_against_no_snapshot_but_against_that_way(store: FakeStore) -> None:
    told = found(store, ALONE)
    assert usable(told) == [3, 4, 5, 6, 7]
    assert told[0].diverged_alone(9, FIRST) == ALONE
    assert told[0].diverged_alone(8, FIRST) is None
    assert told[0].diverged_alone(9, LATER) is None


def test_logs_and_parked_states_are_not_what_a_replay_of_all_stages_was_made_from(store: FakeStore) -> None:
    other = FakeStore(Memory(), 0, (4096,) * 4)
    seal(other, 5, kind=LOG)
    seal(other, 6, kind=PARKED)
    assert usable(found(other, NOTE)) == [5, 6]


def test_notes_outlive_the_process_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    assert DivergenceNotes(tmp_path).read() == []
    DivergenceNotes(tmp_path).add(NOTE)
    DivergenceNotes(tmp_path).add(ALONE)
    assert DivergenceNotes(tmp_path).read() == [NOTE, ALONE]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_damaged_notes_are_said_and_cost_only_a_second_try(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text("[{")
    with caplog.at_level(logging.ERROR):
        assert DivergenceNotes(tmp_path).read() == []
    assert "may be tried again" in caplog.text
    assert str(tmp_path / FILE) in caplog.text


def test_a_note_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        DivergenceNotes(tmp_path / "gone").add(NOTE)
    assert "will be tried again" in caplog.text


def test_a_note_says_what_was_replayed_and_what_was_compared() -> None:
    assert str(NOTE) == f"the replay of all stages from iteration 4 to 6 diverged: {NOTE.why}"
    assert str(ALONE) == "the replay of stage 1 alone from iteration 4 to 9 diverged: what it sent"
