"""Retention: what is freed, and that no newest copy ever is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.lifecycle import (
    WINDOW_TRANSITIONS,
    WindowEvent,
    WindowState,
    next_state,
)
from megatron.core.dist_checkpointing.moe.policy.retention import (
    Agreement,
    DirectoryKind,
    LogRange,
    Reason,
    Retention,
    StoredDirectory,
    StoredWindow,
    replay_base,
    retain_directories,
    retain_logs,
    retain_windows,
)
from megatron.core.dist_checkpointing.moe.types import OperatorId, Part, SnapshotPlan, Window, expert, full_plan

EXPERTS = tuple(expert(0, index) for index in range(4))
COMMITTED = (WindowState.SEALED, WindowState.REPLICATING, WindowState.PROTECTED)
STATES = [state for state in WindowState if state is not WindowState.FREED]
Key = tuple[int, OperatorId, Part]


def sparse(first: int, state: WindowState, rank: int = 0, **more: object) -> StoredWindow:
    """A sparse window of two iterations over all experts."""
    window = Window(first, (EXPERTS[:2], EXPERTS[2:]))
    plans = tuple(window.plan(first + step) for step in range(2))
    return StoredWindow(f"{rank}:{first}", rank, first, first + 1, state, plans, **more)  # type: ignore[arg-type]


def partial(iteration: int, *parts: tuple[int, Part], state: WindowState = WindowState.PROTECTED) -> StoredWindow:
    """A lossy snapshot with parts of some experts."""
    plan = SnapshotPlan(iteration, {EXPERTS[index]: part for index, part in parts})
    return StoredWindow(f"0:{iteration}", 0, iteration, iteration, state, (plan,))


def dense(iteration: int, kind: DirectoryKind = DirectoryKind.DENSE, **more: object) -> StoredDirectory:
    return StoredDirectory(f"{kind.value}-{iteration}", iteration, kind, **{"complete": True, **more})  # type: ignore[arg-type]


def partial_directory(iteration: int, *indices: int, part: Part = Part.FULL, **more: object) -> StoredDirectory:
    plan = full_plan(iteration, (EXPERTS[index] for index in indices), part)
    return dense(iteration, DirectoryKind.PARTIAL, plans=(plan,), **more)


def names(judged: Iterable[tuple[StoredWindow | StoredDirectory, Reason]]) -> list[str]:
    return [item.name for item, _ in judged]


def reasons(retained: Retention[StoredWindow] | Retention[StoredDirectory]) -> dict[str, Reason]:
    return {item.name: reason for item, reason in (*retained.freed, *retained.kept)}


def newest_copies(windows: Iterable[StoredWindow], fits: Callable[[StoredWindow], bool]) -> dict[Key, int]:
    """By brute force: the newest iteration with each component of each operator, among the windows that fit."""
    found: dict[Key, int] = {}
    for window in windows:
        for plan in window.plans if fits(window) else ():
            for operator, part in plan.parts.items():
                for component in (Part.MASTER, Part.MOMENTS, Part.COMPUTE):
                    if component in part or (component is Part.COMPUTE and Part.MASTER in part):
                        key = (window.rank, operator, component)
                        found[key] = max(found.get(key, -1), plan.iteration)
    return found


@st.composite
def stored_windows(draw: st.DrawFn) -> list[StoredWindow]:
    """Windows and snapshots of two ranks in any state, with any parts of any experts."""
    found = []
    for number in range(draw(st.integers(0, 7))):
        first = draw(st.integers(0, 12))
        last = first + draw(st.integers(0, 2))
        plans = tuple(
            SnapshotPlan(
                iteration,
                draw(
                    st.dictionaries(
                        st.sampled_from(EXPERTS), st.sampled_from([Part.FULL, Part.MASTER, Part.MOMENTS, Part.WEIGHTS])
                    )
                ),
            )
            for iteration in range(first, last + 1)
        )
        state, rank = draw(st.sampled_from(STATES)), draw(st.integers(0, 1))
        window = StoredWindow(
            str(number), rank, first, last, state, plans, draw(st.integers(0, 2)), draw(st.booleans())
        )
        found.append(window)
    return found


agreements = st.builds(
    lambda protected, ahead: all_have(protected, None if protected is None and ahead < 3 else (protected or 0) + ahead),
    st.none() | st.integers(0, 15),
    st.integers(0, 6),
)


def all_have(protected: int | None, sealed: int | None = None) -> Agreement:
    """What the ranks agreed on; sealed as far as protected, if not said otherwise."""
    return Agreement(protected, protected if sealed is None else sealed)


# Known cases


def test_one_protected_window_and_one_in_flight_stay() -> None:
    windows = [sparse(0, WindowState.PROTECTED), sparse(2, WindowState.PROTECTED), sparse(4, WindowState.COPYING)]
    assert reasons(retain_windows(windows, all_have(3))) == {
        "0:0": Reason.COVERED,
        "0:2": Reason.NEWEST_PROTECTED,
        "0:4": Reason.UNDER_WAY,
    }


@pytest.mark.parametrize("state", [WindowState.COPYING, WindowState.SEALED, WindowState.REPLICATING])
def test_the_previous_window_stays_until_the_next_one_is_protected(state: WindowState) -> None:
    assert names(retain_windows([sparse(0, WindowState.PROTECTED), sparse(2, state)], all_have(1)).kept) == [
        "0:0",
        "0:2",
    ]


def test_the_previous_window_stays_until_all_ranks_have_the_next_one_protected() -> None:
    windows = [sparse(0, WindowState.PROTECTED), sparse(2, WindowState.PROTECTED)]
    assert names(retain_windows(windows, all_have(1)).freed) == []
    assert names(retain_windows(windows, all_have(2)).freed) == []
    assert names(retain_windows(windows, all_have(3)).freed) == ["0:0"]


def test_the_window_that_all_have_protected_stays_when_all_have_sealed_a_newer_one() -> None:
    """Here the newer one is protected too, but not yet on all other ranks."""
    windows = [sparse(0, WindowState.PROTECTED), sparse(2, WindowState.PROTECTED)]
    assert reasons(retain_windows(windows, Agreement(1, 3)))["0:0"] is Reason.COMMON


def test_a_sealed_window_stays_until_all_ranks_have_sealed_the_next_one() -> None:
    windows = [sparse(0, WindowState.SEALED), sparse(2, WindowState.SEALED)]
    assert reasons(retain_windows(windows, Agreement(None, 1)))["0:0"] is Reason.COMMON
    assert names(retain_windows(windows, Agreement(None, 3)).freed) == ["0:0"]


def test_without_any_agreement_no_committed_window_is_freed() -> None:
    windows = [sparse(0, WindowState.PROTECTED), sparse(2, WindowState.PROTECTED)]
    assert reasons(retain_windows(windows, Agreement()))["0:0"] is Reason.NOT_AGREED


def test_the_newest_sealed_window_stays_where_none_is_protected() -> None:
    windows = [sparse(first, WindowState.SEALED) for first in (0, 2, 4)]
    assert reasons(retain_windows(windows, all_have(5))) == {
        "0:0": Reason.COVERED,
        "0:2": Reason.COVERED,
        "0:4": Reason.NEWEST_COPY,
    }


def test_a_window_with_some_replicas_is_not_freed_for_a_newer_one_with_none() -> None:
    windows = [sparse(0, WindowState.SEALED, acknowledged=1), sparse(2, WindowState.SEALED)]
    assert names(retain_windows(windows, all_have(3)).freed) == []


def test_a_running_replication_is_not_given_up_for_a_newer_seal() -> None:
    windows = [sparse(0, WindowState.PROTECTED), sparse(2, WindowState.REPLICATING), sparse(4, WindowState.SEALED)]
    assert reasons(retain_windows(windows, all_have(5)))["0:2"] is Reason.UNDER_WAY


def test_a_replication_that_a_newer_protected_window_overtook_is_given_up() -> None:
    windows = [sparse(2, WindowState.REPLICATING), sparse(4, WindowState.PROTECTED)]
    assert names(retain_windows(windows, all_have(5)).freed) == ["0:2"]


@pytest.mark.parametrize("state", [WindowState.TORN, WindowState.SUPERSEDED])
def test_a_torn_or_superseded_window_is_freed_at_once_unless_it_is_in_use(state: WindowState) -> None:
    assert names(retain_windows([sparse(0, state)], Agreement()).freed) == ["0:0"]
    assert reasons(retain_windows([sparse(0, state, in_use=True)], Agreement())) == {"0:0": Reason.IN_USE}


def test_a_window_of_one_rank_never_stands_in_for_that_of_another() -> None:
    windows = [sparse(0, WindowState.PROTECTED, rank=1), sparse(2, WindowState.PROTECTED, rank=0)]
    assert names(retain_windows(windows, all_have(9)).freed) == []


def test_an_old_snapshot_with_the_newest_copy_of_one_expert_stays() -> None:
    windows = [partial(1, (0, Part.FULL), (1, Part.FULL)), partial(2, (0, Part.FULL)), partial(3, (0, Part.FULL))]
    assert names(retain_windows(windows, all_have(3)).freed) == ["0:2"]


def test_an_old_snapshot_with_the_newest_moments_of_an_expert_stays() -> None:
    windows = [partial(1, (0, Part.FULL)), partial(2, (0, Part.MASTER))]
    assert names(retain_windows(windows, all_have(2)).freed) == []
    assert names(retain_windows([*windows, partial(3, (0, Part.MOMENTS))], all_have(3)).freed) == ["0:1"]


def test_master_weights_make_older_compute_weights_superfluous_but_not_the_reverse() -> None:
    assert names(retain_windows([partial(1, (0, Part.WEIGHTS)), partial(2, (0, Part.MASTER))], all_have(2)).freed) == [
        "0:1"
    ]
    assert names(retain_windows([partial(1, (0, Part.MASTER)), partial(2, (0, Part.WEIGHTS))], all_have(2)).freed) == []


# Properties of windows


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements, st.data())
def test_every_operator_keeps_its_newest_copy_at_every_level_of_replication(
    windows: list[StoredWindow], agreed: Agreement, data: st.DataObject
) -> None:
    level = data.draw(st.sampled_from([0, 1, 2, 3]))

    def fits(window: StoredWindow) -> bool:
        return window.state in COMMITTED and (window.state is WindowState.PROTECTED or window.acknowledged >= level)

    kept = [window for window, _ in retain_windows(windows, agreed).kept]
    assert newest_copies(kept, fits) == newest_copies(windows, fits)


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements)
def test_freeing_twice_frees_nothing_more(windows: list[StoredWindow], agreed: Agreement) -> None:
    once = retain_windows(windows, agreed)
    again = retain_windows([window for window, _ in once.kept], agreed)
    assert again == Retention((), once.kept)


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements, st.randoms(use_true_random=False))
def test_the_order_of_windows_does_not_matter(
    windows: list[StoredWindow], agreed: Agreement, shuffler: random.Random
) -> None:
    shuffled = shuffler.sample(windows, len(windows))
    assert retain_windows(shuffled, agreed) == retain_windows(windows, agreed)


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements)
def test_every_window_is_either_kept_or_freed_and_what_is_in_use_is_kept(
    windows: list[StoredWindow], agreed: Agreement
) -> None:
    retained = retain_windows(windows, agreed)
    assert sorted(names((*retained.kept, *retained.freed))) == sorted(window.name for window in windows)
    assert not [window for window, _ in retained.freed if window.in_use]


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements)
def test_the_newest_copies_of_what_all_ranks_have_stay(windows: list[StoredWindow], agreed: Agreement) -> None:
    kept = [window for window, _ in retain_windows(windows, agreed).kept]
    for states, upto in (
        (COMMITTED, agreed.sealed_iteration),
        ((WindowState.PROTECTED,), agreed.protected_iteration),
    ):

        def fits(window: StoredWindow, states: object = states, upto: int | None = upto) -> bool:
            return upto is not None and window.state in states and window.last_iteration <= upto  # type: ignore[operator]

        assert newest_copies(kept, fits) == newest_copies(windows, fits)


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements)
def test_nothing_newer_than_what_all_ranks_have_is_freed(windows: list[StoredWindow], agreed: Agreement) -> None:
    for window, _ in retain_windows(windows, agreed).freed:
        if window.state is WindowState.PROTECTED:
            assert agreed.protected_iteration is not None
            assert window.last_iteration <= agreed.protected_iteration
        elif window.state in COMMITTED:
            assert agreed.sealed_iteration is not None
            assert window.last_iteration <= agreed.sealed_iteration


@settings(max_examples=100, deadline=None)
@given(stored_windows(), st.integers(0, 15))
def test_a_window_is_freed_when_a_protected_one_that_all_have_is_newer_in_everything(
    windows: list[StoredWindow], upto: int
) -> None:
    freed = names(retain_windows(windows, all_have(upto)).freed)
    agreed = [one for one in windows if one.state is WindowState.PROTECTED and one.last_iteration <= upto]
    for window in windows:
        if window.in_use or window.state not in COMMITTED or window.last_iteration > upto:
            continue
        copies = newest_copies([window], lambda _: True)
        for other in agreed:
            newer = newest_copies([other], lambda _: True)
            if all(newer.get(key, -1) > iteration for key, iteration in copies.items()):
                assert window.name in freed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sparse_windows_take_the_memory_of_two_beside_those_in_use(data: st.DataObject) -> None:
    """Windows of one rank live by their table; each is protected, late or soon, before the next one is complete."""
    held: list[StoredWindow] = []
    for first in range(0, 20, 2):
        held.append(sparse(first, WindowState.PLANNED))
        previous_done = data.draw(st.integers(0, 2))  # at which step of this window the previous one gets protected
        for step, event in enumerate((WindowEvent.COPY_STARTED, None, WindowEvent.COPIED)):
            if step == previous_done and len(held) > 1 and held[-2].state is not WindowState.PROTECTED:
                held[-2] = advanced(held[-2], WindowEvent.ACKNOWLEDGED, in_use=False)
            if event is not None:
                held[-1] = advanced(held[-1], event)
            agreed = agreement_of([held])
            held = [window for window, _ in retain_windows(held, agreed).kept]
            assert sum(not window.in_use for window in held) <= 2
        held[-1] = advanced(held[-1], WindowEvent.SEND_STARTED, in_use=True)


def advanced(window: StoredWindow, event: WindowEvent, in_use: bool = False) -> StoredWindow:
    return replace(window, state=next_state(WINDOW_TRANSITIONS, window.state, event), in_use=in_use)


def agreement_of(ranks: list[list[StoredWindow]]) -> Agreement:
    """What ranks find when they tell each other what they hold."""
    common: list[int | None] = []
    for states in ((WindowState.PROTECTED,), COMMITTED):
        held = [{one.last_iteration for one in windows if one.state in states} for windows in ranks]
        common.append(max(set.intersection(*held), default=None))
    return Agreement(*common)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["seal", "protect", "tear", "tell"])), max_size=80))
def test_ranks_at_different_paces_never_free_what_they_have_in_common(turns: list[tuple[int, str]]) -> None:
    """Each rank seals one window after the other, protects some and loses some; now and then they tell."""
    ranks: list[list[StoredWindow]] = [[], [], []]
    sealed = [0, 0, 0]
    agreed = Agreement()
    for rank, action in [*turns, *((rank, action) for action in ("seal", "protect") for rank in range(3)), (0, "tell")]:
        held = ranks[rank]
        if action == "seal":
            held.append(sparse(2 * sealed[rank], WindowState.SEALED, rank))
            sealed[rank] += 1
        elif action == "tell":
            agreed = agreement_of(ranks)
        elif held and held[-1].state is WindowState.SEALED:
            event = WindowEvent.ACKNOWLEDGED if action == "protect" else WindowEvent.DAMAGED
            if action == "protect" or held[-1].last_iteration > (agreed.sealed_iteration or -1):
                held[-1] = advanced(held[-1], event)
        ranks = [[window for window, _ in retain_windows(one, agreed).kept] for one in ranks]
        found = agreement_of(ranks)
        assert (found.protected_iteration or -1) >= (agreed.protected_iteration or -1)
        assert (found.sealed_iteration or -1) >= (agreed.sealed_iteration or -1)


def test_ranks_that_agree_late_all_come_down_to_one_window() -> None:
    ranks = [[sparse(2 * number, WindowState.PROTECTED, rank) for number in range(3 + rank)] for rank in range(3)]
    agreed = agreement_of(ranks)
    ranks = [[window for window, _ in retain_windows(held, agreed).kept] for held in ranks]
    assert [[window.first_iteration for window in held] for held in ranks] == [[4], [4, 6], [4, 6, 8]]
    ranks[0] += [sparse(6, WindowState.PROTECTED, 0), sparse(8, WindowState.PROTECTED, 0)]
    ranks[1] += [sparse(8, WindowState.PROTECTED, 1)]
    agreed = agreement_of(ranks)
    ranks = [[window for window, _ in retain_windows(held, agreed).kept] for held in ranks]
    assert [[window.first_iteration for window in held] for held in ranks] == [[8], [8], [8]]


def test_partial_snapshots_are_as_many_as_it_takes_to_cover_all_experts() -> None:
    held: list[StoredWindow] = []
    for iteration in range(20):
        held.append(partial(iteration, (iteration % 4, Part.FULL)))
        held = [window for window, _ in retain_windows(held, all_have(iteration)).kept]
        assert [window.first_iteration for window in held] == list(range(max(0, iteration - 3), iteration + 1))


# Logs


@settings(max_examples=100, deadline=None)
@given(stored_windows(), agreements, st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3)), max_size=10))
def test_every_replay_from_a_kept_window_finds_all_logs_that_there_were(
    windows: list[StoredWindow], agreed: Agreement, ranges: list[tuple[int, int]]
) -> None:
    logs = [LogRange(first, first + length) for first, length in ranges]
    retained = retain_windows(windows, agreed)
    kept = [log for log, _ in retain_logs(logs, replay_base(retained)).kept]
    for window, _ in retained.kept:
        assert logged(logs, window.first_iteration) == logged(kept, window.first_iteration)


def logged(logs: Iterable[LogRange], base: int) -> set[int]:
    """Iterations after `base` with a log."""
    return {iteration for log in logs for iteration in range(log.first_iteration, log.last_iteration + 1)} - set(
        range(base + 1)
    )


def test_logs_up_to_the_oldest_kept_window_are_freed() -> None:
    logs = [LogRange(iteration, iteration) for iteration in range(5)]
    assert [log.first_iteration for log, _ in retain_logs(logs, 2).freed] == [0, 1, 2]


def test_a_log_that_reaches_into_a_replay_or_is_in_use_is_kept() -> None:
    assert retain_logs([LogRange(0, 3)], 2).kept == ((LogRange(0, 3), Reason.REPLAY),)
    assert retain_logs([LogRange(0, 1, in_use=True)], 2).kept == ((LogRange(0, 1, in_use=True), Reason.IN_USE),)


def test_without_a_window_no_log_is_freed() -> None:
    assert replay_base(retain_windows([], Agreement())) is None
    assert retain_logs([LogRange(0, 1)], None).kept == ((LogRange(0, 1), Reason.UNKNOWN_BASE),)


# Directories


def test_the_last_dense_directories_stay() -> None:
    retained = retain_directories([dense(iteration) for iteration in (10, 20, 30)], keep_last=2)
    assert names(retained.freed) == ["dense-10"]


def test_an_incomplete_directory_is_removed_and_never_counts() -> None:
    directories = [dense(10), dense(20, complete=False), dense(30, complete=False, in_use=True)]
    assert reasons(retain_directories(directories, keep_last=1)) == {
        "dense-10": Reason.AMONG_LAST,
        "dense-20": Reason.TORN,
        "dense-30": Reason.IN_USE,
    }


def test_each_kind_has_its_own_last_ones() -> None:
    directories = [dense(10), dense(20), dense(5, DirectoryKind.WINDOW), dense(15, DirectoryKind.WINDOW)]
    assert names(retain_directories(directories, keep_last=1).kept) == ["window-15", "dense-20"]


def test_a_partial_directory_keeps_those_that_complete_it() -> None:
    directories = [
        partial_directory(0, 0, 1, 2, 3),
        partial_directory(1, 0, 1),
        partial_directory(2, 2, 3, part=Part.MASTER),
        partial_directory(3, 0, 1),
    ]
    assert reasons(retain_directories(directories, keep_last=1)) == {
        "partial-0": Reason.COMPLETES,  # the moments of 2 and 3
        "partial-1": Reason.OLDER,
        "partial-2": Reason.COMPLETES,
        "partial-3": Reason.AMONG_LAST,
    }


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 3)), st.sampled_from([Part.FULL, Part.MASTER, Part.MOMENTS]), st.booleans()),
        max_size=10,
    ),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_each_of_the_last_directories_can_be_loaded_as_before(
    contents: list[tuple[set[int], Part, bool]], keep_last: int, shuffler: random.Random
) -> None:
    directories = [
        partial_directory(iteration, *indices, part=part, complete=complete)
        for iteration, (indices, part, complete) in enumerate(contents)
    ]
    retained = retain_directories(shuffler.sample(directories, len(directories)), keep_last)
    kept = [directory for directory, _ in retained.kept]
    for restored in [directory for directory in directories if directory.complete][-keep_last:]:
        assert newest_on_disk(kept, restored.iteration) == newest_on_disk(directories, restored.iteration)
    assert retain_directories(kept, keep_last) == Retention((), retained.kept)


def newest_on_disk(directories: Iterable[StoredDirectory], upto: int) -> dict[Key, int]:
    windows = [
        StoredWindow(one.name, 0, one.iteration, one.iteration, WindowState.SEALED, one.plans)
        for one in directories
        if one.complete
    ]
    return newest_copies(windows, lambda window: window.last_iteration <= upto)


# Bad input


def test_keeping_none_is_refused() -> None:
    with pytest.raises(UsageError, match="keep_last is 0, but must be at least 1"):
        retain_directories([], keep_last=0)


def test_two_things_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="are named '0:2'"):
        retain_windows([sparse(2, WindowState.SEALED), sparse(2, WindowState.TORN)], Agreement())
    with pytest.raises(UsageError, match="are named 'dense-1'"):
        retain_directories([dense(1), dense(1)], keep_last=1)


def test_a_plan_outside_of_its_window_or_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="plan of iteration 3, but its iterations are 1 to 2"):
        StoredWindow("w", 0, 1, 2, WindowState.SEALED, (SnapshotPlan(3, {}),))
    with pytest.raises(UsageError, match="plan of iteration 3, but its last iteration is 2"):
        dense(2, plans=(SnapshotPlan(3, {}),))


@pytest.mark.parametrize(("first", "last"), [(2, 1), (-1, 1)])
def test_iterations_in_the_wrong_order_are_refused(first: int, last: int) -> None:
    with pytest.raises(UsageError, match=f"iterations are {first} to {last}"):
        LogRange(first, last)
    with pytest.raises(UsageError, match=f"iterations are {first} to {last}"):
        StoredWindow("w", 0, first, last, WindowState.SEALED, ())


@pytest.mark.parametrize("sealed", [None, 2])
def test_an_agreement_on_protected_windows_that_are_not_sealed_is_refused(sealed: int | None) -> None:
    with pytest.raises(UsageError, match=f"sealed_iteration is {sealed}, but must be at least protected_iteration 3"):
        Agreement(3, sealed)


def test_a_negative_number_of_replicas_is_refused() -> None:
    with pytest.raises(UsageError, match="acknowledged is -1"):
        sparse(0, WindowState.SEALED, acknowledged=-1)
