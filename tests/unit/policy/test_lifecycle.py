"""The lifecycles: that the tracker lives by their tables, and that the documentation is made of these."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import CONFIG, Rank, at_random, job_of, protected

from megatron.core.dist_checkpointing.moe.policy.lifecycle import (
    PROTECTION,
    TABLES,
    WINDOW,
    PersistState,
    Protection,
    ProtectionEvent,
    ProtectionState,
    TransitionTable,
    UnexpectedEvent,
    WindowEvent,
    WindowState,
)
from megatron.core.dist_checkpointing.moe.policy.tracking import (
    SPARE_SPAN,
    RestoredState,
    Status,
    TrackedPiece,
    TrackedWindow,
)
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import Level, Window, expert, full_plan

ROOT = Path(__file__).parents[3]
AnyTable = TransitionTable[Any, Any]
every_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)


def states(table: AnyTable) -> list[Enum]:
    return list(type(table.starts[0]))


def events(table: AnyTable) -> list[Enum]:
    return list(type(next(iter(table.rows))[1]))


def reachable(table: AnyTable, starts: Iterable[Enum], without: Iterable[Enum] = ()) -> set[Enum]:
    """States reached from `starts`, by no event that is in `without`."""
    found, frontier = set(starts), list(starts)
    while frontier:
        state = frontier.pop()
        for (before, event), (after, _) in table.rows.items():
            if before is state and event not in without and after not in found:
                found.add(after)
                frontier.append(after)
    return found


# The tables


@every_table
def test_every_state_is_reached_from_a_start(table: AnyTable) -> None:
    assert reachable(table, table.starts) == set(states(table))


@every_table
def test_every_event_can_happen(table: AnyTable) -> None:
    assert {event for _, event in table.rows} == set(events(table))


@every_table
def test_every_state_event_and_transition_has_a_sentence(table: AnyTable) -> None:
    for members in (type(table.starts[0]), type(events(table)[0])):
        assert len(list(members)) == len(members.__members__)
        assert all(member.value.endswith(".") for member in members)
    assert all(why.endswith(".") for _, why in table.rows.values())


@every_table
def test_every_absent_transition_raises_and_names_what_is_allowed(table: AnyTable) -> None:
    for state in states(table):
        allowed = {event for before, event in table.rows if before is state}
        for event in set(events(table)) - allowed:
            with pytest.raises(UnexpectedEvent) as raised:
                table.after(state, event)
            assert set(raised.value.allowed) == allowed
            sentence = str(raised.value)
            assert all(name in sentence for name in (state.name, event.name, *(known.name for known in allowed)))


def test_the_error_of_a_final_state_says_that_it_is_final() -> None:
    with pytest.raises(UnexpectedEvent, match=r"WindowState FREED has no transition for .* SEALED; it is final"):
        WINDOW.after(WindowState.FREED, WindowEvent.SEALED)


def test_a_window_is_protected_only_by_the_acknowledgements_of_its_peers() -> None:
    entries = {event for (_, event), (after, _) in WINDOW.rows.items() if after is WindowState.PROTECTED}
    assert entries == {WindowEvent.ALL_ACKNOWLEDGED}


def test_what_was_never_sealed_is_never_protected() -> None:
    unsealed = reachable(WINDOW, [WindowState.COPYING], without=[WindowEvent.ALL_SEALED])
    assert unsealed == {WindowState.COPYING, WindowState.GIVEN_UP, WindowState.FREED}


@pytest.mark.parametrize("state", [WindowState.REPLICATING, WindowState.PROTECTED, WindowState.UNDER_REPLICATED])
def test_a_whole_window_stays_until_newer_ones_cover_it(state: WindowState) -> None:
    assert WindowState.FREED not in reachable(WINDOW, [state], without=[WindowEvent.SUPERSEDED])


# The tracker lives by them


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Enum, Enum]]:
    """The rows that anything asked a table for."""
    found: set[tuple[str, Enum, Enum]] = set()
    original = TransitionTable.after

    def after(self: AnyTable, state: Enum, event: Enum) -> Enum:
        following = original(self, state, event)
        found.add((self.title, state, event))
        return following

    monkeypatch.setattr(TransitionTable, "after", after)
    return found


def restored(rank: Rank, *, spare: bool = False, from_storage: bool = False) -> Rank:
    """A rank that continues after a recovery to iteration 3: windows in memory and in storage, or spare pieces."""
    groups = tuple((operator,) for operator in rank.job.operators)
    window = Window(1, (*groups[:2], tuple(operator for group in groups[2:] for operator in group)))
    plans = tuple(window.plan(iteration) for iteration in range(1, 4))
    kept = () if spare else tuple(Piece("snapshot", plan, range(1, 4)) for plan in plans)
    names = frozenset({(3, "snapshot")}) if spare else frozenset[tuple[int, str]]()
    rank.tracker.resume(RestoredState(3, kept, (plans,), names, from_storage))
    rank.tiers.memory, rank.iteration = {1, 2, 3} - ({1, 2} if spare else set()), 3
    return rank


def run(rank: Rank, *news: Status | Callable[[int], Status], then_protected: int = 12) -> Rank:
    """Iterations with this news about every open round, or by position of the round; then all goes well."""
    for status in news:
        rank.step(status if callable(status) else lambda _, status=status: status)  # type: ignore[misc]
    for _ in range(then_protected):
        rank.step(protected)
    return rank


def failing_persistence(rank: Rank) -> Callable[[int], Status]:
    """All is well but storage."""
    return lambda at: Status.FAILED if rank.tracker.rounds.open[at].level is Level.PERSIST else Status.PROTECTED


def only_first(status: Status) -> Callable[[int], Status]:
    """Of the oldest round; all is well with the others."""
    return lambda at: Status.PROTECTED if at else status


def losing_contact(rank: Rank) -> None:
    for iteration in (rank.iteration, rank.iteration + 1):
        rank.tracker.lost_contact(iteration, TimeoutError("no message"))


def test_what_a_fault_left_half_written_is_removed_once_there_are_newer_pieces_of_each_kind() -> None:
    rank = Rank(job_of())
    kinds = {2: {"window"}, 3: {"window", "expert"}, 99: {"window"}}
    torn = {iteration: frozenset(of) for iteration, of in kinds.items()}
    rank.tracker.resume(RestoredState(3, (), (), frozenset(), torn=torn))
    rank.iteration, rank.tiers.storage = 3, set(torn)
    run(rank)
    assert rank.tiers.storage & torn.keys() == {3, 99}


def test_what_was_half_written_and_is_written_again_stays_as_long_as_others() -> None:
    rank = Rank(job_of())
    torn = {iteration: frozenset({"window"}) for iteration in range(1, 20)}
    rank.tracker.resume(RestoredState(3, (), (), frozenset(), torn=torn))
    rank.iteration, rank.tiers.storage = 3, set(torn)
    copies = 0
    for _ in range(16):
        rank.step(protected)
        whole = [copy for copy in rank.tracker.persisted.values() if copy.state is PersistState.PERSISTENT]
        assert {piece.plan.iteration for copy in whole for piece in copy.pieces} <= rank.tiers.storage
        copies = max(copies, len(whole))
    assert copies > 1


def test_every_row_of_every_table_is_taken_by_the_tracker(taken: set[tuple[str, Enum, Enum]]) -> None:
    """A row that the product never comes to describes nothing, and is to be deleted."""
    job = job_of(replace(CONFIG, persist_keep=1))
    some, none, failed = Status.UNDER_REPLICATED, Status.PENDING, Status.FAILED
    losing_contact(run(Rank(job), then_protected=30))
    losing_contact(run(Rank(job), then_protected=0))
    run(Rank(job), *[protected] * 6, some)
    run(Rank(job), some, protected, some, protected, protected, some)
    run(Rank(job), Status.SEALED, protected, Status.SEALED, protected)
    run(Rank(job), none, lambda at: none if at else failed, protected)
    run(Rank(job), none, lambda at: none if at else failed, failed)
    run(restored(Rank(job)), protected)
    run(restored(Rank(job)), some)
    run(restored(Rank(job), spare=True))
    broken = Rank(job)
    run(broken, *[failing_persistence(broken)] * 12)
    all_rows = {(table.title, state, event) for table in TABLES for state, event in table.rows}
    assert all_rows - taken == set()


def judged(span: range, reached: dict[int, Status]) -> WindowState | None:
    """By brute force: the state of a window, from what all ranks have reached with each of its snapshots; None where
    all that is left of it is gone."""
    rounds = list(reached.values())
    if Status.FAILED in rounds:
        return None if all(status.is_final for status in rounds) else WindowState.GIVEN_UP
    if reached.get(span[-1], Status.PENDING) is Status.PENDING:
        return WindowState.COPYING
    if not all(status.is_final for status in rounds):
        return WindowState.REPLICATING
    return WindowState.PROTECTED if set(rounds) == {Status.PROTECTED} else WindowState.UNDER_REPLICATED


@given(st.sampled_from(["1", "2", "3", "4"]), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_each_window_is_in_the_state_that_the_reports_of_all_ranks_add_up_to(window: str, seed: int) -> None:
    rank = Rank(job_of(replace(CONFIG, window=window)))
    news = at_random(seed, {status: 2 + (status is Status.PROTECTED) * 8 for status in Status})
    reached: dict[range, dict[int, Status]] = {}
    update = rank.tracker.update

    def noted(statuses: Any, iteration: int) -> bool:
        for round_, status in zip(rank.tracker.rounds.open, statuses, strict=True):
            if round_.level is Level.SNAPSHOT:
                reached.setdefault(round_.span, {})[round_.plan.iteration] = status
        return update(statuses, iteration)

    rank.tracker.update = noted  # type: ignore[method-assign]
    for _ in range(40):
        rank.step(news)
        windows = rank.tracker.windows
        for span, statuses in reached.items():
            expected = judged(span, statuses)
            if span in windows:
                assert windows[span].state is expected, (span, statuses)
            else:  # nothing is freed but what was given up and what a newer window covers
                newer = [other for other in windows.values() if other.span[0] > span[0] and other.sealed]
                assert expected is None or newer, (span, statuses)
        tracked = {piece.iteration for held in windows.values() for piece in held.pieces}
        sealed = {piece.iteration for held in windows.values() for piece in held.sealed}
        assert sealed <= rank.tiers.memory <= tracked


def test_what_a_recovery_found_on_some_ranks_stays_until_a_newer_window_is_protected() -> None:
    rank = restored(Rank(job_of()), spare=True)
    run(rank, protected, protected, then_protected=0)
    assert rank.tracker.windows[SPARE_SPAN].state is WindowState.SPARE
    assert 3 in rank.tiers.memory
    run(rank, then_protected=1)
    assert SPARE_SPAN not in rank.tracker.windows
    assert 3 not in rank.tiers.memory


def test_a_restored_window_without_all_replicas_gives_way_to_the_next_protected_one() -> None:
    rank = run(restored(Rank(job_of())), only_first(Status.UNDER_REPLICATED), then_protected=0)
    assert rank.tracker.windows[range(1, 4)].state is WindowState.UNDER_REPLICATED
    assert rank.tracker.protection == Protection(ProtectionState.DEGRADED, 3)
    run(rank, then_protected=3)
    assert range(1, 4) not in rank.tracker.windows
    assert rank.tracker.protection.state is ProtectionState.PROTECTED


def test_a_copy_that_is_begun_in_the_message_that_ends_the_one_before_is_not_removed_with_it() -> None:
    rank = Rank(job_of(replace(CONFIG, window="1", persist_interval=1, persist_keep=1)))
    run(rank, Status.PENDING, lambda at: Status.PENDING if at else Status.PROTECTED, protected, then_protected=0)
    states = {span[-1]: copy.state for span, copy in rank.tracker.persisted.items()}
    assert states == {1: PersistState.PERSISTENT, 2: PersistState.WRITING}
    assert rank.tiers.storage == {1, 2}
    run(rank, then_protected=1)
    assert 1 not in rank.tiers.storage
    assert 2 in rank.tiers.storage


# Protection


def test_every_event_has_an_answer_in_every_state_of_protection() -> None:
    assert set(PROTECTION.rows) == {(state, event) for state in ProtectionState for event in ProtectionEvent}


def test_a_job_is_unprotected_until_the_first_commit() -> None:
    first = Protection().after(ProtectionEvent.ATTEMPT_FAILED, 3)
    assert first == Protection(ProtectionState.UNPROTECTED, 0)
    assert first.after(ProtectionEvent.COMMITTED, 5) == Protection(ProtectionState.PROTECTED, 5)


def test_protection_tells_since_when_it_is_what_it_is() -> None:
    protection = Protection().after(ProtectionEvent.COMMITTED, 4).after(ProtectionEvent.COMMITTED, 8)
    assert protection == Protection(ProtectionState.PROTECTED, 4)
    short = protection.after(ProtectionEvent.CONTACT_LOST, 9).after(ProtectionEvent.ATTEMPT_FAILED, 11)
    assert short == Protection(ProtectionState.DEGRADED, 9)


# The page


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lifecycle_diagrams", ROOT / "tools" / "lifecycle_diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tables_generate(tool: ModuleType) -> None:
    assert (ROOT / "docs" / "internals" / "lifecycle.md").read_text(encoding="utf-8") == tool.render()


@every_table
def test_the_diagram_has_each_transition_once(table: AnyTable, tool: ModuleType) -> None:
    drawn = [
        (before, name, after)
        for before, rest in (line.strip().split(" --> ") for line in list(tool.diagram(table))[1:])
        for after, _, names in (rest.partition(": "),)
        for name in names.split(", ")
        if before != "[*]" and after != "[*]"
    ]
    expected = [(before.name, event.name, after.name) for (before, event), (after, _) in table.rows.items()]
    assert sorted(drawn) == sorted(expected)


def test_a_page_that_is_out_of_date_is_told_by_the_exit_code(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "lifecycle.md")
    assert tool.main(["--check"]) == 1
    assert "run python tools/lifecycle_diagrams.py" in capsys.readouterr().err
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize(("from_storage", "newest"), [(False, 3), (True, None)])
def test_a_restored_state_of_which_some_rank_has_a_piece_in_storage_alone_is_not_protected(
    from_storage: bool, newest: int | None
) -> None:
    rank = restored(Rank(job_of()), from_storage=from_storage)
    rank.step(protected)
    assert rank.tracker.newest_protected == newest
    run(rank)
    assert rank.tracker.protection.state is ProtectionState.PROTECTED


def test_while_peers_lack_the_only_copy_of_an_operator_nothing_counts_as_protected() -> None:
    rank, span = Rank(job_of()), range(1)
    piece = TrackedPiece(Piece("old", full_plan(0, [expert(9, 0)])), Status.UNDER_REPLICATED)
    rank.tracker.windows[span] = TrackedWindow(span, WindowState.UNDER_REPLICATED, (piece,))
    run(rank)
    assert rank.tracker.newest_protected is None
    rank.tracker.windows[span] = TrackedWindow(span, WindowState.PROTECTED, (piece,))
    run(rank)
    assert rank.tracker.newest_protected is not None
