"""Gives sealed snapshots of this rank to its peers and keeps those of its owners, verified before acknowledged.

One exchange has four steps, which come in the same order on all ranks:

    announce   owners send their peers a header, and a table of the pieces that they offer
    answer     peers reply about each piece: it is wanted, held already, or refused
    move       what is wanted goes from memory to memory; peers verify, seal and acknowledge it
    move       once more, with what arrived damaged

Bytes that a peer holds anyway are not sent (MOETION 5.1): it compares the checksums in the manifest with those of its
own snapshot of the iteration, copies what is the same, as data-parallel ranks hold it without the distributed
optimizer, and wants the rest. Every replica is whole where it lies.

In place of the bytes of a piece an owner may offer the step that led to it (`recomputation`). A peer that has the state
before it wants that, takes the same step, and verifies what comes of it against the owner's checksums like any bytes
that arrive: what differs counts as damaged, and is sent whole.

Two ranks may be owner and peer of each other. The transport keeps the order of messages between two ranks, so they
need no names: each step receives and sends for all pairs, and ends only when all of it is through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import MoECheckpointError, PeerLost, UnreadableCheckpoint, UsageError
from ..ports import (
    Pace,
    SendPace,
    Transfer,
    Transport,
)
from .messages import (
    AFTER,
    ANSWER_BYTES,
    HEADER_BYTES,
    RANGE_BYTES,
    Garbled,
    Header,
    Ranges,
    ReplicaPiece,
    Reply,
    decode_answers,
    decode_header,
    decode_ranges,
    decode_replies,
    decode_table,
    encode_answers,
    encode_header,
    encode_table,
)
from .receiver import ReplicaReceiver, StoreReplica

if TYPE_CHECKING:
    from typing_extensions import Buffer

SEND_CHUNK_BYTES = 1 << 20
"""Of a message where sends have a pace."""

_TO_SEND = (Reply.WANTED, Reply.DAMAGED, Reply.FOLLOWS, Reply.PARTLY)
_KEPT = (Reply.HELD, Reply.SEALED)
_MEANING = {
    Reply.REFUSED: "it refused",
    Reply.DAMAGED: "it arrived damaged twice",
    Reply.FAILED: "it could not store it",
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A sealed piece of this rank: its name, its manifest as it is stored, and the raw bytes of its segment.

    step: what a peer makes it from that has the state before, as `recomputation.encode` gives it; empty for none.
    """

    name: str
    manifest: bytes = field(repr=False)
    raw: memoryview = field(repr=False)
    step: memoryview = field(default_factory=lambda: memoryview(b""), repr=False)


@dataclass(frozen=True)
class Exchange:
    """What one exchange achieved on this rank.

    acknowledged: for each peer whether it now holds all pieces offered, verified and sealed; False when there was
    nothing to give. kept: owner and name of the pieces held here for others. sent_bytes, received_bytes: of pieces and
    steps, those sent again included. failures: a sentence for each piece that was not kept, here or by a peer.
    carried_bytes: of the pieces that sent ones and steps amount to. not_followed: a sentence for each piece that went
    whole though its step was offered.
    """

    iteration: int
    acknowledged: Mapping[int, bool]
    kept: tuple[tuple[int, str], ...]
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    carried_bytes: int = 0
    not_followed: tuple[str, ...] = ()


@dataclass
class _IncomingPiece:
    """A piece that an owner offers, and where it is received if it is wanted."""

    piece: ReplicaPiece
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
            for start, end in _chunks(0, self.piece.step_bytes, chunk_bytes):
                self.transfers.append(transport.receive(owner, memoryview(self.step)[start:end]))
            return self.piece.step_bytes
        if self.reply is Reply.PARTLY:
            ranges = self.ranges
        for first, last in ranges:
            for start, end in _chunks(first, last, chunk_bytes):
                self.transfers.append(transport.receive(owner, self.replica.buffer[start:end]))
        return _count(ranges)

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


