"""Where a rank keeps snapshots of others: what it holds of them already, and room for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from ..ports import (
    Clock,
    Manifest,
    MappedReader,
    MappedStore,
    MappedWriter,
    NoRoom,
    Reader,
    Record,
    SnapshotId,
    Transfer,
    Transport,
)
from ..storage.manifest import decode
from ..storage.system import OperatingSystem
from .messages import Ranges, ReplicaPiece, Reply

ALIGNMENT_BYTES = 64
"""Gaps between records are smaller; they are sent along."""
PAUSE_S = 0.005
_SYSTEM = OperatingSystem()


class Room:
    """How long a rank waits for room in its memory, in one exchange.

    Room is free once all ranks know how the exchange before ended, as the message of the next iteration tells them.
    That takes as long as an iteration does: nothing but the patience of the owners limits it.

    Args:
        clock: Tells for how long room was waited for.
        patience_s: Seconds of all waits together; less than owners wait for an answer.
        is_stopped: Whether training has ended here, so that no further message comes.
    """

    def __init__(self, clock: Clock, patience_s: float, is_stopped: Callable[[], bool]) -> None:
        self._clock, self._patience_s, self._is_stopped = clock, patience_s, is_stopped
        self._until_s: float | None = None

    def may_come(self) -> bool:
        """After a moment: whether it makes sense to look again."""
        if self._until_s is None:
            self._until_s = self._clock.now_s() + self._patience_s
        if self._is_stopped() or self._clock.now_s() >= self._until_s:
            return False
        self._clock.sleep(PAUSE_S)
        return True


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
                # Not by assignment, which would keep the GIL from training for as long as the record takes.
                into = self.buffer[wanted.offset : wanted.offset + wanted.nbytes]
                _SYSTEM.copy(into, raw[held.offset : held.offset + held.nbytes])

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

    Args:
        store: In memory.
        room: Waits for room in it.
        job: In which they must have been made, else this node would list them in vain after a fault; empty for any.
        rank: Whose own snapshots are in the store; None: nobody's.
        follow: Makes a snapshot of a step, where peers send any.
    """

    def __init__(
        self,
        store: MappedStore,
        room: Room,
        job: str = "",
        rank: int | None = None,
        follow: Follow | None = None,
    ) -> None:
        self._store, self._room, self._job, self._rank, self._follow = store, room, job, rank, follow

    def manifest(self, owner: int, data: bytes) -> Manifest:
        """The manifest of a snapshot, as its owner sent it.

        Args:
            owner: The rank that sent it.
            data: The encoded manifest.

        Raises:
            UnreadableCheckpoint: It cannot be read, or is of a snapshot of another rank.
        """
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
                # All bytes are read once more: memory may have changed since, and a replica counts only if it is whole.
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
        """Give a replica what this rank's own snapshot has of it.

        Args:
            replica: Which was received without that.
            wanted: The manifest of the replica; `lacking` has said that this rank's own snapshot has a part of it.

        Raises:
            UnreadableCheckpoint: The own snapshot is gone or damaged.
        """
        own = self._own(wanted)
        assert own is not None
        replica.join(own)

    def _own(self, wanted: Manifest) -> SnapshotId | None:
        return None if self._rank is None else replace(wanted.snapshot, rank=self._rank)

    def begin(self, wanted: Manifest) -> StoreReplica | None:
        """Space for the snapshot; None when none becomes free in time. Raises StoreFailure."""
        while True:
            try:
                return StoreReplica(
                    self._store, self._store.reserve(wanted.snapshot, wanted.layout), wanted, self._follow
                )
            except NoRoom:
                if not self._room.may_come():
                    return None


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


# What owners offer a rank in one exchange: what of it is wanted, where it is received, and whether it is kept.

KEPT = (Reply.HELD, Reply.SEALED)
"""Replies of a peer that has a piece, whole and verified."""


