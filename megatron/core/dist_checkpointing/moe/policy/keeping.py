"""Which pieces of snapshots stay in memory, and which persistent snapshots stay; the same answer on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..types import SnapshotPlan
from .lifecycle import WindowState
from .retention import (
    Agreement,
    DirectoryKind,
    StoredDirectory,
    StoredWindow,
    retain_directories,
    retain_windows,
)
from .rounds import Rounds
from .strategies import Piece


@dataclass(frozen=True)
class Kept:
    """A piece of a snapshot that all ranks have sealed, and whether all its replicas were acknowledged."""

    piece: Piece
    protected: bool = False

    @property
    def name(self) -> tuple[int, str]:
        """Iteration and kind, which tell pieces apart."""
        return self.piece.plan.iteration, self.piece.kind

    def acknowledged(self, names: Collection[tuple[int, str]]) -> Kept:
        """Protected if it is one of these."""
        return replace(self, protected=self.protected or self.name in names)


def keep_pieces(
    kept: Sequence[Kept], rounds: Rounds, in_use: Collection[int]
) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
    """What stays in memory and what is freed, see `retention.retain_windows`; iterations `in_use` stay."""
    windows = [
        StoredWindow(
            name=f"{index:06d}",
            rank=0,
            first_iteration=one.piece.plan.iteration,
            last_iteration=one.piece.plan.iteration,
            state=WindowState.PROTECTED if one.protected else WindowState.SEALED,
            plans=(one.piece.plan,),
            in_use=one.piece.plan.iteration in in_use,
        )
        for index, one in enumerate(kept)
    ]
    protected, sealed = rounds.protected, rounds.sealed
    agreed = Agreement(protected.iteration if protected else None, sealed.iteration if sealed else None)
    retention = retain_windows(windows, agreed)
    stays = tuple(kept[int(window.name)] for window, _ in retention.kept)
    return stays, tuple(kept[int(window.name)] for window, _ in retention.freed)


def keep_persistent(plans: Sequence[SnapshotPlan], keep_last: int) -> tuple[SnapshotPlan, ...]:
    """The persistent snapshots that stay: the newest `keep_last`, and what these need to be complete."""
    directories = [
        StoredDirectory(str(plan.iteration), plan.iteration, DirectoryKind.PARTIAL, True, (plan,)) for plan in plans
    ]
    retention = retain_directories(directories, keep_last)
    return tuple(plan for directory, _ in retention.kept for plan in directory.plans)
