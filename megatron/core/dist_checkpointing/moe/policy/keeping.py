"""Which pieces of snapshots stay in memory, and which persistent snapshots stay; the same answer on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..types import Piece, SnapshotPlan, full_plan
from .lifecycle import WindowState
from .retention import (
    Agreement,
    DirectoryKind,
    StoredDirectory,
    StoredWindow,
    retain_directories,
    retain_windows,
)
from .rounds import Held


@dataclass(frozen=True)
class Kept:
    """A piece of a snapshot that all ranks have sealed, and whether all its replicas were acknowledged."""

    piece: Piece
    protected: bool = False

    @property
    def name(self) -> tuple[int, str]:
        """Iteration and kind, which tell pieces apart."""
        return self.piece.plan.iteration, self.piece.kind

    @property
    def held(self) -> Held:
        """Kind and span, which pieces of one window have in common."""
        return self.piece.kind, self.piece.span

    def acknowledged(self, names: Collection[tuple[int, str]]) -> Kept:
        """Protected if it is one of these."""
        return replace(self, protected=self.protected or self.name in names)


def keep_pieces(kept: Sequence[Kept], in_use: Collection[int]) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """What stays in memory and what is freed, see `retention.retain_windows`; iterations `in_use` stay.

    Pieces of one kind and span are a window: in flight until all of its iterations are there, protected when all of
    them are. The newest whole windows here are those that the ranks have agreed on, for that is how they come here.
    """
    grouped = _grouped(one.held for one in kept)
    windows = [
        _window(f"{index:06d}", span, [kept[at] for at in members], in_use)
        for index, ((_, span), members) in enumerate(grouped.items())
    ]
    agreed = Agreement(*(_newest(windows, states) for states in (_PROTECTED, _WHOLE)))
    freed = {window.name for window, _ in retain_windows(windows, agreed).freed}
    stays = {
        at
        for window, members in zip(windows, grouped.values(), strict=True)
        if window.name not in freed
        for at in members
    }
    return tuple(kept[at] for at in sorted(stays)), tuple(one for at, one in enumerate(kept) if at not in stays)


def keep_persistent(pieces: Sequence[Piece], keep_last: int) -> tuple[Piece, ...]:
    """The pieces in storage that stay: of the newest `keep_last` snapshots or windows, and what these need.

    Snapshots may need older ones to be complete; windows never do, and those that lack a piece are not kept.
    """
    grouped = _grouped(("", piece.span) for piece in pieces)
    kind = DirectoryKind.WINDOW if any(len(span) > 1 for _, span in grouped) else DirectoryKind.PARTIAL
    directories = [
        StoredDirectory(
            str(index),
            span[-1],
            kind,
            {pieces[at].plan.iteration for at in members}.issuperset(span),
            tuple(pieces[at].plan for at in members),
        )
        for index, ((_, span), members) in enumerate(grouped.items())
    ]
    kept = {directory.name for directory, _ in retain_directories(directories, keep_last).kept}
    stays = {at for index, members in enumerate(grouped.values()) if str(index) in kept for at in members}
    return tuple(pieces[at] for at in sorted(stays))


_PROTECTED = (WindowState.PROTECTED,)
_WHOLE = (WindowState.SEALED, WindowState.PROTECTED)


def _grouped(held: Iterable[Held]) -> Mapping[Held, list[int]]:
    """Positions by kind and span, in the order of their first."""
    grouped: dict[Held, list[int]] = {}
    for at, key in enumerate(held):
        grouped.setdefault(key, []).append(at)
    return grouped


def _window(name: str, span: range, members: Sequence[Kept], in_use: Collection[int]) -> StoredWindow:
    iterations = {one.piece.plan.iteration for one in members}
    state = WindowState.PROTECTED if all(one.protected for one in members) else WindowState.SEALED
    return StoredWindow(
        name=name,
        rank=0,
        first_iteration=span[0],
        last_iteration=span[-1],
        state=state if iterations.issuperset(span) else WindowState.COPYING,
        plans=_restorable(span, [one.piece.plan for one in members]),
        in_use=not iterations.isdisjoint(in_use),
    )


def _restorable(span: range, plans: Sequence[SnapshotPlan]) -> tuple[SnapshotPlan, ...]:
    """What a window is worth once it is whole: all that its first snapshot names, as it is after its last iteration."""
    if len(span) == 1:
        return tuple(plans)
    return (full_plan(span[-1], plans[0].parts),)


def _newest(windows: Iterable[StoredWindow], states: Collection[WindowState]) -> int | None:
    return max((window.last_iteration for window in windows if window.state in states), default=None)