@dataclass
class IncomingPiece:
    """A piece that an owner offers, its manifest once it was read, and where it is received if it is wanted."""

    piece: ReplicaPiece
    manifest: Manifest | None = None
    reply: Reply = Reply.REFUSED
    replica: StoreReplica | None = None
    transfers: list[Transfer] = field(default_factory=list)
    step: bytearray = field(default_factory=bytearray)
    ranges: Ranges = ()

    def receive(self, transport: Transport, owner: int, chunk_bytes: int | None) -> int:
        """Begin to receive what the reply asked for: the piece, ranges of it, or the step that it is made from.

        Args:
            transport: To the owner.
            owner: The rank that sends it.
            chunk_bytes: The most that a message has; None: each range is one message.

        Returns:
            How many bytes come.
        """
        assert self.replica is not None
        # Also after damage, whatever was asked for at first: then the piece comes whole.
        ranges: Ranges = ((0, self.piece.raw_bytes),)
        if self.reply is Reply.FOLLOWS:
            self.step = bytearray(self.piece.step_bytes)
            for start, end in chunks(0, self.piece.step_bytes, chunk_bytes):
                self.transfers.append(transport.receive(owner, memoryview(self.step)[start:end]))
            return self.piece.step_bytes
        if self.reply is Reply.PARTLY:
            ranges = self.ranges
        for first, last in ranges:
            for start, end in chunks(first, last, chunk_bytes):
                self.transfers.append(transport.receive(owner, self.replica.buffer[start:end]))
        return count(ranges)

    def arrived(self) -> None:
        """Wait until all of that is there."""
        # In no variable: in the traceback of an error it would keep the memory of the replica exported.
        while self.transfers:
            self.transfers[0].wait()
            del self.transfers[0]

    def abandon(self) -> None:
        """Give up what is open."""
        # First: a transfer that is dropped ends what still writes to the memory of the replica.
        self.transfers.clear()
        self.step = bytearray()
        if self.replica is not None:
            self.replica.abandon()
            self.replica = None


