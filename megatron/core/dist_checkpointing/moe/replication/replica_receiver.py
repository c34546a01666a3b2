"""Where snapshots of other ranks arrive: straight into the memory store, sealed only when every checksum is right."""

from __future__ import annotations

from ..errors import UnreadableCheckpoint
from ..ports import Clock, Manifest, MappedStore, MappedWriter, NoRoom, Reader
from ..storage.manifest import decode

PATIENCE_S = 10.0
PAUSE_S = 0.005


class StoreReplica:
    """A snapshot that is being received into a memory store."""

    def __init__(self, store: MappedStore, writer: MappedWriter, manifest: Manifest) -> None:
        self._store, self._writer, self._manifest = store, writer, manifest
        self.buffer = writer.whole()

    def seal(self) -> None:
        """Verify all bytes against the owner's checksums and commit. Raises UnreadableCheckpoint, StoreFailure."""
        self.buffer = memoryview(b"")  # the store seals only what nothing refers to any more
        self._writer.seal(self._manifest.facts, self._manifest.checksums)

    def abandon(self) -> None:
        """Give up what was not sealed."""
        self.buffer = memoryview(b"")
        self._writer.abandon()

    def reader(self) -> Reader:
        """A reader of what was sealed."""
        return self._store.open(self._manifest.snapshot)


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
                is_held = same and not reader.verify()
        except UnreadableCheckpoint:
            is_held = False  # there is none, or one whose manifest is damaged
        if not is_held:
            self._store.free(wanted.snapshot)  # else the store would refuse the name for the one to come
        return is_held

    def begin(self, owner: int, manifest: bytes) -> StoreReplica | None:
        """Space for the snapshot; None when none becomes free within PATIENCE_S.

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
                # An owner that knows that older replicas are not needed may be a moment ahead of the rank that frees
                # them.
                if self._clock.now_s() >= until_s:
                    return None
                self._clock.sleep(PAUSE_S)
