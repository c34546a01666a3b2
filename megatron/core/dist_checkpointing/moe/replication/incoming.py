"""What owners offer a rank in one exchange: what of it is wanted, where it is received, and whether it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..ports import Manifest, Transfer, Transport
from .messages import Ranges, ReplicaPiece, Reply
from .receiver import ReplicaReceiver, StoreReplica

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
        """Begin to receive what the reply asked for: the piece, ranges of it, or the step that it is made from; returns
        the bytes. chunk_bytes: of a message at most; None: each range is one."""
        assert self.replica is not None
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
        while self.transfers:
            self.transfers[0].wait()
            del self.transfers[0]

    def abandon(self) -> None:
        """Give up what is open."""
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
        """What an owner has."""
        self._items[owner] = [IncomingPiece(piece) for piece in pieces]

    def answers(self) -> dict[int, list[tuple[Reply, Ranges]]]:
        """By owner, what is wanted of each piece. Space is taken for it, so that it can be received at once."""
        for owner, items in self._items.items():
            for item in items:
                item.reply = self._first_reply(owner, item)
        return {owner: [(item.reply, item.ranges) for item in items] for owner, items in self._items.items()}

    def receive(self, transport: Transport, chunk_bytes: int | None) -> int:
        """Begin to receive all that is wanted, in messages of so many bytes; returns the bytes."""
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
        """Let go of all memory; nothing that is open is kept."""
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
    """A range in messages, of which both sides know the same sizes."""
    if chunk_bytes is None:
        return ((start, end),)
    return tuple((at, min(at + chunk_bytes, end)) for at in range(start, end, chunk_bytes))
