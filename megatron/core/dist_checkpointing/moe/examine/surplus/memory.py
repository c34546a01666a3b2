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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import NewerFormat, UnreadableCheckpoint, UsageError
from ...ports import StoreFailure
from ...storage.slot_reader import SEALED
from ...store.manifest import decode
from ...store.ownership import OWNER_FILE
from ..areas import Slot, slots
from .items import A_LINK, Item, Limits, Surplus
from .written import folder_bytes, last_written_s


def surplus_of_memory(memory_dir: Path, limits: Limits) -> Surplus:
    """What may be freed below a --moe-ckpt-memory-dir, or below the folder of a node or a job in it: whole jobs, each
    on its node. A job with a living process on the node stays. Raises UsageError for the folder of one process,
    UnreadableCheckpoint, StoreFailure.
    """
    found = slots(memory_dir)
    if any(slot.directory == Path(os.path.abspath(memory_dir)) for slot in found):
        raise UsageError(
            f"{memory_dir} is the memory of one process, and jobs are freed as a whole: give the folder of its job,"
            f" {Path(os.path.abspath(memory_dir)).parent}, or the --moe-ckpt-memory-dir"
        )
    folders = sorted({slot.directory.parent for slot in found})
    return Surplus(tuple(_item(folder, slots(folder), limits) for folder in folders))


def _item(folder: Path, held: Sequence[Slot], limits: Limits) -> Item:
    job, left = folder.name, _left(held)
    item = Item(
        f"job {job} on {folder.parent.name}: {left.told}",
        folder_bytes(folder),
        "its processes are gone",
        partial(_remove, folder),
    )
    living = [slot.owner or "a process" for slot in held if slot.alive]
    fresh = limits.too_fresh(last_written_s(str(folder)))
    if living:
        return item.kept(f"{living[0]} uses it")
    if folder.is_symlink():
        return item.kept(A_LINK)
    if left.newer:
        return item.kept("a later version of moe-ckpt wrote in it")
    if job in limits.ended:
        return item
    if fresh:
        return item.kept(fresh)
    if left.newest is not None or left.unread:
        return item.kept(f"a restart of the job can go on from it; --ended {job} if there will be none")
    return item


@dataclass(frozen=True)
class _Left:
    """What is sealed by its name. newest: iteration of the newest one that can be read; newer: of a later version."""

    newest: int | None
    unread: int
    newer: bool

    @property
    def told(self) -> str:
        if self.unread:
            return "snapshots that this version cannot read are left"
        return "no snapshot is left" if self.newest is None else f"snapshots up to iteration {self.newest} are left"


def _left(held: Sequence[Slot]) -> _Left:
    """From names first: what cannot be read may be the newest state all the same."""
    newest, unread, newer = None, 0, False
    for slot in held:
        for entry in slot.shelf.entries():
            if entry.state == SEALED:
                iteration, is_newer = _read(slot.directory / entry.name)
                newer |= is_newer
                unread += iteration is None
                newest = iteration if newest is None else max(newest, iteration or 0)
    return _Left(newest, unread, newer)


def _read(manifest: Path) -> tuple[int | None, bool]:
    """The iteration in a manifest, None where it cannot be read, and whether a later version wrote it."""
    try:
        return decode(manifest.read_bytes(), str(manifest)).snapshot.iteration, False
    except NewerFormat:
        return None, True
    except (UnreadableCheckpoint, OSError):
        return None, False


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
