"""Where snapshots of other ranks arrive: straight into the memory store, sealed only when every checksum is right."""

from __future__ import annotations

from ..errors import UnreadableCheckpoint, UsageError
from ..ports import Clock, Manifest, MappedStore, MappedWriter, NoRoom, Reader
from ..storage.host_buffer import HostBuffer
from ..store.manifest import decode

PATIENCE_S = 10.0
PAUSE_S = 0.005


class StoreReplica:
    """A snapshot on its way into a memory store."""

    def __init__(self, store: MappedStore, writer: MappedWriter, manifest: Manifest) -> None:
        self._store, self._writer, self._manifest = store, writer, manifest
        self.buffer = writer.whole()

    def seal(self) -> None:
        """Verify all bytes against the owner's checksums and commit. Raises UnreadableCheckpoint, StoreFailure."""
        self.buffer = memoryview(b"")
        self._writer.seal(self._manifest.facts, self._manifest.checksums)

    def abandon(self) -> None:
        """Give up what was not sealed."""
        self.buffer = memoryview(b"")
        self._writer.abandon()

    def reader(self) -> Reader:
        """A reader of what was sealed."""
        return self._store.open(self._manifest.snapshot)


class HostReplica:
    """A snapshot on its way into ordinary memory, for one recovery."""

    def __init__(self, owner: int, manifest: Manifest) -> None:
        self.buffer = memoryview(bytearray(manifest.layout.nbytes))
        self._reader = HostBuffer(manifest, f"{manifest.snapshot} as rank {owner} sent it", self.buffer)

    def seal(self) -> None:
        """Verify all bytes. Raises UnreadableCheckpoint."""
        damaged = self._reader.verify()
        if damaged:
            raise UnreadableCheckpoint(f"{self._reader.manifest.snapshot}: {damaged[0].key} arrived damaged")

    def abandon(self) -> None:
        """Give up."""
        self._reader.close()

    def reader(self) -> Reader:
        """A reader of what arrived."""
        return self._reader


class ReplicaReceiver:
    """Takes snapshots of other ranks into a memory store."""

    def __init__(self, store: MappedStore, clock: Clock) -> None:
        self._store, self._clock = store, clock

    def holds(self, owner: int, manifest: bytes) -> bool:
        """Whether exactly this snapshot is sealed here already; one that differs under its name is given up."""
        wanted = decode(manifest, f"manifest from rank {owner}")
        try:
            with self._store.open(wanted.snapshot) as reader:
                mine = reader.manifest
                same = (mine.facts, mine.layout, mine.checksums) == (wanted.facts, wanted.layout, wanted.checksums)
                if same and not reader.verify():
                    return True
        except UnreadableCheckpoint:
            pass  # none, or one whose manifest is damaged
        self._store.free(wanted.snapshot)
        return False

    def begin(self, owner: int, manifest: bytes) -> StoreReplica | None:
        """A place for the snapshot; None when none becomes free within PATIENCE_S.

        An owner that has heard that older replicas are not needed may be a moment ahead of the rank that keeps them.
        Raises UnreadableCheckpoint, StoreFailure.
        """
        wanted = decode(manifest, f"manifest from rank {owner}")
        if wanted.snapshot.rank != owner:
            raise UnreadableCheckpoint(f"rank {owner} sent the {wanted.snapshot}, which is not its own")
        until_s = self._clock.now_s() + PATIENCE_S
        while True:
            try:
                return StoreReplica(self._store, self._store.reserve(wanted.snapshot, wanted.layout), wanted)
            except NoRoom:
                if self._clock.now_s() >= until_s:
                    return None
                self._clock.sleep(PAUSE_S)

    def land(self, source: int, manifest: bytes) -> StoreReplica | HostReplica:
        """A place for a snapshot that a recovery fetches from `source`, in the store if there is room, or the heap.

        Segments are too small as long as the strategy does not know how large its snapshots are. A copy of it that is
        here already has proved damaged and is given up.
        Raises UnreadableCheckpoint, StoreFailure.
        """
        wanted = decode(manifest, f"manifest from rank {source}")
        self._store.free(wanted.snapshot)
        try:
            return StoreReplica(self._store, self._store.reserve(wanted.snapshot, wanted.layout), wanted)
        except (NoRoom, UsageError):
            return HostReplica(source, wanted)
