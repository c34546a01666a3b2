"""What of a --save folder may be freed: older iterations that no kept one needs, and what saves left unfinished.

Kept are the newest iterations, those that hold experts for them, everything down to the newest one that was verified,
and what is newer than the tracker says.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...errors import UnreadableCheckpoint
from ...store.names import ITERATION, STAGED
from ..foreign import foreign
from ..recognition import Content, Recognized
from ..saves import SavedIteration, saved_iterations, tracked, unjudged
from ..verification import verify
from .items import A_LINK, OUTLIVED, Item, Limits, Surplus
from .written import folder_bytes, last_written_s

_MERGING = re.compile(r"\.iter_\d{7,}\.merging")


def surplus_of_saves(root: Path, limits: Limits, advance: Callable[[int], None]) -> Surplus:
    """What may be freed in the --save folder `root`; with `limits.keep_last` also older iterations.

    Then the newest iteration is verified, and older ones until one is intact, which takes torch; `advance` is told the
    bytes that are read. Raises OSError.
    """
    found = saved_iterations(root)
    left = [one for one in found if STAGED.fullmatch(one.folder.name)]
    newest, items = _judged(root, [one for one in found if one not in left], limits, advance)
    items += [_item(one, f"it is {one.state}: what was doing that has ended", goes=True) for one in left]
    items += [_merging(path) for path in sorted(root.iterdir()) if _MERGING.fullmatch(path.name)]
    why = limits.too_fresh(last_written_s(str(root)))
    if why:
        items = [item.kept(why) if item.remove else item for item in items]
    return Surplus(tuple(items), newest)


def _judged(
    root: Path, published: Sequence[SavedIteration], limits: Limits, advance: Callable[[int], None]
) -> tuple[str, list[Item]]:
    """The newest iteration that can be loaded and stays, and what becomes of each that was published."""
    loadable = _loadable(root, published)
    if limits.keep_last is None:
        newest = next(reversed(loadable.values()), None)
        return newest.folder.name if newest else "", [_item(one, "without --keep-last all stay") for one in published]
    intact = next((number for number in reversed(loadable) if _is_intact(loadable[number].folder, advance)), None)
    if intact is None:
        return "", [_item(one, "no iteration here is certainly intact") for one in published]
    last = {*list(loadable)[-limits.keep_last :], intact}
    unknown = {one.iteration: why for one in published for why in [unjudged(one.folder)] if why}
    # What is newer than the intact one stays, and so does what it needs, though the tracker does not name it yet.
    staying = [one for one in published if one.iteration is None or one.iteration > intact or one.iteration in last]
    needed = {number for one in staying for number in one.needs}
    after = max((number for number in unknown if number is not None), default=-1)

    def judged(one: SavedIteration) -> Item:
        if one.iteration in unknown:
            return _item(one, unknown[one.iteration])
        if one.iteration in last:
            return _item(one, f"it is among the newest {limits.keep_last}, or the newest one that is intact")
        if one.iteration in needed:
            return _item(one, "it holds experts for one that is kept")
        if one.iteration is None or one.iteration > intact:
            return _item(one, f"no older one than iteration {intact} goes: that is the newest one that is intact")
        if one.iteration < after:
            return _item(one, f"iteration {after} may need it: {unknown[after]}")
        stranger = foreign(one.folder, sorted(os.listdir(one.folder)))
        if stranger:
            return _item(one, f"it is {stranger}")
        return _item(one, OUTLIVED if one.is_complete else f"it is {one.state}", goes=True)

    return loadable[intact].folder.name, [judged(one) for one in published]


def _loadable(root: Path, published: Sequence[SavedIteration]) -> dict[int, SavedIteration]:
    """By iteration, oldest first, those that a job would load: complete by their names and announced."""
    named = tracked(root)
    last = ITERATION.fullmatch(named)
    if named and last is None:
        return {}
    complete = {one.iteration: one for one in published if one.iteration is not None and one.is_complete}
    return {number: one for number, one in complete.items() if last is None or number <= int(last[1])}


def _is_intact(folder: Path, advance: Callable[[int], None]) -> bool:
    try:
        return not verify(Recognized(str(folder), Content.ITERATION), advance).findings
    except UnreadableCheckpoint:
        return False


def _item(one: SavedIteration, reason: str, *, goes: bool = False) -> Item:
    if one.folder.is_symlink():
        return Item(one.folder.name, one.nbytes, A_LINK)
    return Item(one.folder.name, one.nbytes, reason, partial(_remove, one.folder) if goes else None)


def _merging(path: Path) -> Item:
    item = Item(path.name, folder_bytes(path), "it is half-converted", partial(shutil.rmtree, path))
    return item.kept(A_LINK) if path.is_symlink() else item


def _remove(folder: Path) -> None:
    """Renamed first, so that a crash in between leaves no half-deleted checkpoint that looks like one."""
    published = ITERATION.fullmatch(folder.name)
    if published:
        condemned = folder.with_name(f".{folder.name}.removing")
        shutil.rmtree(condemned, ignore_errors=True)
        folder = folder.rename(condemned)
    shutil.rmtree(folder)
