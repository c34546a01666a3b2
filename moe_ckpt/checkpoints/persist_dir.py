"""A job's storage (--moe-ckpt-persist-dir) seen from outside: a folder, or a URL that fsspec knows.

`PersistDir.store` lists, opens and frees snapshots. What only people and tools want to know besides, folders and URLs
answer differently: when something was written, what is a link, what lies under a name that no job gave it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import SnapshotId, StoreFailure, Torn
from megatron.core.dist_checkpointing.moe.storage.filesystem import SEGMENT, FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore, remote
from megatron.core.dist_checkpointing.moe.types.layout import MANIFEST, UNSEALED

from . import files
from .recognition import is_url

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems of fsspec call the time of an object's last change."""


class PersistDir(ABC):
    """The storage at `place`; its methods raise OSError, and StoreFailure for a URL, unless they say otherwise."""

    def __init__(self, place: str, store: FilesystemStore | ObjectStore) -> None:
        self.place, self.store = place, store

    def sealed_s(self, snapshot: SnapshotId) -> float | None:
        """When a snapshot was sealed, in seconds since 1970; None where the storage does not say. Raises nothing."""
        with suppress(OSError, StoreFailure):
            return self.store.sealed_s(snapshot)
        return None

    @abstractmethod
    def last_written_s(self) -> float | None:
        """When the newest file was, in seconds since 1970; 0 without files, None where the storage does not say."""

    @abstractmethod
    def length_bytes(self) -> int:
        """Lengths of all files."""

    @abstractmethod
    def disk_bytes(self, path: str) -> int:
        """Bytes that what is at `path` takes."""

    @abstractmethod
    def copied_to(self, folder: Path, snapshots: Sequence[SnapshotId]) -> str:
        """Make snapshots appear in another folder, by links where that is enough. Returns the folder's name for a job.

        Args:
            folder: An empty folder.
            snapshots: Snapshots of this storage.
        """

    def is_link(self, name: str) -> bool:
        """Whether the folder of a snapshot really lies elsewhere."""
        return False

    def segment(self, snapshot: SnapshotId) -> Path | None:
        """The file with a snapshot's records; None where its bytes between records are not kept."""
        return None

    def misnamed(self) -> Sequence[Path]:
        """Folders with the manifest of a snapshot under names that are none of a snapshot."""
        return ()

    def half_deleted(self) -> Sequence[Path]:
        """Folders of snapshots that were being deleted when their process died."""
        return ()


class PersistFolder(PersistDir):
    """Storage in a folder."""

    def __init__(self, place: str, store: FilesystemStore) -> None:
        super().__init__(place, store)
        self._folder = store.directory

    def last_written_s(self) -> float | None:
        return files.last_written_s(self._folder)

    def length_bytes(self) -> int:
        return files.length_bytes(self._folder)

    def disk_bytes(self, path: str) -> int:
        return files.disk_bytes(Path(path))

    def copied_to(self, folder: Path, snapshots: Sequence[SnapshotId]) -> str:
        """As `PersistDir.copied_to`, by links."""
        for snapshot in snapshots:
            (folder / snapshot.name).symlink_to(self._folder.absolute() / snapshot.name)
        return str(folder)

    def is_link(self, name: str) -> bool:
        return (self._folder / name).is_symlink()

    def segment(self, snapshot: SnapshotId) -> Path | None:
        return self._folder / snapshot.name / SEGMENT

    def misnamed(self) -> Sequence[Path]:
        strangers = (path for path in self._folder.iterdir() if not SnapshotId.parse(path.name))
        return sorted(path for path in strangers if not path.name.startswith(UNSEALED) and _has_manifest(path))

    def half_deleted(self) -> Sequence[Path]:
        return sorted(self._folder.glob(".freed.*"))


def _has_manifest(folder: Path) -> bool:
    with suppress(PermissionError):  # the lost+found of a file system, or a folder of another user
        return (folder / MANIFEST).is_file()
    return False


class PersistUrl(PersistDir):
    """Storage behind a URL."""

    def __init__(self, place: str, store: ObjectStore) -> None:
        super().__init__(place, store)
        self._files, self._root = store.files, store.root

    def last_written_s(self) -> float | None:
        with remote(self.place):
            self._files.invalidate_cache()  # what was listed before may be older than what a job has written since
            found = self._files.find(self._root, detail=True)
        times = [_time_s(about) for about in found.values()]
        return None if None in times else max((time_s for time_s in times if time_s is not None), default=0.0)

    def length_bytes(self) -> int:
        with remote(self.place):
            return int(self._files.du(self._root))

    def disk_bytes(self, path: str) -> int:
        with remote(self.place):
            return int(self._files.du(path))

    def copied_to(self, folder: Path, snapshots: Sequence[SnapshotId]) -> str:
        """As `PersistDir.copied_to`, by copies, which a job reads as a URL again, as their files are named for one."""
        with remote(self.place):
            for snapshot in snapshots:
                self._files.get(f"{self._root}/{snapshot.name}", str(folder / snapshot.name), recursive=True)
        return f"file://{folder}"


def open_persist_dir(place: str, rank: int = 0) -> PersistDir:
    """The storage in a folder that is there, or behind a URL. Raises UsageError for any other place.

    Args:
        place: The folder or URL, as `--moe-ckpt-persist-dir` has it.
        rank: The rank whose leftovers `sweep` removes.
    """
    if is_url(place):
        return PersistUrl(place, ObjectStore(place, rank))
    if not Path(place).is_dir():
        raise UsageError(f"{place} is no folder; give what the job had as --moe-ckpt-persist-dir")
    return PersistFolder(place, FilesystemStore(Path(place), rank))


def snapshot_at(place: str) -> tuple[str, SnapshotId]:
    """The storage that a snapshot's folder or URL lies in, and which snapshot it is. Raises UnreadableCheckpoint."""
    storage, _, name = (place.rstrip("/") if is_url(place) else os.path.abspath(place)).rpartition("/")
    snapshot = SnapshotId.parse(name)
    if snapshot is None:
        raise UnreadableCheckpoint(f"{place} is no snapshot: its name is not that of one")
    return storage, snapshot


def is_unsealed(torn: Torn) -> bool:
    """Whether a torn snapshot was never sealed, by its mark or its name; else it was damaged."""
    return torn.unsealed or Path(torn.path).name.startswith(UNSEALED)


def _time_s(about: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        written = about.get(name)
        if isinstance(written, datetime):
            return (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()
        if isinstance(written, int | float):
            return float(written)
    return None
