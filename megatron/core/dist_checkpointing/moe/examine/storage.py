"""Opening the storage of a job from outside, by what the job was given as --moe-ckpt-persist-dir."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..errors import UnreadableCheckpoint, UsageError
from ..ports import SnapshotId, Store, StoreFailure
from ..storage.durable import open_durable
from ..store.filesystem import FilesystemStore
from ..store.objects import ObjectStore


def open_storage(place: str, rank: int = 0) -> Store:
    """The store in a folder that is there, or behind a URL; `rank` is the one whose leftovers `sweep` removes.

    Raises UsageError for what is neither.
    """
    if "://" not in place and not Path(place).is_dir():
        raise UsageError(f"{place} is no folder; give what the job had as --moe-ckpt-persist-dir")
    return open_durable(place, rank)


def snapshot_at(place: str) -> tuple[str, SnapshotId]:
    """The storage that a snapshot's folder or URL lies in, and which snapshot it is. Raises UnreadableCheckpoint."""
    storage, _, name = (place.rstrip("/") if "://" in place else os.path.abspath(place)).rpartition("/")
    snapshot = SnapshotId.parse(name)
    if snapshot is None:
        raise UnreadableCheckpoint(f"{place} is no snapshot: its name is not that of one")
    return storage, snapshot


def sealed_s(store: Store, snapshot: SnapshotId) -> float | None:
    """When a snapshot was sealed, in seconds since 1970; None where the storage does not say."""
    with suppress(OSError, StoreFailure):
        if isinstance(store, FilesystemStore | ObjectStore):
            return store.sealed_s(snapshot)
    return None
