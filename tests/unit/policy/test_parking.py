"""What a process keeps when training is interrupted: the decision table, cell by cell."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.policy.parking import (
    PARKING,
    Cause,
    Decision,
    ParkContents,
    StepPhase,
    decide,
)

ROOT = Path(__file__).parents[3]
INTERRUPTIONS = [Cause.PEER_LOST, Cause.TOLD_TO_END]
phases, causes = st.sampled_from(StepPhase), st.sampled_from(Cause)


def kept(phase: StepPhase, cause: Cause) -> tuple[int | None, bool]:
    decision = decide(phase, cause, 7)
    return decision.iteration, decision.gradients


def test_every_phase_and_cause_has_an_answer_and_a_reason() -> None:
    assert set(PARKING) == {(phase, cause) for phase in StepPhase for cause in Cause}
    assert all(rule.why.endswith(".") for rule in PARKING.values())


@pytest.mark.parametrize("cause", INTERRUPTIONS, ids=lambda cause: cause.name)
def test_the_table_says_at_which_iteration_a_survivor_stands(cause: Cause) -> None:
    assert {phase: kept(phase, cause) for phase in StepPhase} == {
        StepPhase.IDLE: (7, False),
        StepPhase.PASSES: (7, False),
        StepPhase.REDUCED: (7, True),
        StepPhase.UPDATING: (None, False),
        StepPhase.UPDATED: (8, False),
        StepPhase.REPLAYING: (None, False),
        StepPhase.ROLLING_FORWARD: (None, False),
        StepPhase.REJOINING: (7, False),
    }


@given(phase=phases, iteration=st.integers(0, 10**6))
def test_a_process_that_failed_by_itself_keeps_nothing(phase: StepPhase, iteration: int) -> None:
    assert decide(phase, Cause.OWN_ERROR, iteration).iteration is None


@given(phase=phases, cause=causes, iteration=st.integers(0, 10**6))
def test_what_is_kept_is_never_older_or_more_than_one_iteration_newer_than_the_last_whole_state(
    phase: StepPhase, cause: Cause, iteration: int
) -> None:
    decision = decide(phase, cause, iteration)
    assert decision.iteration in (None, iteration, iteration + 1)
    assert decision.iteration != 0


@given(phase=phases, cause=causes, iteration=st.integers(1, 10**6))
def test_gradients_are_kept_only_beside_the_state_that_they_change(
    phase: StepPhase, cause: Cause, iteration: int
) -> None:
    decision = decide(phase, cause, iteration)
    assert not decision.gradients or (decision.iteration == iteration and phase is StepPhase.REDUCED)


@pytest.mark.parametrize("phase", [StepPhase.UPDATING, StepPhase.REPLAYING, StepPhase.ROLLING_FORWARD])
def test_a_state_that_is_being_written_is_never_kept(phase: StepPhase) -> None:
    assert {PARKING[phase, cause].keep for cause in Cause} == {ParkContents.NOTHING}


def test_before_the_first_iteration_there_is_nothing_worth_keeping() -> None:
    first = decide(StepPhase.REDUCED, Cause.PEER_LOST, 0)
    assert first == Decision(None, False, "Nothing was trained yet: a start makes the same state again.")
    assert decide(StepPhase.UPDATED, Cause.PEER_LOST, 0).iteration == 1


def test_the_page_of_lifecycles_shows_each_cell() -> None:
    spec = importlib.util.spec_from_file_location("lifecycle_diagrams", ROOT / "tools" / "lifecycle_diagrams.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rows = [line.split(" | ") for line in tool.render().splitlines()]
    table = {row[0].strip("| `"): [cell.strip("| `") for cell in row[1:]] for row in rows if len(row) == 1 + len(Cause)}
    for phase in StepPhase:
        assert table[phase.name] == [PARKING[phase, cause].keep.name for cause in Cause]
