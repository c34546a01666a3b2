"""The iterations of a --save folder, judged by names and sizes of their files, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from moe_ckpt.dense import integrity
from moe_ckpt.dense.chain import read_chain, says_partial
from moe_ckpt.dense.names import (
    FORMAT,
    INDEX,
    INFORMING_BYTES,
    ITERATION,
    RELEASE,
    STAGED,
    TRACKER,
    moved_aside,
    published,
    read_beside,
    read_tracker,
)
from moe_ckpt.dense.went_back import left_in

COMPLETE, UNREADABLE = "complete", "not readable now"
LISTINGS = 8
"""So often a folder is listed again for what a job has renamed meanwhile."""


@dataclass(frozen=True)
class SavedIteration:
    """One folder of a --save folder.

    iteration: None for a release, which has none. written_s: when its last file was, in seconds since 1970.
    state: COMPLETE as far as names say, or what is wrong with it. needs: older iterations that hold experts for it.
    left: training went back before it with --ckpt-step, and the tracker names another one.
    """

    folder: Path
    iteration: int | None
    nbytes: int
    written_s: float
    state: str
    needs: tuple[int, ...]
    tracked: bool
    has_integrity: bool
    left: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether names say that it is whole."""
        return self.state == COMPLETE


def saved_iterations(root: Path) -> tuple[SavedIteration, ...]:
    """All iterations in `root`, oldest first, half-written ones among them. Raises OSError."""
    for _ in range(LISTINGS - 1):
        with suppress(FileNotFoundError):  # a save renames folders, and removes others, meanwhile
            return _listed(root)
    return _listed(root)


def _listed(root: Path) -> tuple[SavedIteration, ...]:
    tracker = tracked(root)
    left = left_names(root, tracker)
    found = []
    for path in sorted(root.iterdir()):
        match = ITERATION.fullmatch(path.name) or STAGED.fullmatch(path.name)
        if path.is_dir() and (match or path.name == RELEASE):
            found.append(replace(saved_iteration(path, path.name == tracker), left=path.name in left))
    return tuple(sorted(found, key=lambda saved: (saved.iteration or 0, saved.folder.name)))


def saved_iteration(folder: Path, is_tracked: bool = False) -> SavedIteration:
    """One iteration's folder. Raises OSError.

    Args:
        folder: The folder of the iteration, or of one that is being written.
        is_tracked: Whether the tracker of the `--save` folder names it.
    """
    named = published(folder)
    match = ITERATION.fullmatch(named.name) or STAGED.fullmatch(named.name)
    iteration = int(match[1]) if match else None
    stats: dict[str, os.stat_result] = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # a save renames or removes it meanwhile
            if entry.is_file():
                stats[entry.name] = entry.stat()
    state, needs = _state_of(named, list(stats))
    written_s = max((stat.st_mtime for stat in stats.values()), default=folder.stat().st_mtime)
    nbytes = sum(stat.st_size for stat in stats.values())
    return SavedIteration(folder, iteration, nbytes, written_s, state, needs, is_tracked, integrity.NAME in stats)


def tracked(root: Path) -> str:
    """The name of the folder that the tracker names, whether it is there or not; empty without a usable tracker.

    Raises UnreadableCheckpoint for a tracker that is there and cannot be read now.
    """
    try:
        return read_tracker(root) or ""
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError):
            raise
        return ""


def left_names(root: Path, tracker: str) -> frozenset[str]:
    """The folders of iterations that training left when it went back with `--ckpt-step`: a job passes by them.

    Args:
        root: The `--save` folder.
        tracker: The folder that its tracker names, which is loaded all the same; empty: none.
    """
    return frozenset(f"iter_{number:07d}" for number in left_in(root)) - {tracker}


def nothing_tracked(root: Path, newest: str) -> str:
    """Why a job loads nothing from a --save folder, and what to do; empty where its tracker names an iteration, and
    where it is empty: that counts as lost, and a job takes the newest iteration.

    Args:
        root: The `--save` folder.
        newest: What a tracker says of the newest whole iteration in it; empty: none is known.
    """
    do = f"; write {newest} into {TRACKER}" * bool(newest)
    try:
        if read_tracker(root) is None:
            return f"{root / TRACKER} is missing, so a job finds nothing to load{do}"
    except UnreadableCheckpoint as error:
        with suppress(OSError):
            if not read_beside(root / TRACKER, INFORMING_BYTES).strip():
                return ""
        return f"{error}, so a job refuses it{do}"
    return ""


def _state_of(folder: Path, names: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    staged = STAGED.fullmatch(folder.name)
    if staged and folder in moved_aside(folder.parent).values():
        return "moved aside by a save that did not finish: the next start publishes it", ()
    if staged:
        return "half-written" if staged[2] == "saving" else "half-removed", ()
    missing = [name for name in (INDEX, FORMAT) if name not in names]
    if missing:
        return f"not whole: no {' and no '.join(missing)}", ()
    try:
        chain = read_chain(folder)
    except NewerFormat:
        return "a later version of moe-ckpt wrote the manifest of its experts", ()
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError):
            return f"{UNREADABLE}: {error}", ()
        return "damaged: the manifest of its experts cannot be read", ()
    if chain is None:
        return ("not whole: the manifest of its experts is missing", ()) if says_partial(folder) else (COMPLETE, ())
    needs = tuple(sorted(chain.iterations - {chain.iteration}))
    for needed in needs:
        state = _state_of_holder(folder.parent / f"iter_{needed:07d}", needed, chain.marks[needed])
        if state != COMPLETE:
            return state, needs
    return COMPLETE, needs


def _state_of_holder(folder: Path, iteration: int, mark: str) -> str:
    if not folder.is_dir():
        if folder.is_symlink():
            return f"{UNREADABLE}: iteration {iteration} is a link to a folder that is not there"
        return f"not whole: needs iteration {iteration}, which is missing"
    try:
        chain = read_chain(folder)
    except NewerFormat:
        return f"{UNREADABLE}: a later version of moe-ckpt wrote iteration {iteration}, which it needs"
    except UnreadableCheckpoint as error:
        if isinstance(error.__cause__, OSError):
            return f"{UNREADABLE}: {error}"
        return f"not whole: needs iteration {iteration}, whose manifest of experts cannot be read"
    if chain is None or chain.marks.get(iteration) != mark:
        return f"not whole: needs iteration {iteration}, which was saved again"
    lacks = [name for name in (INDEX, FORMAT) if not (folder / name).exists()]
    return f"not whole: needs iteration {iteration}, which has no {' and no '.join(lacks)}" if lacks else COMPLETE
