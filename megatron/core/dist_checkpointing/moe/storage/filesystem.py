"""Snapshots on a disk or a shared file system: a folder each, renamed to its name when it is complete.

    iter_0000012-rank_00003-snapshot/              sealed: segment.bin, manifest.json
    .writing.iter_...-snapshot.00003.5f0c8a1e/     rank 3 is writing it, or was when it died
    .freed.iter_...-snapshot.00003.91b2d7f4/       being deleted

The order of calls makes it durable: sync the segment, sync the manifest, sync the folder that names both; then rename
the folder, and sync the root that holds its new name. Whatever a power cut undoes of this from the end, what is left is
a whole snapshot under its name, or one under a name that is never read.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import MAY_PASS, StoreFailure, UnreadableCheckpoint, UsageError, may_pass
from ..types.layout import MANIFEST, Field, Layout, Listing, Manifest, Record, SnapshotId, Torn
from .base import DurableWriter, SnapshotReader, sealed_manifest
from .manifest import MOST_BYTES
from .small_files import read_small, regular_stat
from .system import (
    OperatingSystem,
    failing_as,
    make_folders,
    read_up_to,
    sync_directory,
    write_all,
    write_synced,
)

log = logging.getLogger(__name__)

SEGMENT = "segment.bin"

_ASIDE = re.compile(r"\.(writing|freed)\.([a-z0-9_-]+)\.(\d{5,})\.([0-9a-f]{8})")


class FilesystemStore:
    """Durable snapshots below `directory`, which ranks and nodes may share; `rank` is the one that writes here.

    Sealed means: data, manifest and names are on the device. A reader reads from open files, so freeing a snapshot
    does not disturb it. What other ranks are writing just now cannot be told from what they left torn, and is listed
    as torn; `sweep` removes only what this rank left. The folder is created if it is missing.
    Raises UsageError when it cannot be used, StoreFailure when it cannot be reached now.
    """

    def __init__(self, directory: Path, rank: int, *, system: OperatingSystem | None = None) -> None:
        self.directory, self.rank, self.system = directory, rank, system or OperatingSystem()
        # `reserve` must look and claim in one act. Elsewhere single operations on the dict are enough: a writer that
        # comes or goes between two of them is listed or swept as if it had come or gone a moment before or after.
        self._mutex = threading.Lock()
        self._writing: dict[str, SnapshotId] = {}
        # The folder has snapshots of all ranks, and to find leftovers in it takes as long as they are many: looked for
        # until `sweep` has removed those of earlier processes, and then only if one of this process could not go.
        self._may_have_left = True
        try:
            make_folders(directory)
        except OSError as error:
            kind = StoreFailure if error.errno in MAY_PASS else UsageError
            raise kind(f"{directory} cannot hold snapshots: {error.strerror}; choose another folder") from error

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> FilesystemWriter:
        """As `ports.Store.reserve`; the disk's space is taken here, so that `put` does not run out of it."""
        with self._mutex:
            if snapshot in self._writing.values():
                raise UsageError(f"the {snapshot} is being written already")
            with failing_as(f"look for the {snapshot} in {self.directory}"):
                is_there = _is_there(self.directory / snapshot.name)
            if is_there:
                raise UsageError(f"the {snapshot} is in {self.directory} already: free it before it is written again")
            # Claimed before the folder exists, so that no listing on another thread takes it for torn.
            aside = self._new_name("writing", snapshot)
            self._writing[aside.name] = snapshot
        try:
            with failing_as(f"reserve {layout.nbytes} bytes in {self.directory}"):
                self._delete_left(snapshot)
                self.system.make_directory(aside)
                descriptor = self._allocated(aside / SEGMENT, layout.nbytes)
        except BaseException:
            self.discard(aside)
            raise
        return FilesystemWriter(self, snapshot, layout, aside, descriptor)

    def snapshots(self, rank: int | None = None) -> Listing:
        sealed, torn = [], []
        part = "" if rank is None else f"-rank_{rank:05d}-"  # in all names of that rank's: to parse each takes longer
        for name in self._names():
            if part not in name:
                continue
            snapshot, path = SnapshotId.parse(name), self.directory / name
            aside = _ASIDE.fullmatch(name)
            unsealed = SnapshotId.parse(aside[2]) if aside and aside[1] == "writing" else None
            named = snapshot or unsealed
            if named and rank not in (None, named.rank):
                continue
            # What is gone by the time it is looked at was freed or sealed meanwhile by another thread or rank.
            if snapshot:
                try:
                    self._manifest(snapshot)
                    sealed.append(snapshot)
                except UnreadableCheckpoint as error:
                    if not _is_gone(path):
                        torn.append(Torn(snapshot, str(path), str(error), may_pass=may_pass(error)))
            elif unsealed and name not in self._writing and not _is_gone(path):
                torn.append(Torn(unsealed, str(path), f"{path}: it was never sealed, or is still being written"))
        return Listing(tuple(sorted(sealed)), tuple(sorted(torn, key=lambda item: (item.snapshot, item.path))))

    def ranks(self) -> frozenset[int]:
        return SnapshotId.ranks_in(self._names())

    def open(self, snapshot: SnapshotId) -> FilesystemReader:
        path = self.directory / snapshot.name / SEGMENT
        manifest = self._manifest(snapshot)
        # From here on the descriptor keeps the bytes, whatever happens to their name. Should the snapshot be freed and
        # written again between the two lines, checksums of the old manifest refuse the new bytes.
        try:
            descriptor = self.system.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise UnreadableCheckpoint(f"{path}: {error.strerror}; use another copy") from error
        return FilesystemReader(manifest, str(path), descriptor, self.system)

    def sealed_s(self, snapshot: SnapshotId) -> float:
        """When a snapshot was sealed, in seconds since 1970. Raises OSError."""
        return (self.directory / snapshot.name / MANIFEST).stat().st_mtime

    def free(self, snapshot: SnapshotId) -> None:
        """As `ports.Store.free`: a sealed snapshot vanishes by one rename before its files are deleted."""
        with failing_as(f"free the {snapshot} in {self.directory}"):
            aside = self._new_name("freed", snapshot)
            if is_there := _is_there(self.directory / snapshot.name):
                self.system.rename(self.directory / snapshot.name, aside)
                # Without this a power cut might bring the name back after its files were deleted.
                sync_directory(self.directory, self.system)
            try:
                self._delete(aside) if is_there else self._delete_left(snapshot)
            except (OSError, StoreFailure) as error:  # on NFS, where anybody has a file of it open
                self._may_have_left = True
                log.warning("%s is free, but takes space until the next start: %s", snapshot, error)

    def sweep(self) -> None:
        with failing_as(f"remove torn snapshots in {self.directory}"):
            self._may_have_left = False  # before: what another thread cannot remove meanwhile is none of these
            try:
                self._delete_left()
            except BaseException:
                self._may_have_left = True
                raise

    def close(self) -> None:
        """As `ports.Store.close`; there is nothing to release."""

    def publish(self, aside: Path, snapshot: SnapshotId) -> None:
        """For writers: the one rename that commits.

        Args:
            aside: The folder that was written, with the manifest in it.
            snapshot: The snapshot, whose name the folder gets.
        """
        path = self.directory / snapshot.name
        self.system.rename(aside, path)
        try:
            sync_directory(self.directory, self.system)
        except OSError:
            # Taken back, to be discarded: whoever tries again would find it here, and call durable what never was.
            with suppress(OSError):
                self.system.rename(path, aside)
            raise
        self._writing.pop(aside.name, None)

    def discard(self, aside: Path) -> None:
        """For writers: remove what was written, as far as the device lets it."""
        try:
            self._delete(aside)
        except OSError:
            self._may_have_left = True
        # Claimed until it is gone: a listing in between would call it torn.
        self._writing.pop(aside.name, None)

    def _new_name(self, state: str, snapshot: SnapshotId) -> Path:
        return self.directory / f".{state}.{snapshot.name}.{self.rank:05d}.{os.urandom(4).hex()}"

    def _names(self) -> list[str]:
        with failing_as(f"list {self.directory}"):
            return self.system.list_directory(self.directory)

    def _delete_left(self, snapshot: SnapshotId | None = None) -> None:
        """Delete what this rank left behind of one snapshot, or of all, and is not writing now. Raises OSError once all
        was tried."""
        if snapshot is not None and not self._may_have_left:
            return
        failures = []
        for name in self._names():
            found = _ASIDE.fullmatch(name)
            of_snapshot = found and (snapshot is None or found[2] == snapshot.name)
            # Other ranks' leftovers are theirs to delete: they may still be writing them.
            if found and of_snapshot and int(found[3]) == self.rank and name not in self._writing:
                try:
                    self._delete(self.directory / name)
                except OSError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _allocated(self, path: Path, nbytes: int) -> int:
        # EXCL: another attempt's file must never be written to, however unlikely its name.
        descriptor = self.system.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if nbytes:
                self.system.allocate(descriptor, nbytes)
        except BaseException:
            self.system.close(descriptor)
            raise
        return descriptor

    def _delete(self, folder: Path) -> None:
        with suppress(FileNotFoundError):  # a restarted process of this rank may be deleting it too
            if folder.is_symlink() or not folder.is_dir():  # what it leads to is not ours
                self.system.unlink(folder)
                return
            for name in self.system.list_directory(folder):
                try:
                    self.system.unlink(folder / name)
                except IsADirectoryError:
                    self._delete(folder / name)
            self.system.remove_directory(folder)

    def _manifest(self, snapshot: SnapshotId) -> Manifest:
        manifest = sealed_manifest(
            snapshot,
            str(self.directory / snapshot.name),
            lambda path: read_small(Path(path), MOST_BYTES, system=self.system),
            lambda path: regular_stat(Path(path)).st_size,
        )
        if manifest.segment != SEGMENT:
            raise UnreadableCheckpoint(
                f"{self.directory / snapshot.name / MANIFEST}: its bytes are in {manifest.segment}, not in {SEGMENT}:"
                " it was copied from an object store; use the original"
            )
        return manifest


