"""The lifecycles: what their tables promise, and that the documentation is made of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.policy.lifecycle import (
    BUFFER,
    BUFFER_TRANSITIONS,
    MACHINES,
    PROCESS,
    PROCESS_TRANSITIONS,
    PROTECTION_TRANSITIONS,
    WINDOW,
    WINDOW_TRANSITIONS,
    BufferEvent,
    BufferState,
    Machine,
    ProcessEvent,
    ProcessState,
    Protection,
    ProtectionEvent,
    ProtectionState,
    UnexpectedEvent,
    WindowEvent,
    WindowState,
    advance_buffers,
    next_state,
)

ROOT = Path(__file__).parents[3]
AnyMachine = Machine[Any, Any]
every_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)


def states(machine: AnyMachine) -> list[Enum]:
    return list(type(machine.start))


def events(machine: AnyMachine) -> list[Enum]:
    return list(type(next(iter(machine.transitions))[1]))


def reachable(machine: AnyMachine, start: Enum, without: Iterable[Enum] = ()) -> set[Enum]:
    """States reached from `start`, by no event that is in `without`."""
    found, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        for (before, event), after in machine.transitions.items():
            if before is state and event not in without and after not in found:
                found.add(after)
                frontier.append(after)
    return found


def walk(machine: AnyMachine, steps: Sequence[Enum]) -> list[Enum]:
    """The states that the events lead through, from the start."""
    path = [machine.start]
    for event in steps:
        path.append(next_state(machine.transitions, path[-1], event))
    return path


@every_machine
def test_every_state_is_reached_from_the_start(machine: AnyMachine) -> None:
    assert reachable(machine, machine.start) == set(states(machine))


@every_machine
def test_every_state_can_come_to_rest(machine: AnyMachine) -> None:
    assert all(reachable(machine, state) & machine.ends for state in states(machine))


@every_machine
def test_only_resting_states_have_no_way_out(machine: AnyMachine) -> None:
    with_exits = {state for state, _ in machine.transitions}
    assert set(states(machine)) - with_exits <= machine.ends


@every_machine
def test_every_event_can_happen(machine: AnyMachine) -> None:
    assert {event for _, event in machine.transitions} == set(events(machine))


@every_machine
def test_every_state_and_event_has_a_sentence_of_its_own(machine: AnyMachine) -> None:
    for members in (type(machine.start), type(events(machine)[0])):
        assert len(list(members)) == len(members.__members__)
        assert all(member.value.endswith(".") for member in members)


@every_machine
def test_every_absent_transition_raises_and_names_what_is_allowed(machine: AnyMachine) -> None:
    for state in states(machine):
        allowed = {event for before, event in machine.transitions if before is state}
        for event in set(events(machine)) - allowed:
            with pytest.raises(UnexpectedEvent) as raised:
                next_state(machine.transitions, state, event)
            assert set(raised.value.allowed) == allowed
            sentence = str(raised.value)
            assert all(name in sentence for name in (state.name, event.name, *(one.name for one in allowed)))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), machine=st.sampled_from(MACHINES))
def test_a_random_walk_either_follows_the_table_or_raises(data: st.DataObject, machine: AnyMachine) -> None:
    state = machine.start
    for event in data.draw(st.lists(st.sampled_from(events(machine)), max_size=50)):
        if (state, event) in machine.transitions:
            state = next_state(machine.transitions, state, event)
            assert state in states(machine)
        else:
            with pytest.raises(UnexpectedEvent):
                next_state(machine.transitions, state, event)


def test_the_error_of_a_final_state_says_that_it_is_final() -> None:
    with pytest.raises(UnexpectedEvent, match=r"ProcessState STOPPED has no transition for .* END; it is final"):
        next_state(PROCESS_TRANSITIONS, ProcessState.STOPPED, ProcessEvent.END)


# The training process


def test_a_fault_free_run_goes_straight_from_start_to_end() -> None:
    steps = [ProcessEvent.WORLD_FORMED, ProcessEvent.NOTHING_FOUND, ProcessEvent.END]
    assert [state.name for state in walk(PROCESS, steps)] == ["STARTING", "INVENTORY", "TRAINING", "STOPPED"]


def test_a_survivor_parks_restarts_and_rejoins() -> None:
    steps = (
        "WORLD_FORMED NOTHING_FOUND PEER_LOST PARKED_STATE_SEALED RESTARTED WORLD_FORMED INVENTORY_AGREED PLAN_AGREED"
        " RESTORED_AT_TARGET ALL_REJOINED"
    )
    path = walk(PROCESS, [ProcessEvent[name] for name in steps.split()])
    assert path[-1] is ProcessState.TRAINING
    assert ProcessState.PARKED in path
    assert ProcessState.REPLAYING not in path


@pytest.mark.parametrize("state", [state for state in ProcessState if state is not ProcessState.STOPPED])
def test_the_loss_of_a_peer_is_expected_wherever_there_are_peers(state: ProcessState) -> None:
    assert (state, ProcessEvent.PEER_LOST) in PROCESS_TRANSITIONS


@pytest.mark.parametrize("state", [state for state in ProcessState if state is not ProcessState.STOPPED])
def test_after_any_loss_of_a_peer_training_can_go_on(state: ProcessState) -> None:
    after = next_state(PROCESS_TRANSITIONS, state, ProcessEvent.PEER_LOST)
    assert ProcessState.TRAINING in reachable(PROCESS, after, without=[ProcessEvent.PEER_LOST])


@pytest.mark.parametrize("interruption", [ProcessEvent.PEER_LOST, ProcessEvent.COPY_REFUSED])
@pytest.mark.parametrize("state", [ProcessState.REPLAYING, ProcessState.ROLLING_FORWARD])
def test_an_interrupted_replay_begins_again_from_restored_state(
    state: ProcessState, interruption: ProcessEvent
) -> None:
    """Without passing FETCHING there is no way back into a replay: half-done work is never replayed on."""
    after = next_state(PROCESS_TRANSITIONS, state, interruption)
    assert after not in (ProcessState.REPLAYING, ProcessState.ROLLING_FORWARD, ProcessState.REJOINING)
    entries = {event for (_, event), to in PROCESS_TRANSITIONS.items() if to is ProcessState.FETCHING}
    assert not reachable(PROCESS, after, without=entries) & {ProcessState.REPLAYING, ProcessState.ROLLING_FORWARD}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_sequence_of_events_replays_twice_on_one_restored_state(data: st.DataObject) -> None:
    state, restored = PROCESS.start, False
    for _ in range(60):
        allowed = [event for before, event in PROCESS_TRANSITIONS if before is state]
        if not allowed:
            break
        after = next_state(PROCESS_TRANSITIONS, state, data.draw(st.sampled_from(allowed)))
        if after is ProcessState.FETCHING:
            restored = True
        if after in (ProcessState.REPLAYING, ProcessState.ROLLING_FORWARD):
            assert restored
            restored = False
        state = after


def test_a_half_done_replay_is_never_parked() -> None:
    parking = {state for (state, _), after in PROCESS_TRANSITIONS.items() if after is ProcessState.PARKING}
    assert parking == {ProcessState.TRAINING, ProcessState.PARKING, ProcessState.REJOINING}


def test_a_recovery_is_impossible_only_when_it_is_planned() -> None:
    assert [state for state, event in PROCESS_TRANSITIONS if event is ProcessEvent.IMPOSSIBLE] == [
        ProcessState.PLANNING
    ]


# Windows


def test_a_window_is_protected_only_by_the_acknowledgements_of_its_peers() -> None:
    entries = {event for (_, event), after in WINDOW_TRANSITIONS.items() if after is WindowState.PROTECTED}
    assert entries == {WindowEvent.ACKNOWLEDGED}


def test_what_was_never_sealed_is_never_protected() -> None:
    unsealed = reachable(WINDOW, WINDOW.start, without=[WindowEvent.COPIED])
    assert unsealed == {WindowState.PLANNED, WindowState.COPYING, WindowState.TORN, WindowState.FREED}


@pytest.mark.parametrize("state", [WindowState.SEALED, WindowState.REPLICATING, WindowState.PROTECTED])
def test_a_sealed_window_stays_until_a_newer_one_is_protected_or_it_is_worthless(state: WindowState) -> None:
    endings = [WindowEvent.NEWER_PROTECTED, WindowEvent.ROLLED_BACK, WindowEvent.DAMAGED]
    assert WindowState.FREED not in reachable(WINDOW, state, without=endings)


def test_memory_is_freed_only_when_no_reader_is_left() -> None:
    entries = {event for (_, event), after in WINDOW_TRANSITIONS.items() if after is WindowState.FREED}
    assert entries == {WindowEvent.RELEASED}


def test_a_superseded_or_torn_window_is_never_read_again() -> None:
    for state in (WindowState.SUPERSEDED, WindowState.TORN):
        assert reachable(WINDOW, state) <= {WindowState.SUPERSEDED, WindowState.TORN, WindowState.FREED}


def test_a_window_that_lost_a_replica_is_protected_again_after_sending_it_anew() -> None:
    steps = "COPY_STARTED COPIED SEND_STARTED ACKNOWLEDGED REPLICA_LOST SEND_STARTED SEND_FAILED SEND_STARTED"
    path = walk(WINDOW, [WindowEvent[name] for name in [*steps.split(), "ACKNOWLEDGED"]])
    assert path[-1] is WindowState.PROTECTED


# Persist buffers


def test_three_buffers_take_turns_as_in_moc_figure_9() -> None:
    buffers = (BufferState.FREE,) * 3
    seen = []
    for index in (0, 1, 2, 0):
        for event in (BufferEvent.COPY_STARTED, BufferEvent.COPIED, BufferEvent.PERSIST_STARTED, BufferEvent.PERSISTED):
            buffers = advance_buffers(buffers, index, event)
        seen.append(tuple(state.name for state in buffers))
        if BufferState.DRAINING in buffers:
            buffers = advance_buffers(buffers, buffers.index(BufferState.DRAINING), BufferEvent.UNREFERENCED)
    assert seen == [
        ("RECOVERY", "FREE", "FREE"),
        ("DRAINING", "RECOVERY", "FREE"),
        ("FREE", "DRAINING", "RECOVERY"),
        ("RECOVERY", "FREE", "DRAINING"),
    ]


def test_a_second_buffer_is_not_persisted_while_one_is() -> None:
    buffers = (BufferState.PERSIST, BufferState.SEALED, BufferState.FREE)
    with pytest.raises(UnexpectedEvent, match="SEALED has no transition for BufferEvent PERSIST_STARTED"):
        advance_buffers(buffers, 1, BufferEvent.PERSIST_STARTED)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_at_most_one_buffer_persists_one_recovers_and_a_used_one_is_never_overwritten(data: st.DataObject) -> None:
    buffers: tuple[BufferState, ...] = (BufferState.FREE,) * 3
    for _ in range(40):
        index, event = data.draw(st.tuples(st.integers(0, 2), st.sampled_from(BufferEvent)))
        try:
            after = advance_buffers(buffers, index, event)
        except UnexpectedEvent:
            continue
        assert after.count(BufferState.PERSIST) <= 1
        assert after.count(BufferState.RECOVERY) <= 1
        for old, new in zip(buffers, after, strict=True):
            assert new is not BufferState.SNAPSHOT or old in (BufferState.FREE, BufferState.SNAPSHOT)
        if BufferState.RECOVERY in buffers:
            assert BufferState.RECOVERY in after or event is BufferEvent.SUPERSEDED
        buffers = after


def test_a_buffer_returns_only_when_nothing_refers_to_it() -> None:
    into_free = {key for key, after in BUFFER_TRANSITIONS.items() if after is BUFFER.start}
    assert into_free == {(BufferState.DRAINING, BufferEvent.UNREFERENCED)}


# Protection


def test_every_event_has_an_answer_in_every_state_of_protection() -> None:
    assert set(PROTECTION_TRANSITIONS) == {(state, event) for state in ProtectionState for event in ProtectionEvent}


def test_a_job_is_unprotected_until_the_first_commit() -> None:
    first = Protection().after(ProtectionEvent.ATTEMPT_FAILED, 3)
    assert first == Protection(ProtectionState.UNPROTECTED, 0)
    assert first.after(ProtectionEvent.COMMITTED, 5) == Protection(ProtectionState.PROTECTED, 5)


def test_protection_tells_since_when_it_is_what_it_is() -> None:
    protection = Protection().after(ProtectionEvent.COMMITTED, 4).after(ProtectionEvent.COMMITTED, 8)
    assert protection == Protection(ProtectionState.PROTECTED, 4)
    short = protection.after(ProtectionEvent.COPIES_SHORT, 9).after(ProtectionEvent.ATTEMPT_FAILED, 11)
    assert short == Protection(ProtectionState.DEGRADED, 9)
    assert short.after(ProtectionEvent.COPIES_GONE, 12) == Protection(ProtectionState.UNPROTECTED, 12)


# The page


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lifecycle_diagrams", ROOT / "tools" / "lifecycle_diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tables_generate(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "lifecycle.md").read_text(encoding="utf-8") == tool.render()


@every_machine
def test_the_diagram_has_each_transition_once(machine: AnyMachine, tool: ModuleType) -> None:
    drawn = [
        (before, name, after)
        for before, rest in (line.strip().split(" --> ") for line in list(tool.diagram(machine))[1:])
        for after, _, names in (rest.partition(": "),)
        for name in names.split(", ")
        if before != "[*]" and after != "[*]"
    ]
    expected = [(before.name, event.name, after.name) for (before, event), after in machine.transitions.items()]
    assert sorted(drawn) == sorted(expected)


def test_a_page_that_is_out_of_date_is_told_by_the_exit_code(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "lifecycle.md")
    assert tool.main(["--check"]) == 1
    assert "run python tools/lifecycle_diagrams.py" in capsys.readouterr().err
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