class IncomingReplicas:
    """The side of an exchange that receives; the steps come in the order of its methods.

    failures: a sentence for each piece that is not kept here.
    """

    def __init__(self, rank: int, iteration: int, receiver: ReplicaReceiver, owners: Sequence[int]) -> None:
        self._rank, self._iteration, self._receiver = rank, iteration, receiver
        self._items: dict[int, list[IncomingPiece]] = {owner: [] for owner in owners}
        self.failures: list[str] = []

    @property
    def owners(self) -> Sequence[int]:
        """Whose replicas this rank keeps."""
        return tuple(self._items)

    def offered(self, owner: int, pieces: Sequence[ReplicaPiece]) -> None:
        """Note what an owner has.

        Args:
            owner: The rank.
            pieces: As its table lists them.
        """
        self._items[owner] = [IncomingPiece(piece) for piece in pieces]

    def answers(self) -> dict[int, list[tuple[Reply, Ranges]]]:
        """By owner, what is wanted of each piece. Space is taken for it, so that it can be received at once."""
        for owner, items in self._items.items():
            for item in items:
                item.reply = self._first_reply(owner, item)
        return {owner: [(item.reply, item.ranges) for item in items] for owner, items in self._items.items()}

    def receive(self, transport: Transport, chunk_bytes: int | None) -> int:
        """Begin to receive all that is wanted.

        Args:
            transport: To the owners.
            chunk_bytes: The most that a message has; None: each range is one message.

        Returns:
            How many bytes come.
        """
        return sum(
            item.receive(transport, owner, chunk_bytes)
            for owner, items in self._items.items()
            for item in items
            if item.replica is not None
        )

    def taken(self, owner: int) -> list[Reply]:
        """Wait for what is under way from an owner, verify and seal it: how each of these pieces has come."""
        return [self._taken(owner, item) for item in self._items[owner] if item.replica is not None]

    def kept(self) -> tuple[tuple[int, str], ...]:
        """Owner and name of all that is here."""
        return tuple(
            (owner, item.piece.name) for owner, items in self._items.items() for item in items if item.reply in KEPT
        )

    def give_up(self) -> None:
        """Release all memory; nothing that is open is kept."""
        items = [item for items in self._items.values() for item in items]
        # Transfers go first, of all pieces: gloo may still write to a buffer whose replica was abandoned and reused.
        for item in items:
            item.transfers.clear()
        for item in items:
            item.abandon()

    def _first_reply(self, owner: int, item: IncomingPiece) -> Reply:
        try:
            wanted = item.manifest = self._receiver.manifest(owner, item.piece.manifest)
            if self._receiver.holds(wanted):
                return Reply.HELD
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return Reply.REFUSED
        if not self._begin(owner, item, wanted):
            return Reply.REFUSED
        # The way with the fewest bytes; of ways with as many bytes the plainest.
        cheapest, reply = item.piece.raw_bytes, Reply.WANTED
        lacking = self._receiver.lacking(wanted)
        if lacking is not None and count(lacking) < cheapest:
            cheapest, reply, item.ranges = count(lacking), Reply.PARTLY, lacking
        can_follow = item.piece.step_bytes and self._receiver.can_follow(wanted)
        if can_follow and item.piece.step_bytes < cheapest:
            reply, item.ranges = Reply.FOLLOWS, ()
        return reply

    def _begin(self, owner: int, item: IncomingPiece, wanted: Manifest) -> bool:
        """Take space for a piece; False, and a failure noted, where that cannot be."""
        try:
            item.replica = self._receiver.begin(wanted)
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return False
        if item.replica is None:
            self._refuse(owner, item.piece, "there is no room")
            return False
        expected_bytes = item.replica.buffer.nbytes
        if expected_bytes != item.piece.raw_bytes:
            item.abandon()
            self._refuse(owner, item.piece, f"{item.piece.raw_bytes} bytes, but its manifest needs {expected_bytes}")
            return False
        return True

    def _taken(self, owner: int, item: IncomingPiece) -> Reply:
        """Wait for a piece, verify and seal it; after damage take space for the second try, of which there is one."""
        assert item.replica is not None and item.manifest is not None
        item.arrived()
        # Nobody has changed the reply since the first try.
        is_second = item.reply == Reply.DAMAGED
        try:
            if item.reply is Reply.FOLLOWS:
                item.replica.follow(item.step)
                item.step = bytearray()
            elif item.reply is Reply.PARTLY:
                self._receiver.join(item.replica, item.manifest)
            item.replica.seal()
            item.replica, item.reply = None, Reply.SEALED
        except UnreadableCheckpoint as error:
            # After an error a writer can only be abandoned: the second try gets one of its own.
            item.abandon()
            item.reply = Reply.DAMAGED
            if is_second:
                self._refuse(owner, item.piece, f"it arrived damaged twice: {error}")
            elif not self._begin(owner, item, item.manifest):
                item.reply = Reply.FAILED
        except MoECheckpointError as error:
            item.abandon()
            item.reply = Reply.FAILED
            self._refuse(owner, item.piece, str(error))
        return item.reply

    def _refuse(self, owner: int, piece: ReplicaPiece, why: str) -> None:
        self.failures.append(
            f"rank {self._rank} does not keep {piece.name} of iteration {self._iteration} for rank {owner}: {why}"
        )


def count(ranges: Ranges) -> int:
    """Bytes of these."""
    return sum(end - start for start, end in ranges)


def chunks(start: int, end: int, chunk_bytes: int | None) -> Ranges:
    """A range in messages, of which both sides know the same sizes.

    Args:
        start: Its first byte.
        end: The byte past its last.
        chunk_bytes: The most that a message has; None: the range is one message.
    """
    if chunk_bytes is None:
        return ((start, end),)
    return tuple((at, min(at + chunk_bytes, end)) for at in range(start, end, chunk_bytes))
