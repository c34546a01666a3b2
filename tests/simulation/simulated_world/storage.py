"""Stores of simulated ranks, over bytes that outlive them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from itertools import count

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import NoRoom, StoreFailure
from megatron.core.dist_checkpointing.moe.storage.base import SnapshotReader, SnapshotWriter
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum, decode
from megatron.core.dist_checkpointing.moe.types.layout import (
    Field,
    Layout,
    Listing,
    Manifest,
    Record,
    SnapshotId,
    Torn,
    aligned,
    suffice,
)

from .memory import Memory, Segment
from .world import World


class FakeStore:
    """A `ports.Store` in a Memory: with `segment_bytes` as MemoryStore, without as FilesystemStore, shared by slots.

    With segments it is the only store of its Memory, and takes it over when the one before was closed or its rank
    killed. world, rank: whose events its calls are; without a world it works for any thread. fails: called with the
    number of the operation on this store (from 1) and its name, such as "seal"; StoreFailure where it is true.
    bytes_per_s: how fast bytes are put or sealed, in virtual time.

    Raises UsageError as MemoryStore does.
    """

    def __init__(
        self,
        memory: Memory,
        slot: int,
        segment_bytes: Sequence[int] | None = None,
        *,
        world: World | None = None,
        rank: int | None = None,
        fails: Callable[[int, str], bool] | None = None,
        bytes_per_s: float = float("inf"),
    ) -> None:
        self.memory, self.slot = memory, slot
        self._rank = slot if rank is None else rank
        self._world, self._fails, self._bytes_per_s = world, fails, bytes_per_s
        self._life = world.life_of(self._rank) if world else 0
        self._operations = count(1)
        self._writing: set[str] = set()
        self._unlimited = segment_bytes is None
        self._own: tuple[str, ...] = ()
        if segment_bytes is not None:
            if not segment_bytes or min(segment_bytes) < 1:
                raise UsageError(f"segments of {list(segment_bytes)} bytes: at least one is needed, none may be empty")
            self._adopt(sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes))

    @property
    def is_alive(self) -> bool:
        """Whether the process that uses it was not killed since."""
        world = self._world
        return world is None or (world.life_of(self._rank) == self._life and not world.is_dead(self._rank))

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments that are used in turn."""
        return sum(len(self.memory.segments[name].data) for name in self._own)

    def resize(self, segment_bytes: Sequence[int]) -> None:
        """As `ports.MappedStore.resize`; memory has no end here."""
        self.operation("resize", f"{len(segment_bytes)} segments")
        sizes = sorted(aligned(size, mmap.PAGESIZE) for size in segment_bytes)
        with self.memory.mutex:
            if suffice([len(self.memory.segments[name].data) for name in self._own], sizes):
                return
            # Also what an earlier process left: its snapshots take the room that they took there.
            here = {*self._own, *(name for name, segment in self.memory.segments.items() if segment.manifest)}
            left = sorted(here, key=lambda name: (not self.memory.segments[name].manifest, name))
            chosen: list[str] = []
            for size in sizes:
                same = next((name for name in left if len(self.memory.segments[name].data) == size), None)
                if same is not None:
                    left.remove(same)
                chosen.append(same or self._new_segment(size).name)
            self._own = tuple(sorted(chosen))
            for name in left:
                if not self.memory.segments[name].manifest and name not in self._writing:
                    del self.memory.segments[name]

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> FakeWriter:
        """As `ports.Store.reserve`."""
        self.operation("reserve", f"the {snapshot}")
        with self.memory.mutex:
            written = [one for one in self.memory.segments.values() if one.snapshot == snapshot]
            if any(one.name in self._writing for one in written):
                raise UsageError(f"the {snapshot} is being written already")
            if any(one.manifest for one in written):
                raise UsageError(f"the {snapshot} is sealed already: free it before it is written again")
            segment = self._free_segment(layout.nbytes)
            for torn in written:
                if torn.writer == self.slot:
                    self._clear(torn)
            self._writing.add(segment.name)
            segment.snapshot, segment.manifest, segment.writer, segment.held = snapshot, b"", self.slot, []
        return FakeWriter(self, snapshot, layout, segment)

    def snapshots(self, rank: int | None = None) -> Listing:
        """As `ports.Store.snapshots`."""
        self.operation("list", "snapshots")
        sealed, torn = [], []
        with self.memory.mutex:
            for segment in self.memory.segments.values():
                if segment.snapshot is None or segment.name in self._writing:
                    continue
                if rank not in (None, segment.snapshot.rank):
                    continue
                try:
                    self._manifest(segment)
                    sealed.append(segment.snapshot)
                except UnreadableCheckpoint as error:
                    torn.append(Torn(segment.snapshot, segment.name, str(error)))
        return Listing(tuple(sorted(sealed)), tuple(sorted(torn, key=lambda one: (one.snapshot, one.path))))

    def open(self, snapshot: SnapshotId) -> FakeReader:
        """As `ports.Store.open`."""
        self.event(f"open the {snapshot}")
        with self.memory.mutex:
            segment = self.memory.sealed(snapshot)
            if segment is None:
                raise UnreadableCheckpoint(f"the {snapshot} is not sealed here")
            return FakeReader(self, self._manifest(segment), segment)

    def free(self, snapshot: SnapshotId) -> None:
        """As `ports.Store.free`."""
        self.operation("free", f"the {snapshot}")
        with self.memory.mutex:
            for segment in list(self.memory.segments.values()):
                mine = segment.writer == self.slot and segment.name not in self._writing
                if segment.snapshot == snapshot and (segment.manifest or mine):
                    self._clear(segment)

    def ranks(self) -> frozenset[int]:
        """As `ports.Store.ranks`."""
        return frozenset(one.rank for one in self.snapshots().sealed)

    def sweep(self) -> None:
        """As `ports.Store.sweep`."""
        self.operation("sweep", "what is torn")
        with self.memory.mutex:
            for segment in list(self.memory.segments.values()):
                torn = segment.snapshot and not segment.manifest and segment.writer == self.slot
                if torn and segment.name not in self._writing:
                    self._clear(segment)

    def close(self) -> None:
        """As `ports.Store.close`."""
        self.event("close the store")
        if self.memory.owner is self:
            self.memory.owner = None

    def event(self, text: str) -> None:
        """For writers and readers: a call of this store begins."""
        if self._world is not None:
            self._world.event(text)

    def operation(self, name: str, what: str, nbytes: int = 0) -> None:
        """For writers too: an event that takes time and may fail. Raises StoreFailure where `fails` says so."""
        self.event(f"{name} {what}")
        if self._world is not None and nbytes and self._bytes_per_s < float("inf"):
            self._world.sleep(nbytes / self._bytes_per_s)
        number = next(self._operations)
        if self._fails is not None and self._fails(number, name):
            raise StoreFailure(f"operation {number} of the store of slot {self.slot}, {name} {what}, failed as asked")

    def end_writing(self, segment: Segment) -> None:
        """For writers: the segment is not written any more."""
        with self.memory.mutex:
            self._writing.discard(segment.name)
            if not segment.manifest:
                self._clear(segment)

    def _adopt(self, sizes: Sequence[int]) -> None:
        """Take over the segments that are there, delete those that nobody needs, and add the rest."""
        memory = self.memory
        if memory.owner is not None and memory.owner.is_alive:
            raise UsageError(f"the memory of slot {self.slot} is in use by another store: close that one first")
        if memory.owner is not None:
            for segment in memory.segments.values():
                segment.held.clear()  # what a killed process referred to
        memory.owner = self
        chosen: list[str] = []
        left = sorted(memory.segments.values(), key=lambda one: (not one.manifest, one.name))
        for size in sizes:
            same = [one.name for one in left if len(one.data) == size and one.name not in chosen]
            chosen.append(same[0] if same else self._new_segment(size).name)
        for segment in list(memory.segments.values()):
            if segment.name not in chosen and not segment.manifest:
                del memory.segments[segment.name]
        self._own = tuple(sorted(chosen))

    def _new_segment(self, nbytes: int) -> Segment:
        name = next(self.memory.names)
        self.memory.segments[name] = Segment(name, bytearray(nbytes))
        return self.memory.segments[name]

    def _free_segment(self, nbytes: int) -> Segment:
        """The smallest free segment that is large enough, those without a torn snapshot first."""
        if self._unlimited:
            return self._new_segment(nbytes)
        own = [self.memory.segments[name] for name in self._own]
        fitting = [one for one in own if len(one.data) >= nbytes]
        if not fitting:
            largest = max(len(one.data) for one in own)
            raise UsageError(f"a snapshot of {nbytes} bytes does not fit in segments of at most {largest}")
        for one in sorted(fitting, key=lambda one: (len(one.data), one.snapshot is not None, one.name)):
            if not one.manifest and one.name not in self._writing and not one.is_held:
                return one
        raise NoRoom(
            f"the memory of slot {self.slot}: all {len(fitting)} segments of at least {nbytes} bytes are in use,"
            f" {sum(bool(one.manifest) for one in fitting)} of them by sealed snapshots: free one, or wait until its"
            " readers have ended"
        )

    def _clear(self, segment: Segment) -> None:
        segment.clear()
        if segment.name not in self._own:
            self.memory.segments.pop(segment.name, None)

    def _manifest(self, segment: Segment) -> Manifest:
        """The verified manifest of what is in the segment. Raises UnreadableCheckpoint."""
        if not segment.manifest:
            raise UnreadableCheckpoint(f"{segment.name}: the {segment.snapshot} was never sealed")
        return decode(segment.manifest, f"{segment.name} of slot {segment.writer}")


