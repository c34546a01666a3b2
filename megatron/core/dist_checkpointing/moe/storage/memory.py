"""Snapshots in host memory that survives the process: preallocated segments on a tmpfs, used in turn."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import NoRoom, StoreFailure, UnreadableCheckpoint, UsageError
from ..types import GRADIENTS, PARKED
from ..types.layout import Field, Layout, Listing, Manifest, SnapshotId, aligned, suffice
from .base import SnapshotWriter
from .manifest import HURRIED_THREADS, MOST_BYTES, checksums
from .ownership import SLOT, Claim, warn_unless_in_memory
from .slot_reader import SEALED, WRITING, MemoryReader, SlotEntry, SlotReader
from .small_files import regular_stat
from .system import (
    FileLock,
    OperatingSystem,
    PrivateSystem,
    failing_as,
    map_file,
    opened,
    running_on,
    sync_directory,
    write_over,
)

log = logging.getLogger(__name__)

_ROOM_BYTES = 1 << 16
_SEGMENT_PER_ROOM = 1 << 12

_KEPT: dict[Path, tuple[int, mmap.mmap]] = {}
"""By the path of a segment, its inode and the mapping that a store of this process left to the next one there."""


def remove_area(folder: Path) -> None:
    """Remove the folder of a store, and the mappings that one of this process left to the next one there."""
    for path in list(_KEPT):
        if path.parent == folder:
            _KEPT.pop(path, None)  # a mapping holds the pages of its file
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class MappedSegment:
    """A preallocated file, mapped once; `lent` are the buffers that a writer has handed out, `read` the locks of those
    who read this mapping, which nobody begins any more once it `goes`."""

    path: Path
    memory: mmap.mmap
    lent: list[weakref.ref[np.ndarray]] = field(default_factory=list)
    read: weakref.WeakSet[FileLock] = field(default_factory=weakref.WeakSet)
    goes: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.memory)

    @property
    def is_lent(self) -> bool:
        """Whether anything still refers to a buffer: an array, a tensor or a view that was made from it."""
        return any(buffer() is not None for buffer in self.lent)


class MemoryWriter(SnapshotWriter):
    """Writes one segment in place; checksums are computed when the snapshot is sealed, from the copied bytes."""

    def __init__(
        self, store: MemoryStore, snapshot: SnapshotId, layout: Layout, segment: MappedSegment, lock: FileLock
    ) -> None:
        super().__init__(snapshot, layout, segment.path.name)
        self._store, self._target, self._lock = store, segment, lock
        self._target.lent.clear()
        self._entry = SlotEntry(segment.path.stem, snapshot, WRITING)

    def buffer(self, key: str) -> memoryview:
        field, offset = self._claim(key)
        self._missing.remove(key)
        return self._lend(offset, field.nbytes)

    def whole(self) -> memoryview:
        self._require_open()
        self._missing.clear()
        return self._lend(0, self._layout.nbytes)

    def _lend(self, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(bytearray())
        lent: np.ndarray = np.frombuffer(self._target.memory, np.uint8, nbytes, offset)
        # An array and not the view of it: every view and tensor made from the view keeps the array, but not the view.
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
        # Nobody waits for others: they are sealed beside training, which needs the cores.
        threads = HURRIED_THREADS if self._snapshot.kind in (PARKED, GRADIENTS) else 1
        return checksums([view[offset : offset + field.nbytes] for field, offset in places], threads)

    def _commit(self, manifest: bytes) -> None:
        system, directory = self._store.system, self._store.directory
        sealed = directory / SlotEntry(self._entry.segment, self._snapshot, SEALED).name
        with failing_as(f"seal the {self._snapshot} in {directory}"):
            # The marker file becomes the manifest: written whole first, then renamed, so that no reader meets a part
            # of it. The lock on the segment is still exclusive: who opens the snapshot now waits for `_end`.
            write_over(system, directory / self._entry.name, manifest)
            system.rename(directory / self._entry.name, sealed)
            # Costs nothing on a tmpfs; in a folder on a disk the new name is durable only from here on.
            sync_directory(directory, system)
        self._end()

    def _discard(self) -> None:
        # Where the marker stays, it is listed as torn, and its segment is used again all the same.
        with suppress(OSError):
            self._store.make_room_of(self._entry)
        self._end()

    def _end(self) -> None:
        # The lock first: a `reserve` in between must not find a segment that nobody writes any more, and is locked.
        self._lock.release()
        self._store.end_writing(self._target.path)


class SegmentUser(Protocol):
    """Who copies to segments, and has to know which are there: a copy engine."""

    def prepare(self, segments: Sequence[memoryview]) -> None:
        """These are there, some of them perhaps for long."""

    def release(self, segments: Sequence[memoryview]) -> None:
        """These are about to be unmapped: nothing may refer to them after that."""


class MemoryStore:
    """The memory tier of one process: `len(segment_bytes)` segments, reused in turn (MoC 5.2's triple buffers).

    All memory is taken at construction, in `<memory_dir>/<job>/<area>-<slot>/`: later no page is allocated and none
    faults for the first time. Manifests have theirs too: a free segment has a file of them beside it, its room, which
    is renamed to the marker, that to the manifest, and that back to the room, so a tmpfs that others fill costs no
    seal. Where a manifest takes more than its room, it keeps that from then on.

    A snapshot takes the smallest free segment that is large enough. A segment is free when no sealed manifest names it,
    and nobody holds a reader of it, a view from a reader, or a buffer from a writer. What a crashed process of the same
    job and slot left is adopted: sealed snapshots are there as before, torn ones are listed and their segments are
    free; sealed ones in segments of other sizes than asked for stay until they are freed. Truncating a segment's file
    while it is mapped kills the process (SIGBUS), as with any mapped file.

    cpus: cores near which the memory is allocated; none: wherever this thread runs. is_foreign: of sealed snapshots
    that are there already, whether their segments stay theirs until they are freed, and are not used for others.

    Raises UsageError when the memory dir is missing, belongs to another job or user, or lets others write; NoRoom when
    it is too small; StoreFailure.
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
        cpus: frozenset[int] = frozenset(),
        is_foreign: Callable[[Manifest], bool] = lambda manifest: False,
    ) -> None:
        if not segment_bytes or min(segment_bytes) < 1:
            raise UsageError(f"segments of {list(segment_bytes)} bytes: at least one is needed, none may be empty")
        self.system, self._cpus = system or PrivateSystem(), cpus
        # Held by whatever changes which segments there are or what is in them. Listing and opening never take it: they
        # must not wait for an allocation, and rely on the locks on files as readers in other processes do.
        self._mutex = threading.Lock()
        self._writing: dict[str, SnapshotId] = {}
        # The names in the folder while `reserve` is called again and again: training's thread reserves the pieces of a
        # snapshot one by one, and would list all of them each time. What else changes names forgets them.
        self._listed: tuple[SlotEntry, ...] | None = None
        self._user: SegmentUser | None = None
        self._claim = Claim(memory_dir, job, slot, area)
        self.directory, self._is_foreign = self._claim.directory, is_foreign
        self._slot = SlotReader(self.directory, self.system, self._writing.__contains__, self._mapped_here)
        try:
            warn_unless_in_memory(memory_dir)
            self._segments = self._prepare(sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes))
        except BaseException:
            self._claim.release()  # else the next attempt of this process would find the folder in use
            raise

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments that are used in turn."""
        return sum(segment.nbytes for segment in self._segments.values())

    def views(self) -> list[memoryview]:
        """The memory of all segments; whoever keeps one of them keeps its pages, also after a `resize`."""
        return [memoryview(segment.memory) for segment in self._segments.values()]

    def lend(self, user: SegmentUser) -> None:
        """From here on this user knows the segments: those that are there, and what a `resize` makes of them."""
        self._user = user
        user.prepare(self.views())

    def resize(self, segment_bytes: Sequence[int]) -> None:
        """As `ports.MappedStore.resize`; a segment that is still read or written counts as long as that lasts."""
        sizes = sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes)
        with self._mutex:
            # Larger segments will do: giving them up would cost an allocation, and perhaps snapshots, for nothing.
            if not suffice([segment.nbytes for segment in self._segments.values()], sizes):
                try:
                    self._exchange(sizes)
                finally:
                    for segment in self._segments.values():  # where that has failed half way, they stay
                        segment.goes = False
                    if self._user is not None:
                        self._user.prepare(self.views())

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> MemoryWriter:
        """As `ports.Store.reserve`."""
        with self._mutex:
            entries, self._listed = self._listed or self._slot.entries(), None
            if snapshot in self._writing.values():
                raise UsageError(f"the {snapshot} is being written already")
            if any(entry.snapshot == snapshot and entry.state == SEALED for entry in entries):
                raise UsageError(f"the {snapshot} is sealed already: free it before it is written again")
            name, lock = self._free_segment(entries, layout.nbytes)
            self._writing[name] = snapshot
            try:
                # Marked while the lock is held: who finds the mark from another process finds the lock too, and so
                # takes the snapshot for one that is being written, not for a torn one.
                self._mark(entries, SlotEntry(name, snapshot, WRITING))
                self._listed = entries  # what it says of segments that are written is not asked for
            except StoreFailure:
                del self._writing[name]
                lock.release()
                raise
        return MemoryWriter(self, snapshot, layout, self._segments[name], lock)

    def snapshots(self, rank: int | None = None) -> Listing:
        return self._slot.snapshots(rank)

    def open(self, snapshot: SnapshotId) -> MemoryReader:
        return self._slot.open(snapshot)

    def _mapped_here(self, name: str, nbytes: int, lock: FileLock) -> memoryview | None:
        """As `SlotReader` asks for it: a device reads the pages of this mapping by itself, as they are locked."""
        if (segment := self._segments.get(name)) is None:
            return None
        segment.read.add(lock)
        if segment.goes:  # asked after that, so that `_unlock` has seen the reader, or is seen here
            return None
        lent: np.ndarray = np.frombuffer(segment.memory, np.uint8, nbytes)
        weakref.finalize(lent, lock.release)  # every view keeps the array, as in `MemoryWriter._lend`
        return memoryview(lent)

    def free(self, snapshot: SnapshotId) -> None:
        with self._mutex, failing_as(f"free the {snapshot} in {self.directory}"):
            self._listed = None
            for entry in self._slot.entries():
                if entry.snapshot == snapshot and entry.segment not in self._writing:
                    # The manifest goes, the bytes stay: a reader's shared lock keeps writers off them until it ends.
                    self.make_room_of(entry)
                    # A segment of a size that is not used any more goes with its snapshot.
                    if entry.segment not in self._segments:
                        self._unlink(entry.segment)

    def ranks(self) -> frozenset[int]:
        return frozenset(one.rank for one in self.snapshots().sealed)

    def sweep(self) -> None:
        with self._mutex, failing_as(f"remove torn snapshots in {self.directory}"):
            self._listed = None
            for entry in self._slot.entries():
                # Only this process writes here, so a mark that no writer of it has is of an attempt that died.
                if entry.state == WRITING and entry.segment not in self._writing:
                    self.make_room_of(entry)

    def close(self, *, keep_mapped: bool = False) -> None:
        """As `ports.Store.close`.

        Args:
            keep_mapped: Whether the memory stays mapped, and page-locked, for the next store of this process there.
        """
        for segment in self._segments.values() if keep_mapped else ():
            with suppress(OSError):
                _KEPT[segment.path] = regular_stat(segment.path).st_ino, segment.memory
        self._claim.release()

    def remove(self) -> None:
        """Give all memory back to the node, sealed snapshots included: at the end of a job."""
        remove_area(self.directory)
        with suppress(OSError):
            self.directory.parent.rmdir()
        self.close()

    def end_writing(self, segment: Path) -> None:
        """For writers: the segment is not written any more."""
        with self._mutex:
            self._writing.pop(segment.stem, None)
            self._listed = None
            sealed = {entry.segment for entry in self._slot.entries() if entry.state == SEALED}
            # A resize during the writing has dropped this segment, and left its file to the writer.
            if segment.stem not in self._segments and segment.stem not in sealed:
                self._unlink(segment.stem)

    def make_room_of(self, entry: SlotEntry) -> None:
        """What said what is in a segment says so no more, and its pages stay for the next manifest. Raises OSError."""
        path = self.directory / entry.name
        if self._is_strange(path):
            self.system.unlink(path)
        else:
            self.system.rename(path, self._room(entry.segment))

    def _is_strange(self, path: Path) -> bool:
        """Whether something else lies there than a file of which a manifest can be made: it is not kept."""
        try:
            length = regular_stat(path).st_size
        except FileNotFoundError:
            return False
        except OSError as error:
            log.error("unusable segment %s replaced: %s", path, error.strerror)
            return True
        return length > MOST_BYTES  # whoever listed it has said so

    def _room(self, segment: str) -> Path:
        return self.directory / f"{segment}.room"

    def _unlink(self, segment: str) -> None:
        _KEPT.pop(self.directory / f"{segment}.bin", None)
        for path in (self.directory / f"{segment}.bin", self._room(segment)):
            with suppress(FileNotFoundError):
                self.system.unlink(path)

    def _mark(self, entries: Sequence[SlotEntry], begun: SlotEntry) -> None:
        """Say in the folder what is being written, instead of what was torn there or of the same snapshot."""
        # First the old marks go, then the new one comes: a crash between them leaves a free segment, never two claims.
        with failing_as(f"reserve a segment in {self.directory}"):
            for entry in entries:
                if entry.state == WRITING and (entry.segment == begun.segment or entry.snapshot == begun.snapshot):
                    self.make_room_of(entry)
            try:
                self.system.rename(self._room(begun.segment), self.directory / begun.name)
            except FileNotFoundError:  # what is here was left by a version that took none
                with opened(self.system, self.directory / begun.name, os.O_WRONLY | os.O_CREAT):
                    pass

    def _free_segment(self, entries: Sequence[SlotEntry], nbytes: int) -> tuple[str, FileLock]:
        """The name of a free segment and the lock on it; segments without a torn snapshot first."""
        fitting = [(segment.nbytes, name) for name, segment in self._segments.items() if segment.nbytes >= nbytes]
        if not fitting:
            largest = max(segment.nbytes for segment in self._segments.values())
            raise UsageError(f"a snapshot of {nbytes} bytes does not fit in segments of at most {largest}")
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        torn = {entry.segment for entry in entries} - sealed
        for _, name in sorted(fitting, key=lambda item: (item[0], item[1] in torn, item[1])):
            # A buffer that outlived its writer could still change the bytes of the next snapshot.
            if name in sealed or name in self._writing or self._segments[name].is_lent:
                continue
            # Not free either while a reader, perhaps of another process, holds it: asked without waiting.
            with failing_as(f"lock {self._segments[name].path}"), suppress(BlockingIOError):
                return name, FileLock(self.system, self._segments[name].path, exclusive=True)
        raise NoRoom(
            f"{self.directory}: all {len(fitting)} segments of at least {nbytes} bytes are in use,"
            f" {sum(name in sealed for _, name in fitting)} of them by sealed snapshots: free one, or wait until its"
            " readers have ended"
        )

    def _prepare(self, sizes: Sequence[int]) -> dict[str, MappedSegment]:
        """Adopt the segments that are there, delete those that nobody needs, and allocate the rest."""
        existing = self._sizes(path.stem for path in sorted(self.directory.glob("segment-*.bin")))
        entries = self._slot.entries()
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        foreign = self._foreign(entries)
        own = {name: nbytes for name, nbytes in existing.items() if name not in foreign}
        chosen, missing = _matched(sizes, own, sealed)
        # What is sealed stays in whatever segment it is: a restart may not cost the snapshots that it needs.
        with failing_as(f"tidy {self.directory}"):
            for name in existing.keys() - chosen.keys() - sealed:
                self.system.unlink(self.directory / f"{name}.bin")
                _KEPT.pop(self.directory / f"{name}.bin", None)
            for entry in entries:
                if entry.state == WRITING and entry.segment not in chosen:
                    self.system.unlink(self.directory / entry.name)
            for path in self.directory.glob("segment-*.room"):
                if path.stem not in chosen:
                    self.system.unlink(path)
        for name in chosen.keys() - {entry.segment for entry in entries}:
            with suppress(NoRoom):  # left by a version that took none: then as there
                self._take_room(name, chosen[name])
        if little := self._too_little(sum(map(_with_room, missing))):
            raise NoRoom(
                f"{little}, but the {len(missing)} new segments need {sum(missing) / 1e9:.3f} GB: enlarge the tmpfs"
                " (mount -o remount,size=...), keep fewer replicas, or use another memory dir"
            )
        adopted = {name: self._allocated(self.directory / f"{name}.bin", size) for name, size in chosen.items()}
        return dict(sorted((adopted | self._new(missing)).items()))

    def _exchange(self, sizes: Sequence[int]) -> None:
        """Use segments of these sizes: those of the same size that are there, and new ones in place of the others."""
        self._listed = None
        entries = self._slot.entries()
        sealed = {entry.segment for entry in entries if entry.state == SEALED}
        here = self._segments | self._left_behind(sealed, frozenset(sizes))
        kept, missing = _matched(sizes, {name: segment.nbytes for name, segment in here.items()}, sealed)
        chosen = {name: here[name] for name in kept}
        gone = {
            name: segment.nbytes
            for name, segment in here.items()
            if name not in kept and name not in sealed and name not in self._writing
        }
        del here  # nothing but `_segments` may refer to what goes: pages return with the last reference to the mapping
        needed = sum(map(_with_room, missing)) - sum(map(_with_room, gone.values()))
        if little := self._too_little(needed):
            raise NoRoom(
                f"{little}, but snapshots now need {needed / 1e9:.3f} GB more: enlarge the tmpfs (mount -o"
                " remount,size=...), or keep fewer replicas"
            )
        self._unlock(self._segments.keys() - chosen.keys())
        for name in gone:
            del self._segments[name]  # the last reference to its memory, unless somebody still reads it
        with failing_as(f"give up segments in {self.directory}"):
            for entry in entries:
                if entry.segment in gone:
                    self.system.unlink(self.directory / entry.name)
            for name in gone:
                self.system.unlink(self.directory / f"{name}.bin")
                self._room(name).unlink(missing_ok=True)
        try:
            self._segments = chosen | self._new(missing)
        except StoreFailure:
            # The memory that was given up is still there to be taken back: as much room as before, if not the same.
            self._segments |= self._new(list(gone.values()))
            raise

    def _unlock(self, names: Collection[str]) -> None:
        """Have the user release segments that are given up; those in use stay locked as long as they are mapped."""
        going = [self._segments[name] for name in names]
        for segment in going:
            segment.goes = True
        if self._user is not None:
            # A device that reads or writes pages as they are unlocked fails for good.
            self._user.release([memoryview(one.memory) for one in going if not (one.is_lent or one.read)])

    def _left_behind(self, sealed: Collection[str], sizes: Collection[int]) -> dict[str, MappedSegment]:
        """Segments of these sizes with snapshots of an earlier process, which had others than this one has yet."""
        others = self._segments.keys() | self._foreign(self._slot.entries())
        found = self._sizes(name for name in sealed if name not in others)
        paths = {name: self.directory / f"{name}.bin" for name, nbytes in found.items() if nbytes in sizes}
        return {name: MappedSegment(path, self._mapped(path, found[name])) for name, path in paths.items()}

    def _sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Of the segments that are there; what else lies under such a name is said and passed by."""
        found = {}
        for name in names:
            path = self.directory / f"{name}.bin"
            try:
                found[name] = regular_stat(path).st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                log.error("skipped %s: %s", path, error.strerror)
        return found

    def _foreign(self, entries: Sequence[SlotEntry]) -> set[str]:
        """Segments with sealed snapshots that are not this job's own."""
        found = set()
        for entry in entries:
            if entry.state == SEALED:
                with suppress(UnreadableCheckpoint):  # freed meanwhile, or damaged: whoever lists it says so
                    if self._is_foreign(self._slot.manifest(entry)):
                        found.add(entry.segment)
        return found

    def _new(self, sizes: Sequence[int]) -> dict[str, MappedSegment]:
        """New segments: all or none of them."""
        names, made = self._unused_names(len(sizes)), dict[str, MappedSegment]()
        try:
            for name, size in zip(names, sizes, strict=True):
                made[name] = self._allocated(self.directory / f"{name}.bin", size)
                self._take_room(name, size)
        except StoreFailure:
            made.clear()  # the mappings first: a file's pages are free when both its name and its mappings are gone
            for name in names:
                self._unlink(name)
            raise
        return made

    def _take_room(self, segment: str, nbytes: int) -> None:
        """Raises NoRoom."""
        path, room = self._room(segment), room_bytes(nbytes)
        if self._is_strange(path):
            self.system.unlink(path)
        with (
            failing_as(f"allocate {room} bytes for {path}"),
            running_on(self._cpus),
            opened(self.system, path, os.O_RDWR | os.O_CREAT) as descriptor,
        ):
            self.system.allocate(descriptor, room)

    def _unused_names(self, count: int) -> list[str]:
        taken = {path.stem for path in self.directory.glob("segment-*.bin")} | self._writing.keys()
        taken |= {entry.segment for entry in self._slot.entries()}
        return list(islice((name for at in itertools.count() if (name := f"segment-{at:03d}") not in taken), count))

    def _too_little(self, nbytes: int) -> str:
        """How much the memory dir has free, if that is less; else nothing."""
        found = os.statvfs(self.directory)
        free_bytes = found.f_bavail * found.f_frsize
        if not found.f_blocks or nbytes <= free_bytes:  # no blocks: a file system without a limit
            return ""
        return f"memory dir {self.directory.parent.parent} has {free_bytes / 1e9:.3f} GB free"

    def _allocated(self, path: Path, nbytes: int) -> MappedSegment:
        # Allocated and mapped with all pages: on a tmpfs that is full later, the first write to a hole is a SIGBUS.
        with failing_as(f"allocate {nbytes} bytes for {path}"), running_on(self._cpus):
            with opened(self.system, path, os.O_RDWR | os.O_CREAT) as descriptor:
                self.system.allocate(descriptor, nbytes)
            return MappedSegment(path, self._mapped(path, nbytes))

    def _mapped(self, path: Path, nbytes: int) -> mmap.mmap:
        number, memory = _KEPT.pop(path, (None, None))
        if memory is not None and len(memory) == nbytes and regular_stat(path).st_ino == number:
            return memory
        return map_file(self.system, path, nbytes)


def room_bytes(segment_bytes: int) -> int:
    """What the manifest of a segment may take before it has taken more: larger segments have more records."""
    return aligned(max(_ROOM_BYTES, segment_bytes // _SEGMENT_PER_ROOM), mmap.PAGESIZE)


def _with_room(segment_bytes: int) -> int:
    return segment_bytes + room_bytes(segment_bytes)


def _matched(
    sizes: Sequence[int], there: Mapping[str, int], sealed: Collection[str]
) -> tuple[dict[str, int], list[int]]:
    """Segments that are there, one for each size, those with sealed snapshots first; and the sizes that are left."""
    left = dict(sorted(there.items(), key=lambda item: (item[0] not in sealed, item[0])))
    chosen: dict[str, int] = {}
    missing: list[int] = []
    for size in sizes:
        name = next((name for name, nbytes in left.items() if nbytes == size), None)
        if name is None:
            missing.append(size)
        else:
            chosen[name] = left.pop(name)
    return chosen, missing