def _is_there(path: Path) -> bool:
    """Whether anything has this name. Raises OSError where that cannot be told now: `os.path.lexists` says no then."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_gone(path: Path) -> bool:
    """Whether nothing has this name, for sure."""
    with suppress(OSError):
        return not _is_there(path)
    return False


class FilesystemWriter(DurableWriter):
    """Writes one folder, aside."""

    def __init__(
        self, store: FilesystemStore, snapshot: SnapshotId, layout: Layout, aside: Path, descriptor: int
    ) -> None:
        super().__init__(snapshot, layout, SEGMENT)
        self._store, self._aside, self._descriptor = store, aside, descriptor

    def _write(self, field: Field, offset: int, data: memoryview) -> None:
        with failing_as(f"write record {field.key} to {self._aside}"):
            write_all(self._store.system, self._descriptor, data, offset)

    def _commit(self, manifest: bytes) -> None:
        system = self._store.system
        with failing_as(f"seal the {self._snapshot} in {self._store.directory}"):
            # The bytes before the manifest that vouches for them: a power cut may keep only the one synced first.
            system.sync(self._descriptor)
            write_synced(system, self._aside / MANIFEST, manifest)
            # The names inside must be durable before the rename is: a power cut may keep the one without the other.
            sync_directory(self._aside, system)
            self._store.publish(self._aside, self._snapshot)
        self._close()

    def _discard(self) -> None:
        self._close()
        self._store.discard(self._aside)

    def _close(self) -> None:
        # What is sealed was synced before, what is not is removed: an error of close changes neither.
        with suppress(OSError):
            self._store.system.close(self._descriptor)


class FilesystemReader(SnapshotReader):
    """Reads records from an open file, each into memory of its own."""

    def __init__(self, manifest: Manifest, where: str, descriptor: int, system: OperatingSystem) -> None:
        super().__init__(manifest, where)
        self._descriptor, self._system = descriptor, system

    def _bytes(self, record: Record) -> memoryview:
        # Read, not mapped: if another node truncates the file, a mapping would kill the process.
        try:
            into = np.empty(record.nbytes, np.uint8).data
            found = read_up_to(self._system, self._descriptor, into, record.offset)
        except (OSError, MemoryError) as error:
            why = getattr(error, "strerror", None) or f"{record.nbytes} bytes are more than there is memory for"
            raise UnreadableCheckpoint(f"{self._where}: record {record.key}: {why}; use another copy") from error
        return into[:found].toreadonly()

    def _let_go(self) -> None:
        with suppress(OSError):
            self._system.close(self._descriptor)
