"""Dense checkpoints: a --save folder and its iterations, inspected, verified, signed, and freed of older iterations.

Verifying them and looking into them bring torch in, and Megatron-Core where a checkpoint has objects of its classes. gc
keeps the newest iterations, those that hold experts for them, everything down to the newest one that was verified, and
what is newer than the tracker says.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.moe.errors import (
    MoECheckpointError,
    NewerFormat,
    UnreadableCheckpoint,
    UsageError,
)
from moe_ckpt.dense import integrity
from moe_ckpt.dense.chain import read_chain
from moe_ckpt.dense.integrity import Advance, unwatched
from moe_ckpt.dense.names import ITERATION, REPLACED, STAGED, condemned
from moe_ckpt.dense.staging import is_abandoned

from .files import last_written_s
from .inspect_saves import iteration_report, saves_report
from .location import A_LINK, OUTLIVED, CheckpointLocation, GcItem, GcLimits, GcPlan, Inspection, LocationKind, Verified
from .recognition import UNSUPPORTED, is_of_torch_alone, is_unsupported, recognize
from .saved_iterations import UNREADABLE, SavedIteration, nothing_tracked, saved_iterations, tracked

if TYPE_CHECKING:
    from moe_ckpt.checkpoints.values import StateView
    from moe_ckpt.report import Report

_CONVERTED = re.compile(r"\.(iter_\d{7,}\.merging|(release|hugging_face)\.importing)(-.*)?")


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

    def signable(self) -> tuple[Path, ...]:
        """Itself."""
        return (self.path,)

    def inspect(self, now_s: float) -> Inspection:
        return iteration_report(self.path, now_s)

    def verify(self, advance: Advance = unwatched) -> Verified:
        """With the iterations that hold experts for it."""
        from .verify_saves import verify_iteration

        return verify_iteration(self.path, advance)


class SavesLocation(DenseLocation):
    """A --save folder."""

    kind = LocationKind.SAVES

    def signable(self) -> tuple[Path, ...]:
        """All complete iterations, oldest first. Raises UsageError where there is none."""
        folders = tuple(saved.folder for saved in saved_iterations(self.path) if saved.is_complete)
        if not folders:
            raise UsageError(f"{self.place} has no complete iteration")
        return folders

    def inspect(self, now_s: float) -> Inspection:
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
        for saved in left:
            published = self.path / saved.folder.stem.removeprefix(".")
            if saved.folder.suffix == REPLACED and not published.exists():
                items.append(_gc_item(saved, "a save was to replace it and has not: the next start publishes it again"))
            else:
                items.append(_gc_item(saved, f"it is {saved.state}: what was doing that has ended", goes=True))
        half = (path for path in sorted(self.path.iterdir()) if _CONVERTED.fullmatch(path.name) and is_abandoned(path))
        items += [GcItem.left_over(path, "it is half-converted") for path in half]
        return GcPlan(limits.applied(items, last_written_s(self.path), self.place), newest)


def _unjudged(saved: SavedIteration) -> str:
    """Why an iteration may be sound although it looks otherwise: a later version wrote it, or its small files, or what
    it needs, cannot be read now. Empty for one that can be judged."""
    for read in (lambda path: recognize(str(path)), read_chain, integrity.read):
        try:
            read(saved.folder)
        except NewerFormat:
            return "a later version of moe-ckpt wrote it"
        except MoECheckpointError as error:
            if isinstance(error.__cause__, OSError):
                return f"it cannot be read now: {error}"
    return f"it is {saved.state}" if saved.state.startswith(UNREADABLE) else ""


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
        why = nothing_tracked(root, "") or "no iteration here is certainly intact"
        return "", [_gc_item(saved, why) for saved in published]
    last = {*list(loadable)[-limits.keep_last :], intact}
    unknown = {saved.iteration: why for saved in published for why in [_unjudged(saved)] if why}
    # What is newer than the intact one stays, and so does what it needs, though the tracker does not name it yet.
    staying = [
        saved
        for saved in published
        if saved.iteration is None or saved.left or saved.iteration > intact or saved.iteration in last
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
        if saved.left:
            return _gc_item(saved, "training went back before it with --ckpt-step; remove it by hand")
        if saved.iteration is None or saved.iteration > intact:
            return _gc_item(saved, f"no older one than iteration {intact} goes: that is the newest one that is intact")
        if saved.iteration < after:
            return _gc_item(saved, f"iteration {after} may need it: {unknown[after]}")
        names = os.listdir(saved.folder)
        if is_unsupported(names) or is_of_torch_alone(names):
            return _gc_item(saved, f"it is {UNSUPPORTED}")
        return _gc_item(saved, OUTLIVED if saved.is_complete else f"it is {saved.state}", goes=True)

    return loadable[intact].folder.name, [judged(saved) for saved in published]


def _loadable(root: Path, published: Sequence[SavedIteration]) -> dict[int, SavedIteration]:
    """By iteration, oldest first, those that a job would load: complete by their names, announced and not left."""
    named = tracked(root)
    last = ITERATION.fullmatch(named)
    if (named and last is None) or nothing_tracked(root, ""):
        return {}
    whole = (saved for saved in published if saved.is_complete and not saved.left)
    complete = {saved.iteration: saved for saved in whole if saved.iteration is not None}
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
