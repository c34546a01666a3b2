"""Snapshots in host memory that survives the process: preallocated segments on a tmpfs, used in turn."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from ..errors import NoRoom, StoreFailure, UsageError
from ..storage.slot_reader import SEALED, WRITING, MemoryReader, SlotEntry, SlotReader
from ..types.layout import Field, Layout, Listing, SnapshotId, aligned, suffice
from .checksums import checksum
from .ownership import SLOT, Claim, warn_unless_in_memory
from .system import FileLock, OperatingSystem, failing_as, map_file, opened, sync_directory, write_synced
from .writing import SnapshotWriter


@dataclass(eq=False)
class _Segment:
    """A preallocated file, mapped once; `lent` are the buffers that a writer has handed out."""

    path: Path
    memory: mmap.mmap
    lent: list[weakref.ref[np.ndarray]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    @property
    def is_lent(self) -> bool:
        return any(buffer() is not None for buffer in self.lent)


class MemoryStore:
    """The memory tier of one process: `len(segment_bytes)` segments, reused in turn (MoC 5.2's triple buffers).

    All memory is taken at construction, in `<memory_dir>/<job>/<area>-<slot>/`: later no page is allocated and none
    faults for the first time, apart from the small manifests. A snapshot takes the smallest free segment that is large
    enough. A segment is free when no sealed manifest names it, and nobody holds a reader of it, a view from a reader,
    or a buffer from a writer. What a crashed process of the same job and slot left is adopted: sealed snapshots are
    there as before, torn ones are listed and their segments are free; sealed ones in segments of other sizes than
    asked for stay until they are freed. Truncating a segment's file while it is mapped kills the process (SIGBUS), as
    with any mapped file.

    Raises UsageError when the memory dir is missing, too small, or belongs to another job; StoreFailure.
    """

    def __init__(
        self,
        memory_dir: Path,
        job: str,
        slot: int,
        segment_bytes: Sequence[int],
        *,
        area: str = SLOT,
        system: OperatingSystem | None = None,
    ) -> None:
        if not segment_bytes or min(segment_bytes) < 1:
            raise UsageError(f"segments of {list(segment_bytes)} bytes: at least one is needed, none may be empty")
        self.system = system or OperatingSystem()
        self._mutex = threading.Lock()
        self._writing: dict[str, SnapshotId] = {}
        self._claim = Claim(memory_dir, job, slot, area)
        self.directory = self._claim.directory
        self._slot = SlotReader(self.directory, self.system, self._writing.__contains__)
        try:
            warn_unless_in_memory(memory_dir)
            self._segments = self._prepare(sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes))
        except BaseException:
            self._claim.release()
            raise

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments that are used in turn."""
        return sum(segment.nbytes for segment in self._segments.values())

    def resize(self, segment_bytes: Sequence[int], before: Callable[[], None] = lambda: None) -> None:
        """As `ports.MappedStore.resize`; a segment that is still read or written counts as long as that lasts."""
        sizes = sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes)
        with self._mutex:
            if not suffice([segment.nbytes for segment in self._segments.values()], sizes):
                before()
                self._exchange(sizes)

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> MemoryWriter:
        """As `ports.Store.reserve`."""
        with self._mutex:
            entries = self._slot.entries()
            if snapshot in self._writing.values():
                raise UsageError(f"the {snapshot} is being written already")
            if any(entry.snapshot == snapshot and entry.state == SEALED for entry in entries):
                raise UsageError(f"the {snapshot} is sealed already: free it before it is written again")
            name, lock = self._free_segment(entries, layout.nbytes)
            self._writing[name] = snapshot
            try:
                self._mark(entries, SlotEntry(name, snapshot, WRITING))
            except StoreFailure:
                del self._writing[name]
                lock.release()
                raise
        return MemoryWriter(self, snapshot, layout, self._segments[name], lock)

    def snapshots(self) -> Listing:
        """As `ports.Store.snapshots`."""
        return self._slot.snapshots()

    def open(self, snapshot: SnapshotId) -> MemoryReader:
        """As `ports.Store.open`."""
        return self._slot.open(snapshot)

    def free(self, snapshot: SnapshotId) -> None:
        """As `ports.Store.free`."""
        with self._mutex, failing_as(f"free the {snapshot} in {self.directory}"):
            for entry in self._slot.entries():
                if entry.snapshot == snapshot and entry.segment not in self._writing:
                    self.system.unlink(self.directory / entry.name)
                    if entry.segment not in self._segments:
                        (self.directory / f"{entry.segment}.bin").unlink(missing_ok=True)

    def sweep(self) -> None:
        """As `ports.Store.sweep`."""
        with self._mutex, failing_as(f"remove torn snapshots in {self.directory}"):
            for entry in self._slot.entries():
                if entry.state == WRITING and entry.segment not in self._writing:
                    self.system.unlink(self.directory / entry.name)

    def close(self) -> None:
        """As `ports.Store.close`."""
        self._claim.release()

    def remove(self) -> None:
        """Give all memory back to the node, sealed snapshots included: at the end of a job."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):
            self.directory.parent.rmdir()
        self.close()

    def end_writing(self, segment: Path) -> None:
        """For writers: the segment is not written any more."""
        with self._mutex:
            self._writing.pop(segment.stem, None)
            sealed = {entry.segment for entry in self._slot.entries() if entry.state == SEALED}
            if segment.stem not in self._segments and segment.stem not in sealed:
                segment.unlink(missing_ok=True)

    def _mark(self, entries: Sequence[SlotEntry], begun: SlotEntry) -> None:
        """Say in the folder what is being written, instead of what was torn there or of the same snapshot."""
        with failing_as(f"reserve a segment in {self.directory}"):
            for entry in entries:
                if entry.state == WRITING and (entry.segment == begun.segment or entry.snapshot == begun.snapshot):
                    self.system.unlink(self.directory / entry.name)
            with opened(self.system, self.directory / begun.name, os.O_WRONLY | os.O_CREAT):
                pass

    def _free_segment(self, entries: Sequence[SlotEntry], nbytes: int) -> tuple[str, FileLock]:
        """The name of a free segment and the lock on it; segments without a torn snapshot first."""
        fitting = [(one.nbytes, name) for name, one in self._segments.items() if one.nbytes >= nbytes]
        if not fitting:
            largest = max(segment.nbytes for segment in self._segments.values())
            raise UsageError(f"a snapshot of {nbytes} bytes does not fit in segments of at most {largest}")
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        torn = {entry.segment for entry in entries} - sealed
        for _, name in sorted(fitting, key=lambda one: (one[0], one[1] in torn, one[1])):
            if name in sealed or name in self._writing or self._segments[name].is_lent:
                continue
            with failing_as(f"lock {self._segments[name].path}"), suppress(BlockingIOError):
                return name, FileLock(self.system, self._segments[name].path, exclusive=True)
        raise NoRoom(
            f"{self.directory}: all {len(fitting)} segments of at least {nbytes} bytes are in use,"
            f" {sum(name in sealed for _, name in fitting)} of them by sealed snapshots: free one, or wait until its"
            " readers have ended"
        )

    def _prepare(self, sizes: Sequence[int]) -> dict[str, _Segment]:
        """Adopt the segments that are there, delete those that nobody needs, and allocate the rest."""
        existing = {path.stem: path.stat().st_size for path in sorted(self.directory.glob("segment-*.bin"))}
        entries = self._slot.entries()
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        chosen: dict[str, int] = {}
        missing: list[int] = []
        for size in sizes:
            same = [name for name, found in existing.items() if found == size and name not in chosen]
            if same:
                chosen[min(same, key=lambda name: (name not in sealed, name))] = size
            else:
                missing.append(size)
        with failing_as(f"tidy {self.directory}"):
            for name in existing.keys() - chosen.keys() - sealed:
                self.system.unlink(self.directory / f"{name}.bin")
            for entry in entries:
                if entry.state == WRITING and entry.segment not in chosen:
                    self.system.unlink(self.directory / entry.name)
        self._require_space(sum(missing), len(missing))
        chosen.update(zip(self._unused_names(len(missing)), missing, strict=True))
        return {name: self._allocated(self.directory / f"{name}.bin", size) for name, size in sorted(chosen.items())}

    def _exchange(self, sizes: Sequence[int]) -> None:
        """Use segments of these sizes: those of the same size that are there, and new ones in place of the others."""
        entries = self._slot.entries()
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        here = self._segments | self._left_behind(sealed, frozenset(sizes))
        left = dict(sorted(here.items(), key=lambda one: (one[0] not in sealed, one[0])))
        chosen: dict[str, _Segment] = {}
        missing: list[int] = []
        for size in sizes:
            same = next((name for name, segment in left.items() if segment.nbytes == size), None)
            if same is None:
                missing.append(size)
            else:
                chosen[same] = left.pop(same)
        gone = [name for name in left if name not in sealed and name not in self._writing]
        given_up = [left[name].nbytes for name in gone]
        left.clear()
        self._require_room(sum(missing) - sum(given_up))
        for name in gone:
            del self._segments[name]  # the last reference to its memory, unless somebody still reads it
        with failing_as(f"give up segments in {self.directory}"):
            for entry in entries:
                if entry.segment in gone:
                    self.system.unlink(self.directory / entry.name)
            for name in gone:
                self.system.unlink(self.directory / f"{name}.bin")
        try:
            self._segments = chosen | self._new(missing)
        except StoreFailure:
            self._segments |= self._new(given_up)
            raise

    def _left_behind(self, sealed: Collection[str], sizes: Collection[int]) -> dict[str, _Segment]:
        """Segments of these sizes with snapshots of an earlier process, which had others than this one has yet."""
        paths = {name: self.directory / f"{name}.bin" for name in sealed if name not in self._segments}
        found = {path: path.stat().st_size for path in paths.values() if path.exists()}
        return {
            name: _Segment(path, map_file(self.system, path, found[path]))
            for name, path in paths.items()
            if found.get(path) in sizes
        }

    def _new(self, sizes: Sequence[int]) -> dict[str, _Segment]:
        """New segments: all or none of them."""
        names, made = self._unused_names(len(sizes)), dict[str, _Segment]()
        try:
            for name, size in zip(names, sizes, strict=True):
                made[name] = self._allocated(self.directory / f"{name}.bin", size)
        except StoreFailure:
            made.clear()
            for name in names:
                (self.directory / f"{name}.bin").unlink(missing_ok=True)
            raise
        return made

    def _unused_names(self, count: int) -> list[str]:
        taken = {path.stem for path in self.directory.glob("segment-*.bin")} | self._writing.keys()
        taken |= {entry.segment for entry in self._slot.entries()}
        return list(islice((name for at in itertools.count() if (name := f"segment-{at:03d}") not in taken), count))

    def _require_room(self, nbytes: int) -> None:
        if said := self._too_small(nbytes):
            raise NoRoom(
                f"{said}, but snapshots now need {nbytes / 1e9:.3f} GB more: enlarge the tmpfs (mount -o"
                " remount,size=...), or keep fewer replicas"
            )

    def _require_space(self, nbytes: int, count: int) -> None:
        if said := self._too_small(nbytes):
            raise UsageError(
                f"{said}, but the {count} new segments need {nbytes / 1e9:.3f} GB: enlarge the tmpfs (mount -o"
                " remount,size=...), keep fewer replicas, or use another memory dir"
            )

    def _too_small(self, nbytes: int) -> str:
        """How much the memory dir has free, if that is less; else nothing."""
        found = os.statvfs(self.directory)
        free_bytes = found.f_bavail * found.f_frsize
        if not found.f_blocks or nbytes <= free_bytes:
            return ""
        return f"memory dir {self.directory.parent.parent} has {free_bytes / 1e9:.3f} GB free"

    def _allocated(self, path: Path, nbytes: int) -> _Segment:
        with failing_as(f"allocate {nbytes} bytes for {path}"):
            with opened(self.system, path, os.O_RDWR | os.O_CREAT) as descriptor:
                self.system.allocate(descriptor, nbytes)
            return _Segment(path, map_file(self.system, path, nbytes))


class MemoryWriter(SnapshotWriter):
    """Writes one segment in place; checksums are computed when the snapshot is sealed, from the copied bytes."""

    def __init__(
        self, store: MemoryStore, snapshot: SnapshotId, layout: Layout, segment: _Segment, lock: FileLock
    ) -> None:
        super().__init__(snapshot, layout, segment.path.name)
        self._store, self._target, self._lock = store, segment, lock
        self._target.lent.clear()
        self._entry = SlotEntry(segment.path.stem, snapshot, WRITING)

    def buffer(self, key: str) -> memoryview:
        """As `ports.MappedWriter.buffer`."""
        field, offset = self._claim(key)
        self._missing.remove(key)
        return self._lend(offset, field.nbytes)

    def whole(self) -> memoryview:
        """As `ports.MappedWriter.whole`."""
        self._require_open()
        self._missing.clear()
        return self._lend(0, self._layout.nbytes)

    def _lend(self, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(bytearray())
        lent = np.frombuffer(self._target.memory, np.uint8, nbytes, offset)
        self._target.lent.append(weakref.ref(lent))
        return memoryview(lent)

    def _keep(self, field: Field, offset: int, data: memoryview) -> None:
        if data:
            self._store.system.copy(memoryview(self._target.memory)[offset : offset + field.nbytes], data)

    def _checksums(self) -> tuple[str, ...]:
        if self._target.is_lent:
            raise UsageError(
                f"{self._snapshot}: a buffer of it is still referred to, so its bytes could change after they are"
                " sealed: delete the tensors and views that were made from it"
            )
        view = memoryview(self._target.memory)
        places = zip(self._layout.fields, self._layout.offsets, strict=True)
        return tuple(checksum(view[offset : offset + field.nbytes]) for field, offset in places)

    def _commit(self, manifest: bytes) -> None:
        system, directory = self._store.system, self._store.directory
        sealed = directory / SlotEntry(self._entry.segment, self._snapshot, SEALED).name
        with failing_as(f"seal the {self._snapshot} in {directory}"):
            write_synced(system, directory / self._entry.name, manifest)
            system.rename(directory / self._entry.name, sealed)
            sync_directory(system, directory)
        self._end()

    def _discard(self) -> None:
        with suppress(OSError):
            self._store.system.unlink(self._store.directory / self._entry.name)
        self._end()

    def _end(self) -> None:
        self._lock.release()
        self._store.end_writing(self._target.path)
