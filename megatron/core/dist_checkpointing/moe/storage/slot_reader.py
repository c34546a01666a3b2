"""Reading one process's folder of the memory tier, from any process on the node.

    segment-002.bin                                            preallocated bytes, used again and again
    segment-002.iter_0000012-rank_00003-snapshot.writing       they are being overwritten, or were when a process died
    segment-002.iter_0000012-rank_00003-snapshot.json          they are sealed: the manifest, and zeros
    segment-003.room                                           pages for the next manifest of a free segment

Whoever reads holds a shared lock on the segment, whoever overwrites it an exclusive one. The names alone say what is in
a segment; they change while others read, so whatever is found missing at a second look was freed in between.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import UnreadableCheckpoint
from ..types.layout import Listing, Manifest, Record, SnapshotId, Torn
from .base import SnapshotReader
from .manifest import MOST_BYTES, decode
from .small_files import read_small, regular_stat
from .system import FileLock, LockedMap, OperatingSystem, PrivateSystem, failing_as, map_locked

SEALED, WRITING = "json", "writing"

_ENTRY = re.compile(rf"(segment-\d{{3,}})\.([a-z0-9_-]+)\.({SEALED}|{WRITING})")
_LOCK_RETRY_S = 0.0005


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A file that says what is in a segment: sealed, or being written."""

    segment: str
    snapshot: SnapshotId
    state: str

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.segment}.{self.snapshot.name}.{self.state}"

    @staticmethod
    @lru_cache(maxsize=1024)  # a folder is listed several times per iteration, and most of it stays as it was
    def parse(name: str) -> SlotEntry | None:
        """The entry of this file name, None for other files."""
        found = _ENTRY.fullmatch(name)
        snapshot = SnapshotId.parse(found[2]) if found else None
        return SlotEntry(found[1], snapshot, found[3]) if found and snapshot else None


def written_over(content: bytes) -> bytes:
    """A manifest as it was written: behind it are zeros, up to the end of its room."""
    return content.rstrip(b"\0")


class MemoryReader(SnapshotReader):
    """A sealed snapshot in memory; what it reads are views of the memory itself, which stays pinned."""

    def __init__(self, manifest: Manifest, where: str, mapped: LockedMap | None) -> None:
        super().__init__(manifest, where)
        self._view = (memoryview(mapped) if mapped else memoryview(b"")).toreadonly()

    def raw(self) -> memoryview:
        self._require_open()
        return self._view[:]

    def _bytes(self, record: Record) -> memoryview:
        return self._view[record.offset : record.offset + record.nbytes]

    def _let_go(self) -> None:
        self._view = memoryview(b"")


class SlotReader:
    """The snapshots in `directory`, for reading only; the owner may continue writing there.

    `being_written` says whether a segment is; without it the segment's lock is asked.
    """

    def __init__(
        self, directory: Path, system: OperatingSystem | None = None, being_written: Callable[[str], bool] | None = None
    ) -> None:
        self.directory, self._system = directory, system or PrivateSystem()
        self._being_written = being_written or self._is_locked

    def entries(self) -> tuple[SlotEntry, ...]:
        """What the file names say, unverified. Raises StoreFailure."""
        with failing_as(f"list {self.directory}"):
            names = self._system.list_directory(self.directory)
        return tuple(entry for entry in map(SlotEntry.parse, names) if entry)

    def snapshots(self, rank: int | None = None) -> Listing:
        sealed, torn = [], []
        for entry in self.entries():
            if rank not in (None, entry.snapshot.rank):
                continue
            try:
                found = self._is_sealed(entry)
            except UnreadableCheckpoint as error:
                torn.append(Torn(entry.snapshot, str(self.directory / entry.name), str(error)))
            else:
                sealed += [entry.snapshot] if found else []
        return Listing(tuple(sorted(sealed)), tuple(sorted(torn, key=lambda one: (one.snapshot, one.path))))

    def open(self, snapshot: SnapshotId) -> MemoryReader:
        for entry in self.entries():
            if entry.snapshot == snapshot and entry.state == SEALED:
                lock = self._pin(entry)
                if lock:
                    return self._reader(entry, lock)
        raise UnreadableCheckpoint(f"{self.directory}: the {snapshot} is not sealed here")

    def _reader(self, entry: SlotEntry, lock: FileLock) -> MemoryReader:
        manifest, path = self.manifest(entry), self.directory / f"{entry.segment}.bin"
        try:
            mapped = map_locked(self._system, path, manifest.layout.nbytes, lock) if manifest.layout.nbytes else None
        except OSError as error:
            raise UnreadableCheckpoint(f"{path}: cannot be mapped: {error.strerror}; use another copy") from error
        return MemoryReader(manifest, str(path), mapped)

    def _pin(self, entry: SlotEntry) -> FileLock | None:
        """A shared lock on a segment that is sealed; None when it is freed meanwhile.

        The owner holds the exclusive lock beside a manifest only for the moment between committing and unlocking.
        """
        path, manifest = self.directory / f"{entry.segment}.bin", self.directory / entry.name
        while os.path.exists(manifest):
            try:
                # Tried again and again, not waited for: a waiting flock could not be given up when the manifest goes.
                lock = FileLock(self._system, path, exclusive=False)
            except BlockingIOError:
                time.sleep(_LOCK_RETRY_S)
                continue
            except OSError as error:
                raise UnreadableCheckpoint(f"{path}: {error.strerror}; use another copy") from error
            # Asked again under the lock: the segment may have been freed and even overwritten before it was taken. From
            # here on it cannot be, whatever happens to the manifest.
            return lock if os.path.exists(manifest) else None
        return None

    def _is_sealed(self, entry: SlotEntry) -> bool:
        """False when the owner is writing it or has just freed it. Raises UnreadableCheckpoint when it is torn."""
        path = self.directory / entry.name
        if entry.state == SEALED:
            try:
                self.manifest(entry)
            except UnreadableCheckpoint:
                if os.path.exists(path):
                    raise
                return False  # freed while it was read
            return True
        if self._being_written(entry.segment) or not os.path.exists(path):
            return False
        raise UnreadableCheckpoint(f"{path}: it was never sealed")

    def _is_locked(self, segment: str) -> bool:
        try:
            # A shared lock that is let go at once: a writer that begins in this moment finds the segment in use for it,
            # and takes another or tries again.
            FileLock(self._system, self.directory / f"{segment}.bin", exclusive=False).release()
        except BlockingIOError:
            return True
        except OSError:
            return False  # without its segment nobody can be writing it
        return False

    def manifest(self, entry: SlotEntry) -> Manifest:
        """The verified manifest of a sealed entry, whose segment is there and whole."""
        path, segment = self.directory / entry.name, f"{entry.segment}.bin"
        try:
            manifest = decode(written_over(read_small(path, MOST_BYTES, system=self._system)), str(path))
            stored = regular_stat(self.directory / segment)
        except OSError as error:
            raise UnreadableCheckpoint(f"{error.filename or path}: {error.strerror}; use another copy") from error
        if (manifest.snapshot, manifest.segment) != (entry.snapshot, segment):
            raise UnreadableCheckpoint(
                f"{path}: belongs to the {manifest.snapshot} in {manifest.segment}; it was moved"
            )
        # A hole would be filled on reading, and a full tmpfs then kills the reader.
        if min(stored.st_size, stored.st_blocks * 512) < manifest.layout.nbytes:
            raise UnreadableCheckpoint(
                f"{self.directory / segment}: has {min(stored.st_size, stored.st_blocks * 512)} of"
                f" {manifest.layout.nbytes} bytes: it was truncated; use another copy"
            )
        return manifest
