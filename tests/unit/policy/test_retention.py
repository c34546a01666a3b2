"""Retention: what is freed, and that no newest copy ever is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.lifecycle import WindowState
from megatron.core.dist_checkpointing.moe.policy.rollback import kept as kept_logs
from megatron.core.dist_checkpointing.moe.policy.tracking import (
    RestoredState,
    Status,
    TrackedPiece,
    TrackedWindow,
    all_are_protected,
    covered_pieces,
    kept_in_storage,
    leaving_room,
    oldest_base,
    yielded_replicas,
)
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import (
    CONSTANT,
    OperatorId,
    Part,
    SnapshotPlan,
    Window,
    expert,
    full_plan,
)

EXPERTS = tuple(expert(0, index) for index in range(4))
WHOLE = (WindowState.REPLICATING, WindowState.UNDER_REPLICATED, WindowState.RESTORED, WindowState.PROTECTED)
STATES = [*WHOLE, WindowState.COPYING, WindowState.GIVEN_UP, WindowState.SPARE]
PARTS = st.sampled_from([Part.MASTER_AND_MOMENTS, Part.MASTER, Part.MOMENTS, Part.COMPUTE])
Key = tuple[OperatorId, Part]


def window_of(state: WindowState, *pieces: Piece) -> TrackedWindow:
    """A window of these pieces, all of them sealed."""
    return TrackedWindow(pieces[0].span, state, tuple(TrackedPiece(piece, Status.SEALED) for piece in pieces))


def sparse(first: int, state: WindowState, size: int = 2) -> TrackedWindow:
    """A sparse window over all experts, as far as it is copied."""
    window = Window(first, tuple(EXPERTS[at::size] for at in range(size)))
    there = 1 if state is WindowState.COPYING else size
    span = range(first, first + size)
    return window_of(state, *(Piece("snapshot", window.plan(iteration), span) for iteration in span[:there]))


def partial(
    iteration: int, *parts: tuple[int, Part], kind: str = "snapshot", state: WindowState = WindowState.PROTECTED
) -> TrackedWindow:
    """A lossy snapshot with parts of some experts."""
    return window_of(state, Piece(kind, SnapshotPlan(iteration, {EXPERTS[index]: part for index, part in parts})))


def freed(windows: Iterable[TrackedWindow]) -> list[int]:
    """The iterations of what goes."""
    return sorted(iteration for iteration, _ in covered_pieces(windows))


def kept(windows: Iterable[TrackedWindow]) -> list[TrackedWindow]:
    """The windows after what is covered was freed."""
    windows = list(windows)
    covered = covered_pieces(windows)
    left = (replace(w, pieces=tuple(piece for piece in w.pieces if piece.name not in covered)) for w in windows)
    return [window for window in left if window.pieces]


def newest_copies(plans: Iterable[SnapshotPlan]) -> dict[Key, int]:
    """By brute force: the newest iteration with each component of each operator."""
    found: dict[Key, int] = {}
    for plan in plans:
        for operator, part in plan.parts.items():
            for component in (Part.MASTER, Part.MOMENTS, Part.COMPUTE):
                if component in part or (component is Part.COMPUTE and Part.MASTER in part):
                    found[operator, component] = max(found.get((operator, component), -1), plan.iteration)
    return found


def copies(windows: Iterable[TrackedWindow], fits: Callable[[TrackedWindow], bool]) -> dict[Key, int]:
    """The newest copies in the whole windows that fit, as they are after the last iteration of each."""
    plans = []
    for window in windows:
        for held in window.pieces if window.state in WHOLE and fits(window) else ():
            plan = held.piece.plan
            plans.append(plan if len(window.span) == 1 else full_plan(window.span[-1], plan.parts))
    return newest_copies(plans)


@st.composite
def tracked_windows(draw: st.DrawFn) -> list[TrackedWindow]:
    """Windows and snapshots in any state, one after the other, with any parts of any experts in pieces of two kinds."""
    found, first = [], 0
    for _ in range(draw(st.integers(0, 7))):
        state = draw(st.sampled_from(STATES))
        if draw(st.booleans()):
            found.append(sparse(first, state, size := draw(st.integers(1, 3))))
            first += size
            continue
        pieces = [
            Piece(kind, SnapshotPlan(first, {one: draw(PARTS) for one in draw(st.sets(st.sampled_from(experts)))}))
            for kind, experts in (("some", EXPERTS[:2]), ("others", EXPERTS[2:]))
        ]
        found.append(window_of(state, *pieces))
        first += 1
    return found


# Known cases


@pytest.mark.parametrize("slowest", [Status.PENDING, Status.SEALED, Status.UNDER_REPLICATED, Status.PROTECTED])
def test_the_previous_window_stays_until_all_ranks_have_the_next_one_protected(slowest: Status) -> None:
    """What a window has come to is the least that any rank reports."""
    agreed = min(Status.PROTECTED, slowest)
    plan = full_plan(2, EXPERTS)
    following = TrackedWindow(range(2, 3)).begun([Piece("snapshot", plan)])
    if agreed >= Status.SEALED:
        following = following.all_ranks_sealed(2)
    if agreed.is_final:
        following = following.ended(2, agreed)
    previous = window_of(WindowState.PROTECTED, Piece("snapshot", full_plan(1, EXPERTS)))
    assert freed([previous, following]) == ([1] if slowest is Status.PROTECTED else [])


def test_the_newest_whole_window_stays_where_none_is_protected() -> None:
    assert freed([sparse(first, WindowState.UNDER_REPLICATED) for first in (0, 2, 4)]) == [0, 1, 2, 3]


def test_windows_that_restore_nothing_yet_or_any_more_are_not_judged() -> None:
    windows = [sparse(0, state) for state in (WindowState.COPYING, WindowState.GIVEN_UP, WindowState.SPARE)]
    assert freed([*windows, sparse(2, WindowState.PROTECTED)]) == []


@pytest.mark.parametrize("agreed", [Status.PROTECTED, Status.UNDER_REPLICATED])
def test_what_training_does_not_change_is_as_safe_as_the_snapshot_that_it_was_sent_with(agreed: Status) -> None:
    frozen = Piece(CONSTANT, SnapshotPlan(0, {expert(9, 0): Part.COMPUTE | Part.CONSTANT}), range(2))
    moving, new = sparse(0, WindowState.UNDER_REPLICATED), sparse(2, WindowState.PROTECTED)
    old = replace(moving, pieces=(TrackedPiece(frozen, agreed), *moving.pieces))
    assert all_are_protected([old, new]) == (agreed is Status.PROTECTED)
    assert yielded_replicas(old, [old, new]) == [(0, "snapshot"), (1, "snapshot")]


def test_an_old_snapshot_with_the_newest_copy_of_one_expert_stays() -> None:
    windows = [
        partial(1, (0, Part.MASTER_AND_MOMENTS), (1, Part.MASTER_AND_MOMENTS)),
        partial(2, (0, Part.MASTER_AND_MOMENTS)),
        partial(3, (0, Part.MASTER_AND_MOMENTS)),
    ]
    assert freed(windows) == [2]


def test_an_old_snapshot_with_the_newest_moments_of_an_expert_stays() -> None:
    windows = [partial(1, (0, Part.MASTER_AND_MOMENTS)), partial(2, (0, Part.MASTER))]
    assert freed(windows) == []
    assert freed([*windows, partial(3, (0, Part.MOMENTS))]) == [1]


def test_master_weights_make_older_compute_weights_superfluous_but_not_the_reverse() -> None:
    assert freed([partial(1, (0, Part.COMPUTE)), partial(2, (0, Part.MASTER))]) == [1]
    assert freed([partial(1, (0, Part.MASTER)), partial(2, (0, Part.COMPUTE))]) == []


@pytest.mark.parametrize(("places", "stay"), [(3, [4, 8]), (4, [2, 4, 8])])
def test_after_a_restart_what_was_on_its_way_to_peers_leaves_its_room_to_the_newest(
    places: int, stay: list[int]
) -> None:
    pieces = [Piece("dense", full_plan(iteration, EXPERTS)) for iteration in (2, 4, 6, 8)]
    few = [Piece("expert", full_plan(iteration, EXPERTS)) for iteration in (4, 6)]
    left = leaving_room([*pieces[4 - places :], *few], places)
    assert [piece.plan.iteration for piece in left if piece.kind == "dense"] == stay
    assert [piece for piece in left if piece.kind == "expert"] == few


def test_pieces_of_one_snapshot_are_freed_by_kind() -> None:
    both = window_of(
        WindowState.PROTECTED,
        Piece("dense", full_plan(1, EXPERTS[:1])),
        Piece("experts", full_plan(1, EXPERTS[1:])),
    )
    assert covered_pieces([both, partial(2, (0, Part.MASTER_AND_MOMENTS), kind="dense")]) == {(1, "dense")}


def test_partial_snapshots_are_as_many_as_it_takes_to_cover_all_experts() -> None:
    held: list[TrackedWindow] = []
    for iteration in range(20):
        held = kept([*held, partial(iteration, (iteration % 4, Part.MASTER_AND_MOMENTS))])
        assert [window.span[0] for window in held] == list(range(max(0, iteration - 3), iteration + 1))


# Properties of windows


@settings(max_examples=examples(150), deadline=None)
@given(tracked_windows())
def test_every_operator_keeps_its_newest_copy_at_every_level_of_replication(windows: list[TrackedWindow]) -> None:
    for fits in (lambda _: True, lambda window: window.state is WindowState.PROTECTED):
        assert copies(kept(windows), fits) == copies(windows, fits)


@settings(max_examples=examples(150), deadline=None)
@given(tracked_windows())
def test_all_are_protected_where_nothing_lies_in_windows_alone_that_are_not(windows: list[TrackedWindow]) -> None:
    safe = copies(windows, lambda window: window.state is WindowState.PROTECTED)
    assert all_are_protected(windows) == (copies(windows, lambda _: True).keys() == safe.keys())


@settings(max_examples=examples(100), deadline=None)
@given(tracked_windows())
def test_freeing_twice_frees_nothing_more(windows: list[TrackedWindow]) -> None:
    assert covered_pieces(kept(windows)) == frozenset()


@settings(max_examples=examples(100), deadline=None)
@given(tracked_windows(), st.randoms(use_true_random=False))
def test_the_order_of_windows_does_not_matter(windows: list[TrackedWindow], shuffler: random.Random) -> None:
    assert covered_pieces(shuffler.sample(windows, len(windows))) == covered_pieces(windows)


@settings(max_examples=examples(100), deadline=None)
@given(tracked_windows())
def test_only_whole_windows_are_freed(windows: list[TrackedWindow]) -> None:
    others = {piece.name for window in windows if window.state not in WHOLE for piece in window.pieces}
    assert not covered_pieces(windows) & others


@settings(max_examples=examples(150), deadline=None)
@given(tracked_windows())
def test_a_window_is_freed_when_a_protected_one_is_newer_in_everything(windows: list[TrackedWindow]) -> None:
    covered = covered_pieces(windows)
    for window in windows:
        own = copies([window], lambda _: True)
        for other in windows if window.state in WHOLE else ():
            newer = copies([other], lambda window: window.state is WindowState.PROTECTED)
            if own and all(newer.get(key, -1) > iteration for key, iteration in own.items()):
                assert {piece.name for piece in window.pieces} <= covered


@settings(max_examples=examples(150), deadline=None)
@given(tracked_windows(), st.sets(st.integers(0, 25)))
def test_every_replay_from_a_kept_window_finds_all_logs_that_there_were(
    windows: list[TrackedWindow], logs: set[int]
) -> None:
    left = kept(windows)
    staying = kept_logs(logs, oldest_base(left), newest=25, lookback=100)
    for window in left:
        if window.sealed or window.state is WindowState.SPARE:
            assert {log for log in logs if log > window.span[0]} <= staying


def test_replays_start_at_spare_pieces_while_a_newer_window_is_not_whole() -> None:
    spare = frozenset({(11, "snapshot"), (12, "snapshot"), (9, CONSTANT)})
    windows = RestoredState(20, (), (), spare).windows()
    assert oldest_base(windows.values()) == 11
    assert oldest_base([*windows.values(), sparse(21, WindowState.COPYING)]) == 11
    assert oldest_base([sparse(21, WindowState.PROTECTED)]) == 21


# Storage


def stored(iteration: int, *indices: int, part: Part = Part.MASTER_AND_MOMENTS) -> Piece:
    return Piece("snapshot", full_plan(iteration, (EXPERTS[index] for index in indices), part))


def staying(pieces: Iterable[Piece], keep_last: int) -> list[int]:
    return sorted(piece.plan.iteration for piece in kept_in_storage(list(pieces), keep_last))


def test_the_last_snapshots_in_storage_stay() -> None:
    assert staying([stored(iteration, 0, 1, 2, 3) for iteration in (10, 20, 30)], keep_last=2) == [20, 30]


def test_windows_in_storage_stay_whole_and_those_that_lack_a_snapshot_go() -> None:
    pieces = [held.piece for first in (0, 2, 4, 6) for held in sparse(first, WindowState.PROTECTED).pieces]
    del pieces[5]
    assert staying(pieces, keep_last=2) == [2, 3, 6, 7]


def test_a_partial_snapshot_keeps_those_that_complete_it() -> None:
    pieces = [stored(0, 0, 1, 2, 3), stored(1, 0, 1), stored(2, 2, 3, part=Part.MASTER), stored(3, 0, 1)]
    assert staying(pieces, keep_last=1) == [0, 2, 3]  # of 0 the moments of 2 and 3


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 3)), st.sampled_from([Part.MASTER_AND_MOMENTS, Part.MASTER, Part.MOMENTS])),
        max_size=9,
    ),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_each_of_the_last_snapshots_can_be_loaded_as_before(
    contents: list[tuple[set[int], Part]], keep_last: int, shuffler: random.Random
) -> None:
    pieces = [stored(iteration, *indices, part=part) for iteration, (indices, part) in enumerate(contents)]
    left = kept_in_storage(shuffler.sample(pieces, len(pieces)), keep_last)
    for restored in pieces[-keep_last:]:
        upto = restored.plan.iteration
        assert newest_copies(piece.plan for piece in left if piece.plan.iteration <= upto) == newest_copies(
            piece.plan for piece in pieces if piece.plan.iteration <= upto
        )
    assert kept_in_storage(left, keep_last) == left


def test_keeping_none_is_refused() -> None:
    with pytest.raises(UsageError, match="keep_last is 0, but must be at least 1"):
        kept_in_storage([], keep_last=0)