class FakeWriter(SnapshotWriter):
    """A `ports.MappedWriter`; each record is put in two halves, between which its rank can be killed."""

    def __init__(self, store: FakeStore, snapshot: SnapshotId, layout: Layout, segment: Segment) -> None:
        super().__init__(snapshot, layout, segment.name)
        self._store, self._target = store, segment

    def buffer(self, key: str) -> memoryview:
        """As `ports.MappedWriter.buffer`."""
        self._store.event(f"lend the buffer of {key}")
        field, offset = self._claim(key)
        self._missing.remove(key)
        return self._target.lend(offset, field.nbytes)

    def whole(self) -> memoryview:
        """As `ports.MappedWriter.whole`."""
        self._store.event(f"lend all buffers of the {self._snapshot}")
        self._require_open()
        self._missing.clear()
        return self._target.lend(0, self._layout.nbytes)

    def _keep(self, field: Field, offset: int, data: memoryview) -> None:
        half = len(data) // 2
        self._store.operation("put", field.key, len(data))
        self._target.data[offset : offset + half] = data[:half]
        self._store.event(f"put the second half of {field.key}")
        self._target.data[offset + half : offset + len(data)] = data[half:]

    def _checksums(self) -> tuple[str, ...]:
        if self._target.is_held:
            raise UsageError(
                f"{self._snapshot}: a buffer of it is still referred to, so its bytes could change after they are"
                " sealed: delete the tensors and views that were made from it"
            )
        self._store.event(f"hash the {self._snapshot}")
        view = memoryview(self._target.data)
        places = zip(self._layout.fields, self._layout.offsets, strict=True)
        return tuple(checksum(view[offset : offset + field.nbytes]) for field, offset in places)

    def _commit(self, manifest: bytes) -> None:
        self._store.operation("seal", f"the {self._snapshot}", self._layout.nbytes)
        self._target.manifest = manifest
        try:
            self._store.operation("sync", f"the {self._snapshot}")
        finally:
            self._store.end_writing(self._target)

    def _discard(self) -> None:
        self._store.event(f"abandon the {self._snapshot}")
        self._store.end_writing(self._target)


class FakeReader(SnapshotReader):
    """A `ports.MappedReader`; what it reads are views of the segment itself, which stays held."""

    def __init__(self, store: FakeStore, manifest: Manifest, segment: Segment) -> None:
        super().__init__(manifest, f"{segment.name} of slot {segment.writer}")
        self._store = store
        self._view = segment.lend(0, manifest.layout.nbytes).toreadonly()

    def raw(self) -> memoryview:
        """As `ports.MappedReader.raw`."""
        self._store.event(f"read the whole {self.manifest.snapshot}")
        self._require_open()
        return self._view[:]

    def _bytes(self, record: Record) -> memoryview:
        self._store.event(f"read {record.key} of the {self.manifest.snapshot}")
        return self._view[record.offset : record.offset + record.nbytes]

    def _let_go(self) -> None:
        self._store.event(f"release the {self.manifest.snapshot}")
        self._view = memoryview(b"")