class ReplicationRound:
    """The state of one exchange; see the module. No frame keeps an offer in a variable: its traceback would pin it."""

    def __init__(
        self,
        transport: Transport,
        iteration: int,
        receiver: ReplicaReceiver,
        offers: Sequence[Offer] | None,
        peers: Sequence[int],
        owners: Sequence[int],
        sends: SendPace | None = None,
    ) -> None:
        self._transport, self._iteration, self._receiver, self._sends = transport, iteration, receiver, sends
        self._has_offers, self._offers = offers is not None, list(offers or ())
        self._replies: dict[int, list[Reply]] = {peer: [] for peer in peers}  # one for each offer
        self._ranges: dict[int, list[Ranges]] = {}  # wanted of each offer, of those that are wanted partly
        self._incoming: dict[int, list[_IncomingPiece]] = {owner: [] for owner in owners}
        self._under_way: list[Transfer] = []
        self._failures: list[str] = []
        self._sent_bytes = self._received_bytes = self._carried_bytes = 0
        self._not_followed: list[str] = []

    def announce(self) -> None:
        """Owners send what they have."""
        table = encode_table(
            [ReplicaPiece(one.name, one.manifest, one.raw.nbytes, one.step.nbytes) for one in self._offers]
        )
        header = encode_header(self._iteration, len(self._offers) if self._has_offers else None, table)
        found = self._swap(dict.fromkeys(self._replies, header), dict.fromkeys(self._incoming, HEADER_BYTES))
        headers = {owner: self._header(owner, data) for owner, data in found.items()}
        sizes = {owner: header.table_bytes for owner, header in headers.items()}
        for owner, data in self._swap(dict.fromkeys(self._replies, table), sizes).items():
            with self._understanding(owner):
                self._incoming[owner] = [_IncomingPiece(piece) for piece in decode_table(headers[owner], data)]

    def answer(self) -> None:
        """Peers reply what they want; space is taken before, so that what is wanted can be received at once."""
        for owner, items in self._incoming.items():
            for item in items:
                item.reply = self._first_reply(owner, item)
        answers = {
            owner: encode_answers([(item.reply, item.ranges) for item in items])
            for owner, items in self._incoming.items()
        }
        rows = {owner: rows for owner, (rows, _) in answers.items()}
        counts: dict[int, list[int]] = {}
        for peer, data in self._swap(rows, dict.fromkeys(self._replies, ANSWER_BYTES * len(self._offers))).items():
            with self._understanding(peer):
                self._replies[peer], counts[peer] = decode_answers(data)
            self._note_unfollowed(peer, Reply.WANTED, "it does not have the state before")
        ranges = {owner: ranges for owner, (_, ranges) in answers.items() if ranges}
        sizes = {peer: RANGE_BYTES * sum(found) for peer, found in counts.items() if any(found)}
        for peer, data in self._swap(ranges, sizes).items():
            with self._understanding(peer):
                nbytes = [offer.raw.nbytes for offer in self._offers]
                self._ranges[peer] = decode_ranges(data, counts[peer], nbytes)

    def move(self) -> None:
        """Raw bytes of what is wanted go to peers, which verify, seal and acknowledge; the second time what arrived
        damaged."""
        due = {
            peer: [at for at, reply in enumerate(replies) if reply in _TO_SEND]
            for peer, replies in self._replies.items()
        }
        coming = {
            owner: [item for item in items if item.replica is not None] for owner, items in self._incoming.items()
        }
        # All receives are posted before the first wait, and sends do not wait: no order of ranks can deadlock.
        chunk_bytes = SEND_CHUNK_BYTES if self._sends is not None else None
        for owner, items in coming.items():
            for item in items:
                self._received_bytes += item.receive(self._transport, owner, chunk_bytes)
        total_bytes = sum(self._due_bytes(peer, at) for peer, wanted in due.items() for at in wanted)
        pace = self._sends.begin(total_bytes) if self._sends is not None else None
        for peer, wanted in due.items():
            for at in wanted:
                self._give(peer, at, pace)
        receipts = {peer: bytearray(len(wanted)) for peer, wanted in due.items()}
        for peer, receipt in receipts.items():
            self._receive(peer, receipt)
        for owner, items in coming.items():
            self._send(owner, bytes([self._taken(owner, item) for item in items]))
        self._finish()
        for peer, receipt in receipts.items():
            followed = [at for at in due[peer] if self._replies[peer][at] is Reply.FOLLOWS]
            with self._understanding(peer):
                for at, reply in zip(due[peer], decode_replies(receipt, AFTER), strict=True):
                    self._replies[peer][at] = reply
            self._note_unfollowed(peer, Reply.DAMAGED, "the step led to other bits there", followed)

    def outcome(self) -> Exchange:
        """The result of the round."""
        for peer, replies in self._replies.items():
            self._failures += [
                f"rank {peer} did not keep {offer.name} of iteration {self._iteration} for rank"
                f" {self._transport.rank}: {_MEANING[reply]}"
                for offer, reply in zip(self._offers, replies, strict=True)
                if reply not in _KEPT
            ]
        acknowledged = {
            peer: self._has_offers and all(reply in _KEPT for reply in replies)
            for peer, replies in self._replies.items()
        }
        kept = [
            (owner, item.piece.name) for owner, items in self._incoming.items() for item in items if item.reply in _KEPT
        ]
        return Exchange(
            self._iteration,
            acknowledged,
            tuple(kept),
            self._sent_bytes,
            self._received_bytes,
            tuple(self._failures),
            self._carried_bytes,
            tuple(self._not_followed),
        )

    def give_up(self) -> None:
        """Let go of all memory; nothing that is open is kept."""
        self._under_way.clear()
        items = [item for items in self._incoming.values() for item in items]
        # Transfers go first, of all pieces: gloo may still write to a buffer whose replica was abandoned and reused.
        for item in items:
            item.transfers.clear()
        for item in items:
            item.abandon()
        self._offers.clear()

    def _give(self, peer: int, at: int, pace: Pace | None) -> None:
        """Send a piece, or its step, as the peer replied."""
        reply, nbytes = self._replies[peer][at], self._offers[at].raw.nbytes
        self._carried_bytes += nbytes if reply is not Reply.DAMAGED else 0
        for first, last in self._due(peer, at):
            for start, end in _chunks(first, last, SEND_CHUNK_BYTES if pace is not None else None):
                if pace is not None:
                    pace.take(end - start)
                self._send(peer, (self._offers[at].step if reply is Reply.FOLLOWS else self._offers[at].raw)[start:end])
                if pace is not None:
                    self._under_way[-1].wait()
                    pace.moved(end - start)
        self._sent_bytes += self._due_bytes(peer, at)

    def _due(self, peer: int, at: int) -> Ranges:
        """What of a piece, or of its step, goes to a peer."""
        reply = self._replies[peer][at]
        if reply is Reply.FOLLOWS:
            return ((0, self._offers[at].step.nbytes),)
        if reply is Reply.PARTLY:  # without any range all of it is there
            return self._ranges[peer][at] if peer in self._ranges else ()
        return ((0, self._offers[at].raw.nbytes),)

    def _due_bytes(self, peer: int, at: int) -> int:
        return _count(self._due(peer, at))

    def _first_reply(self, owner: int, item: _IncomingPiece) -> Reply:
        try:
            if self._receiver.holds(owner, item.piece.manifest):
                return Reply.HELD
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return Reply.REFUSED
        if not self._begin(owner, item):
            return Reply.REFUSED
        cheapest, reply = item.piece.raw_bytes, Reply.WANTED
        lacking = self._receiver.lacking(owner, item.piece.manifest)
        if lacking is not None and _count(lacking) < cheapest:
            cheapest, reply, item.ranges = _count(lacking), Reply.PARTLY, lacking
        can_follow = item.piece.step_bytes and self._receiver.can_follow(owner, item.piece.manifest)
        if can_follow and item.piece.step_bytes < cheapest:
            reply, item.ranges = Reply.FOLLOWS, ()
        return reply

    def _begin(self, owner: int, item: _IncomingPiece) -> bool:
        """Take space for a piece; False, and a failure noted, where that cannot be."""
        try:
            item.replica = self._receiver.begin(owner, item.piece.manifest)
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

    def _taken(self, owner: int, item: _IncomingPiece) -> Reply:
        """Wait for a piece, verify and seal it; after damage take space for the second try, of which there is one."""
        assert item.replica is not None
        item.arrived()
        is_second = item.reply == Reply.DAMAGED
        try:
            if item.reply is Reply.FOLLOWS:
                item.replica.follow(item.step)
                item.step = bytearray()
            elif item.reply is Reply.PARTLY:
                self._receiver.join(item.replica, item.piece.manifest)
            item.replica.seal()
            item.replica, item.reply = None, Reply.SEALED
        except UnreadableCheckpoint as error:
            item.abandon()
            item.reply = Reply.DAMAGED
            if is_second:
                self._refuse(owner, item.piece, f"it arrived damaged twice: {error}")
            elif not self._begin(owner, item):
                item.reply = Reply.FAILED
        except MoECheckpointError as error:
            item.abandon()
            item.reply = Reply.FAILED
            self._refuse(owner, item.piece, str(error))
        return item.reply

    def _note_unfollowed(self, peer: int, reply: Reply, why: str, among: Sequence[int] | None = None) -> None:
        """A sentence for the pieces that go whole to this peer, which has so replied, though a step was offered."""
        for at in range(len(self._offers)) if among is None else among:
            if self._offers[at].step.nbytes and self._replies[peer][at] is reply:
                self._not_followed.append(f"{self._offers[at].name} goes whole to rank {peer}: {why}")

    def _refuse(self, owner: int, piece: ReplicaPiece, why: str) -> None:
        self._failures.append(
            f"rank {self._transport.rank} does not keep {piece.name} of iteration {self._iteration} for rank {owner}:"
            f" {why}"
        )

    def _header(self, owner: int, data: Buffer) -> Header:
        """The header of an owner in the same round."""
        with self._understanding(owner):
            header = decode_header(data)
        if header.iteration != self._iteration:
            raise PeerLost(
                f"rank {owner} replicates iteration {header.iteration}, but rank {self._transport.rank} is at iteration"
                f" {self._iteration}: the ranks lost step and must agree on the next round"
            )
        return header

    @contextmanager
    def _understanding(self, other: int) -> Iterator[None]:
        """Turns Garbled into PeerLost: with a rank that speaks otherwise, nothing can be agreed upon any more."""
        try:
            yield
        except Garbled as error:
            raise PeerLost(
                f"rank {other} and rank {self._transport.rank} do not understand each other about iteration"
                f" {self._iteration}: {error}"
            ) from None

    def _swap(self, send: Mapping[int, bytes], receive: Mapping[int, int]) -> dict[int, bytes]:
        """Small messages to and from all pairs at once; `receive` has their sizes."""
        found = {other: bytearray(nbytes) for other, nbytes in receive.items()}
        for other, into in found.items():
            self._receive(other, into)
        for other, data in send.items():
            self._send(other, data)
        self._finish()
        return {other: bytes(data) for other, data in found.items()}

    def _send(self, to: int, data: Buffer) -> None:
        self._under_way.append(self._transport.send(to, data))

    def _receive(self, source: int, into: bytearray) -> None:
        self._under_way.append(self._transport.receive(source, memoryview(into)))

    def _finish(self) -> None:
        """Wait for all small messages and for all that is sent; no variable may refer to a transfer that failed."""
        for at in range(len(self._under_way)):
            self._under_way[at].wait()
        self._under_way.clear()


