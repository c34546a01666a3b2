"""Where a rank keeps snapshots of others: what it holds of them already, and room for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..errors import UnreadableCheckpoint, UsageError
from ..ports import Clock, Manifest, MappedReader, MappedStore, MappedWriter, NoRoom, Reader, Record, SnapshotId
from ..storage.manifest import decode
from .messages import Ranges

ALIGNMENT_BYTES = 64
"""Gaps between records are smaller; they are sent along."""
PATIENCE_S = 10.0
PAUSE_S = 0.005


Follow = Callable[[bytearray, MappedReader, Manifest, memoryview], None]
"""Makes a snapshot in this memory from a step, the snapshot before it and its manifest."""


class StoreReplica:
    """A snapshot that is being received into a memory store."""

    def __init__(
        self, store: MappedStore, writer: MappedWriter, manifest: Manifest, follow: Follow | None = None
    ) -> None:
        self._store, self._writer, self._manifest, self._follow = store, writer, manifest, follow
        self.buffer = writer.whole()

    def follow(self, step: bytearray) -> None:
        """Make the bytes from the state before and the step. Raises UnreadableCheckpoint."""
        assert self._follow is not None
        base = replace(self._manifest.snapshot, iteration=self._manifest.snapshot.iteration - 1)
        with self._store.open(base) as reader:
            self._follow(step, reader, self._manifest, self.buffer)

    def join(self, own: SnapshotId) -> None:
        """Copy what this rank's own snapshot has of it. Raises UnreadableCheckpoint."""
        with self._store.open(own) as reader:
            raw = reader.raw()
            for wanted, held in _shared(self._manifest, reader.manifest):
                self.buffer[wanted.offset : wanted.offset + wanted.nbytes] = raw[
                    held.offset : held.offset + held.nbytes
                ]

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
    """Takes snapshots of other ranks into a memory store.

    job: in which they must have been made, else this node would list them in vain after a fault; empty for any. rank:
    whose own snapshots are in the store; None: nobody's. follow: makes a snapshot of a step, where peers send any.
    """

    def __init__(
        self,
        store: MappedStore,
        clock: Clock,
        job: str = "",
        rank: int | None = None,
        follow: Follow | None = None,
    ) -> None:
        self._store, self._clock, self._job, self._rank, self._follow = store, clock, job, rank, follow

    def manifest(self, owner: int, data: bytes) -> Manifest:
        """What an owner says of a snapshot of its own. Raises UnreadableCheckpoint."""
        wanted = decode(data, f"manifest from rank {owner}")
        if wanted.snapshot.rank != owner:
            raise UnreadableCheckpoint(f"rank {owner} sent the {wanted.snapshot}, which is not its own")
        return wanted

    def holds(self, wanted: Manifest) -> bool:
        """Whether exactly this snapshot is sealed here already; one that differs under its name is given up.

        Raises UsageError for a snapshot that no recovery would take from here.
        """
        if self._job and wanted.facts.job != self._job:
            raise UsageError(
                f"it belongs to job {wanted.facts.job}, and this rank to job {self._job}: no recovery would take it;"
                " give all ranks one job id (torchrun --rdzv-id)"
            )
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

    def can_follow(self, wanted: Manifest) -> bool:
        """Whether the state one iteration before this snapshot is here, so that it can be made from the step."""
        snapshot = wanted.snapshot
        if self._follow is None:
            return False
        try:
            with self._store.open(replace(snapshot, iteration=snapshot.iteration - 1)):
                return True
        except (UnreadableCheckpoint, UsageError):
            return False

    def lacking(self, wanted: Manifest) -> Ranges | None:
        """What of the snapshot's bytes this rank's own snapshot of that iteration does not have; None where that is
        all of them."""
        own = self._own(wanted)
        if own is None:
            return None
        try:
            with self._store.open(own) as reader:
                held = {record.key for record, _ in _shared(wanted, reader.manifest)}
        except UnreadableCheckpoint:
            return None
        return _ranges(record for record in wanted.records if record.key not in held) if held else None

    def join(self, replica: StoreReplica, wanted: Manifest) -> None:
        """Give a replica what this rank's own snapshot has of it. Raises UnreadableCheckpoint."""
        own = self._own(wanted)
        assert own is not None
        replica.join(own)

    def _own(self, wanted: Manifest) -> SnapshotId | None:
        return None if self._rank is None else replace(wanted.snapshot, rank=self._rank)

    def begin(self, wanted: Manifest) -> StoreReplica | None:
        """Space for the snapshot; None when none becomes free within PATIENCE_S. Raises StoreFailure."""
        until_s = self._clock.now_s() + PATIENCE_S
        while True:
            try:
                return StoreReplica(
                    self._store, self._store.reserve(wanted.snapshot, wanted.layout), wanted, self._follow
                )
            except NoRoom:
                # An owner that knows that older replicas are not needed may be a moment ahead of the rank that frees
                # them.
                if self._clock.now_s() >= until_s:
                    return None
                self._clock.sleep(PAUSE_S)


def _shared(wanted: Manifest, own: Manifest) -> Iterator[tuple[Record, Record]]:
    """Records that two snapshots have alike, to the bit as far as their checksums tell."""
    for record in wanted.records:
        held = own.by_key.get(record.key)
        if held is not None and (held.field, held.xxh3) == (record.field, record.xxh3):
            yield record, held


def _ranges(records: Iterable[Record]) -> Ranges:
    """The bytes of these records, neighbours in one range."""
    found: list[tuple[int, int]] = []
    for record in records:
        if not record.nbytes:
            continue
        start, end = record.offset, record.offset + record.nbytes
        if found and start - found[-1][1] < ALIGNMENT_BYTES:
            start = found.pop()[0]
        found.append((start, end))
    return tuple(found)
