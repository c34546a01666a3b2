"""Reading one process's folder of the memory tier, from any process on the node, and under any of its names.

    segment-002.bin                                            preallocated bytes, used again and again
    segment-002.iter_0000012-rank_00003-snapshot.writing       they are being overwritten, or were when a process died
    segment-002.iter_0000012-rank_00003-snapshot.json          they are sealed: the manifest, and zeros
    segment-003.room                                           pages for the next manifest of a free segment

Whoever reads holds a shared lock on the segment, whoever overwrites it an exclusive one. The names alone say what is in
a segment; they change while others read, so whatever is found missing at a second look was freed in between.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import NewerFormat, OtherSecret, UnreadableCheckpoint, UsageError, WrongSecret, reason
from ..types import PARKED
from ..types.layout import Listing, Manifest, Record, SnapshotId, Torn
from .base import SnapshotReader
from .manifest import MOST_BYTES, decode
from .ownership import OWNER_FILE, check_private, live_owner, make_private
from .small_files import read_small, regular_stat
from .system import FileLock, OperatingSystem, PrivateSystem, failing_as, map_locked

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

    def __init__(self, manifest: Manifest, where: str, view: memoryview) -> None:
        super().__init__(manifest, where)
        self._view = view.toreadonly()

    def raw(self) -> memoryview:
        self._require_open()
        return self._view[:]

    def _bytes(self, record: Record) -> memoryview:
        return self._view[record.offset : record.offset + record.nbytes]

    def _let_go(self) -> None:
        self._view = memoryview(b"")


class SlotReader:
    """The snapshots in `directory`, for reading only; the owner may continue writing there.

    `being_written` says whether a segment is; without it the segment's lock is asked. `mapped` gives the first bytes of
    a segment that this process has mapped, and keeps a lock for as long as anything refers to them.
    """

    def __init__(
        self,
        directory: Path,
        system: OperatingSystem | None = None,
        being_written: Callable[[str], bool] | None = None,
        mapped: Callable[[str, int, FileLock], memoryview | None] = lambda *_: None,
    ) -> None:
        self.directory, self._system, self._mapped = directory, system or PrivateSystem(), mapped
        self._being_written = being_written or self._is_locked

    def entries(self) -> tuple[SlotEntry, ...]:
        """What the file names say, unverified. Raises StoreFailure."""
        with failing_as(f"list {self.directory}"):
            names = self._system.list_directory(self.directory)
        return tuple(entry for entry in map(SlotEntry.parse, names) if entry)

    def snapshots(self, rank: int | None = None) -> Listing:
        sealed, torn, unreadable = [], list[Torn](), list[tuple[SlotEntry, UnreadableCheckpoint]]()
        for entry in self.entries():
            if rank not in (None, entry.snapshot.rank):
                continue
            try:
                found = self._is_sealed(entry)
            except UnreadableCheckpoint as error:
                unreadable.append((entry, error))
            else:
                sealed += [entry.snapshot] if found else []
        # Where this secret opens nothing, it is another one: that is no damage. Of parked state a slot has one alone.
        other = WrongSecret if rank is None and not sealed else OtherSecret
        for entry, why in unreadable:
            is_newer = isinstance(why, (NewerFormat, OtherSecret if entry.snapshot.kind == PARKED else other))
            torn.append(Torn(entry.snapshot, str(self.directory / entry.name), str(why), is_newer=is_newer))
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
        nbytes = manifest.layout.nbytes
        view = self._mapped(entry.segment, nbytes, lock) if nbytes else memoryview(b"")
        try:
            view = view if view is not None else memoryview(map_locked(self._system, path, nbytes, lock))
        except OSError as error:
            raise UnreadableCheckpoint(f"{path}: cannot be mapped: {error.strerror}; use another copy") from error
        return MemoryReader(manifest, str(path), view)

    def _pin(self, entry: SlotEntry) -> FileLock | None:
        """A shared lock on a segment that is sealed; None when it is freed meanwhile.

        The owner holds the exclusive lock beside a manifest only for the moment between committing and unlocking.
        """
        path, manifest = self.directory / f"{entry.segment}.bin", self.directory / entry.name
        until_s = time.monotonic() + LOCK_S
        while os.path.exists(manifest):
            try:
                # Tried again and again, not waited for: a waiting flock could not be given up when the manifest goes.
                lock = FileLock(self._system, path, exclusive=False)
            except OSError as error:
                if isinstance(error, BlockingIOError) and time.monotonic() < until_s:
                    time.sleep(_LOCK_RETRY_S)
                    continue
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


# A machine that comes back under another name: what a job left in its memory is taken under the name of now.
#
# The memory dir has a folder for each node, named after the host. A container that was started again, or a machine
# whose name changed, would find none of its own, begin at iteration 1, and take the memory twice.

log = logging.getLogger(__name__)

LOCK_S = 30.0
_POLL_S = 0.05


def take_over_memory(base: Path, node: str, job: str, others: Collection[str], fix: str) -> None:
    """Move what this job left here under another name of this machine to the folder of `node`.

    Nothing happens where the job continues from what it has under the name of `node`, or where it left nothing under
    others: nodes that run now, and folders that a process holds, are not left.

    Args:
        base: The memory dir.
        node: The name of this node.
        job: Id of the job.
        others: Names of all nodes of the running job.
        fix: What a user can set to choose a name.

    Raises:
        UsageError: Several names have what this job left, or a folder cannot be used.
    """
    names = {node, *others}
    try:
        if _is_needed(base / node / job) or all(path.parent.name in names for path in base.glob(f"*/{job}")):
            return
        with _locked(base):
            # Looked at again: another rank of this node may have been here.
            left = [] if _is_needed(base / node / job) else _left(base, job, names)
            if len(left) > 1:
                found = ", ".join(folder.parent.name for folder in left)
                raise UsageError(
                    f"memory dir {base} has nothing of job {job} under the name of this node, {node}, but under"
                    f" {found}: set {fix} to the name to continue from, or delete what is not needed"
                    f" (rm -r {' '.join(map(str, left))})"
                )
            for folder in left:
                _move(folder, base / node / job)
    except OSError as error:
        raise UsageError(f"memory dir {base} cannot be used: {reason(error)}") from error


def tell_of_memory(base: Path, node: str, job: str, others: Collection[str], fix: str) -> None:
    """See `take_over_memory`: says what it would take where `fix`, which is set, keeps it from being taken."""
    with suppress(OSError, UsageError):
        for folder in [] if _is_needed(base / node / job) else _left(base, job, {node, *others}):
            log.warning(
                "%s holds what job %s left under another name, and stays as it is, for %s is set to %s: set it to %s to"
                " continue from there, or delete what is not needed (rm -r %s)",
                folder, job, fix, node, folder.parent.name, folder,
            )  # fmt: skip


def _is_needed(folder: Path) -> bool:
    """Whether a job continues from what is here, or a process holds it."""
    return any(folder.glob(f"*/segment-*.{SEALED}")) or any(map(live_owner, folder.glob(f"*/{OWNER_FILE}")))


def _move(folder: Path, to: Path) -> None:
    make_private(to.parent)
    shutil.rmtree(to, ignore_errors=True)  # an attempt that came to nothing may have begun there
    os.rename(folder, to)
    log.warning(
        "what job %s left in memory under the name %s is that of %s from here on",
        to.name,
        folder.parent.name,
        to.parent.name,
    )
    with suppress(OSError):
        folder.parent.rmdir()


def _left(base: Path, job: str, names: Collection[str]) -> list[Path]:
    """Folders of the job under other names that no process holds. Raises UsageError where others could fill one."""
    found = []
    for folder in sorted(base.glob(f"*/{job}")):
        is_own = folder.parent.lstat().st_uid == os.geteuid()  # in /dev/shm anybody may have made it
        if folder.parent.name in names or not is_own or not folder.is_dir():
            continue
        check_private(folder.parent, job)
        is_held = any(map(live_owner, folder.glob(f"*/{OWNER_FILE}")))
        if not is_held and _is_needed(folder):
            found.append(folder)
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Ranks of a node come here together, and one of them moves what is there."""
    # On the folder itself: a file for the lock would have to be removed, and could be while another rank locks it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + LOCK_S
        while True:
            # Asked again and again, not waited for: a flock that waits has no timeout.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise UsageError(f"{folder} has been locked by another process for {LOCK_S:g} s") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
