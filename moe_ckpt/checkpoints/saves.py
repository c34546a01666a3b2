"""Dense checkpoints: a --save folder and its iterations, inspected, verified, and freed of older iterations.

What an iteration is, is judged by names and sizes of its files, without torch; verifying it and looking into it bring
torch in, and Megatron-Core where a checkpoint has objects of its classes. gc keeps the newest iterations, those that
hold experts for them, everything down to the newest one that was verified, and what is newer than the tracker says.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.lease import writer_of
from moe_ckpt.dense import integrity
from moe_ckpt.dense.chain import read_chain, says_partial
from moe_ckpt.dense.integrity import Advance, unwatched
from moe_ckpt.dense.names import FORMAT, INDEX, ITERATION, RELEASE, STAGED, condemned, read_tracker

from .files import last_written_s
from .location import A_LINK, OUTLIVED, CheckpointLocation, GcItem, GcLimits, GcPlan, Inspection, LocationKind, Verified
from .recognition import UNSUPPORTED, is_unsupported, recognize

if TYPE_CHECKING:
    from moe_ckpt.checkpoints.values import StateView
    from moe_ckpt.report import Report

COMPLETE = "complete"

_MERGING = re.compile(r"\.iter_\d{7,}\.merging")


class DenseLocation(CheckpointLocation):
    """What a --save folder and one iteration in it have in common: the state that is loaded from them."""

    def inspect_tensors(self, pattern: str) -> Report:
        from .inspect_tensors import dense_tensors

        return dense_tensors(self.path, pattern)

    def state_view(self) -> StateView:
        """As `CheckpointLocation.state_view`; experts that older iterations hold are put together with it."""
        from moe_ckpt.checkpoints.values import dense_view

        return dense_view(self.place)


class IterationLocation(DenseLocation):
    """One iteration of a dense checkpoint."""

    kind = LocationKind.ITERATION

    def inspect(self, now_s: float) -> Inspection:
        from .inspect_saves import iteration_report

        return iteration_report(self.path, now_s)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """With the iterations that hold experts for it."""
        from .verify_saves import verify_iteration

        return verify_iteration(self.path, advance)


class SavesLocation(DenseLocation):
    """A --save folder."""

    kind = LocationKind.SAVES

    def inspect(self, now_s: float) -> Inspection:
        from .inspect_saves import saves_report

        return saves_report(self.path, now_s)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """All iterations, what they need of each other, and the tracker."""
        from .verify_saves import verify_saves

        return verify_saves(self.path, advance)

    def gc_plan(self, limits: GcLimits, advance: Advance = unwatched) -> GcPlan:
        """As `CheckpointLocation.gc_plan`; older iterations go only with `limits.keep_last`.

        Then the newest iteration is verified, and older ones until one is intact.
        """
        found = saved_iterations(self.path)
        left = [saved for saved in found if STAGED.fullmatch(saved.folder.name)]
        newest, items = _judged(self.path, [saved for saved in found if saved not in left], limits, advance)
        items += [_gc_item(saved, f"it is {saved.state}: what was doing that has ended", goes=True) for saved in left]
        merging = (path for path in sorted(self.path.iterdir()) if _MERGING.fullmatch(path.name))
        items += [GcItem.left_over(path, "it is half-converted") for path in merging]
        return GcPlan(limits.applied(items, last_written_s(self.path), writer_of(self.place)), newest)


@dataclass(frozen=True)
class SavedIteration:
    """One folder of a --save folder.

    iteration: None for a release, which has none. written_s: when its last file was, in seconds since 1970.
    state: COMPLETE as far as names say, or what is wrong with it. needs: older iterations that hold experts for it.
    """

    folder: Path
    iteration: int | None
    nbytes: int
    written_s: float
    state: str
    needs: tuple[int, ...]
    tracked: bool
    has_integrity: bool

    @property
    def is_complete(self) -> bool:
        """Whether names say that it is whole."""
        return self.state == COMPLETE


def saved_iterations(root: Path) -> tuple[SavedIteration, ...]:
    """All iterations in `root`, oldest first, half-written ones among them. Raises OSError."""
    tracker = tracked(root)
    found = []
    for path in sorted(root.iterdir()):
        match = ITERATION.fullmatch(path.name) or STAGED.fullmatch(path.name)
        if path.is_dir() and (match or path.name == RELEASE):
            found.append(saved_iteration(path, path.name == tracker))
    return tuple(sorted(found, key=lambda saved: (saved.iteration or 0, saved.folder.name)))


def saved_iteration(folder: Path, is_tracked: bool = False) -> SavedIteration:
    """One iteration's folder. Raises OSError."""
    match = ITERATION.fullmatch(folder.name) or STAGED.fullmatch(folder.name)
    iteration = int(match[1]) if match else None
    stats = {entry.name: entry.stat() for entry in os.scandir(folder) if entry.is_file()}
    state, needs = _state_of(folder, list(stats))
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


