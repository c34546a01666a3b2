"""What of the memory tier may be freed: folders of jobs whose processes are gone.

What a job left in memory may be the newest state that it has, and a restart takes it. So its folder goes by itself only
if no snapshot is in it; else the user has to say that the job will not be resumed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from ...ports import StoreFailure
from ...store.ownership import OWNER_FILE
from ..areas import Slot, slots
from .items import Item, Limits, Surplus
from .written import folder_bytes, last_written_s


def surplus_of_memory(memory_dir: Path, limits: Limits) -> Surplus:
    """What may be freed below a --moe-ckpt-memory-dir, or below the folder of a node or a job in it: whole jobs, each
    on its node. A job with a living process on the node stays. Raises UnreadableCheckpoint, StoreFailure.
    """
    folders = sorted({slot.directory.parent for slot in slots(memory_dir)})
    return Surplus(tuple(_item(folder, slots(folder), limits) for folder in folders))


def _item(folder: Path, held: Sequence[Slot], limits: Limits) -> Item:
    job, newest = folder.name, _newest(held)
    left = "no snapshot is left" if newest is None else f"snapshots up to iteration {newest} are left"
    what = f"job {job} on {folder.parent.name}: {left}"
    item = Item(what, folder_bytes(folder), "its processes are gone", partial(_remove, folder))
    living = [slot.owner or "a process" for slot in held if slot.alive]
    fresh = limits.too_fresh(last_written_s(str(folder)))
    if living:
        return item.kept(f"{living[0]} uses it")
    if job in limits.ended:
        return item
    if fresh:
        return item.kept(fresh)
    if newest is not None:
        return item.kept(f"a restart of the job can go on from it; --ended {job} if there will be none")
    return item


def _newest(held: Sequence[Slot]) -> int | None:
    sealed = [snapshot for slot in held for snapshot in slot.shelf.snapshots().sealed]
    return max((snapshot.iteration for snapshot in sealed), default=None)


def _remove(folder: Path) -> None:
    """Raises StoreFailure when a process has taken a slot of the job meanwhile."""
    with ExitStack() as stack:
        for path in sorted(folder.glob(f"*/{OWNER_FILE}")):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StoreFailure(f"{path.parent} is used by a process now: the job runs") from error
        shutil.rmtree(folder)
    with suppress(OSError):
        folder.parent.rmdir()