def _count(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def _chunks(start: int, end: int, chunk_bytes: int | None) -> Ranges:
    """A range in messages, of which both sides know the same sizes."""
    if chunk_bytes is None:
        return ((start, end),)
    return tuple((at, min(at + chunk_bytes, end)) for at in range(start, end, chunk_bytes))


class Replicator:
    """Exchanges replicas along fixed pairs: `peers` keep those of this rank, `owners` are those whose it keeps.

    If B is a peer of A, A must be an owner of B (policy.placement gives both). Any graph will do.

    sends: the pace of what this rank sends, in chunks then; all ranks have one, or none has. None: as fast as it goes.
    """

    def __init__(
        self, transport: Transport, peers: Sequence[int], owners: Sequence[int], sends: SendPace | None = None
    ) -> None:
        self._sends = sends
        for name, ranks in (("peers", peers), ("owners", owners)):
            others = set(ranks) & set(range(transport.world_size)) - {transport.rank}
            if len(others) < len(ranks):
                raise UsageError(
                    f"{name} {list(ranks)} of rank {transport.rank}: must be different other ranks of a world of"
                    f" {transport.world_size}"
                )
        self._transport, self._peers, self._owners = transport, tuple(peers), tuple(owners)

    @property
    def moving_s(self) -> float | None:
        """Seconds that sends have taken so far, without the pauses of their pace; None where they have none."""
        return None if self._sends is None else self._sends.moving_s

    def exchange(self, iteration: int, offers: Sequence[Offer] | None, receiver: ReplicaReceiver) -> Exchange:
        """One round: every rank calls it for the same iterations in the same order, None for having nothing to give.

        Blocks until all pairs of this rank are through; raw bytes go straight from and to the given memory. A piece
        that arrives damaged is sent once more. Raises PeerLost when a rank is lost, silent for the transport's timeout
        (which also limits how long a peer may be busy receiving and sealing its replicas), or in another round. After
        an exception nothing that was received in this round is kept unless it was sealed already, nothing here refers
        to the memory of offers and replicas, and the transport must be renewed.
        """
        round_ = ReplicationRound(self._transport, iteration, receiver, offers, self._peers, self._owners, self._sends)
        del offers  # a kept traceback must not pin snapshots
        try:
            round_.announce()
            round_.answer()
            round_.move()
            round_.move()
            return round_.outcome()
        except BaseException:
            round_.give_up()
            raise