def _state_of(folder: Path, names: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    staged = STAGED.fullmatch(folder.name)
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
            return f"not readable now: {error}", ()
        return "damaged: the manifest of its experts cannot be read", ()
    if chain is None:
        return ("not whole: the manifest of its experts is missing", ()) if says_partial(folder) else (COMPLETE, ())
    needs = tuple(sorted(chain.iterations - {chain.iteration}))
    gone = [needed for needed in needs if not (folder.parent / f"iter_{needed:07d}").is_dir()]
    return (f"not whole: needs iteration {gone[0]}, which is missing" if gone else COMPLETE), needs


def _unjudged(folder: Path) -> str:
    """Why an iteration may be sound although it looks otherwise: a later version wrote it, or its small files cannot be
    read now. Empty for one that can be judged."""
    for read in (lambda path: recognize(str(path)), read_chain, integrity.read):
        try:
            read(folder)
        except NewerFormat:
            return "a later version of moe-ckpt wrote it"
        except MoECheckpointError as error:
            if isinstance(error.__cause__, OSError):
                return f"it cannot be read now: {error}"
    return ""


def _judged(
    root: Path, published: Sequence[SavedIteration], limits: GcLimits, advance: Advance
) -> tuple[str, list[GcItem]]:
    """The newest iteration that can be loaded and stays, and what becomes of each that was published."""
    loadable = _loadable(root, published)
    if limits.keep_last is None:
        newest = next(reversed(loadable.values()), None)
        items = [_gc_item(saved, "without --keep-last all stay") for saved in published]
        return newest.folder.name if newest else "", items
    intact = next((number for number in reversed(loadable) if _is_intact(loadable[number].folder, advance)), None)
    if intact is None:
        return "", [_gc_item(saved, "no iteration here is certainly intact") for saved in published]
    last = {*list(loadable)[-limits.keep_last :], intact}
    unknown = {saved.iteration: why for saved in published for why in [_unjudged(saved.folder)] if why}
    # What is newer than the intact one stays, and so does what it needs, though the tracker does not name it yet.
    staying = [
        saved for saved in published if saved.iteration is None or saved.iteration > intact or saved.iteration in last
    ]
    needed = {number for saved in staying for number in saved.needs}
    after = max((number for number in unknown if number is not None), default=-1)

    def judged(saved: SavedIteration) -> GcItem:
        if saved.iteration in unknown:
            return _gc_item(saved, unknown[saved.iteration])
        if saved.iteration in last:
            return _gc_item(saved, f"it is among the newest {limits.keep_last}, or the newest one that is intact")
        if saved.iteration in needed:
            return _gc_item(saved, "it holds experts for one that is kept")
        if saved.iteration is None or saved.iteration > intact:
            return _gc_item(saved, f"no older one than iteration {intact} goes: that is the newest one that is intact")
        if saved.iteration < after:
            return _gc_item(saved, f"iteration {after} may need it: {unknown[after]}")
        if is_unsupported(os.listdir(saved.folder)):
            return _gc_item(saved, f"it is {UNSUPPORTED}")
        return _gc_item(saved, OUTLIVED if saved.is_complete else f"it is {saved.state}", goes=True)

    return loadable[intact].folder.name, [judged(saved) for saved in published]


def _loadable(root: Path, published: Sequence[SavedIteration]) -> dict[int, SavedIteration]:
    """By iteration, oldest first, those that a job would load: complete by their names and announced."""
    named = tracked(root)
    last = ITERATION.fullmatch(named)
    if named and last is None:
        return {}
    complete = {saved.iteration: saved for saved in published if saved.iteration is not None and saved.is_complete}
    return {number: saved for number, saved in complete.items() if last is None or number <= int(last[1])}


def _is_intact(folder: Path, advance: Advance) -> bool:
    try:
        return not IterationLocation(str(folder)).verify(advance).findings
    except UnreadableCheckpoint:
        return False


def _gc_item(saved: SavedIteration, reason: str, *, goes: bool = False) -> GcItem:
    if saved.folder.is_symlink():
        return GcItem(saved.folder.name, saved.nbytes, A_LINK)
    return GcItem(saved.folder.name, saved.nbytes, reason, partial(_remove, saved.folder) if goes else None)


def _remove(folder: Path) -> None:
    shutil.rmtree(condemned(folder) if ITERATION.fullmatch(folder.name) else folder)
