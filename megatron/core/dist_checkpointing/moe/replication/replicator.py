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

from ..errors import PeerLost, UsageError
from ..ports import Pace, SendPace, Transfer, Transport
from .messages import (
    AFTER,
    ANSWER_BYTES,
    HEADER_BYTES,
    RANGE_BYTES,
    Header,
    MalformedMessage,
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
from .receiver import KEPT, IncomingReplicas, ReplicaReceiver, chunks, count

if TYPE_CHECKING:
    from collections.abc import Buffer


SEND_CHUNK_BYTES = 1 << 20
"""Of a message where sends have a pace."""

_TO_SEND = (Reply.WANTED, Reply.DAMAGED, Reply.FOLLOWS, Reply.PARTLY)
_MEANING = {
    Reply.REFUSED: "it refused",
    Reply.DAMAGED: "it arrived damaged twice",
    Reply.FAILED: "it could not store it",
}


@dataclass(frozen=True, slots=True)
class ReplicaOffer:
    """A sealed piece of this rank.

    Attributes:
        name: Of the piece.
        manifest: As it is stored.
        raw: The bytes of its segment.
        step: From which a peer makes it that has the state before, as `recomputation.encode` gives it; empty for none.
    """

    name: str
    manifest: bytes = field(repr=False)
    raw: memoryview = field(repr=False)
    step: memoryview = field(default_factory=lambda: memoryview(b""), repr=False)


@dataclass(frozen=True)
class Exchange:
    """What one exchange achieved on this rank.

    Attributes:
        iteration: Of the snapshots.
        acknowledged: For each peer whether it now holds all pieces offered, verified and sealed; False when there was
            nothing to give.
        kept: Owner and name of the pieces held here for others.
        sent_bytes: Of pieces and steps, with what was sent again.
        received_bytes: Likewise.
        failures: A sentence for each piece that was not kept, here or by a peer.
        carried_bytes: Of the pieces that sent ones and steps amount to.
        not_followed: A sentence for each piece that went whole though its step was offered.
    """

    iteration: int
    acknowledged: Mapping[int, bool]
    kept: tuple[tuple[int, str], ...]
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    carried_bytes: int = 0
    not_followed: tuple[str, ...] = ()


class ReplicationRound:
    """The state of one exchange, and the side of it that gives.

    No frame keeps an offer in a variable: its traceback would pin it.
    """

    def __init__(
        self,
        transport: Transport,
        iteration: int,
        receiver: ReplicaReceiver,
        offers: Sequence[ReplicaOffer] | None,
        peers: Sequence[int],
        owners: Sequence[int],
        sends: SendPace | None = None,
    ) -> None:
        self._transport, self._iteration, self._sends = transport, iteration, sends
        self._has_offers, self._offers = offers is not None, list(offers or ())
        self._replies: dict[int, list[Reply]] = {peer: [] for peer in peers}  # one for each offer
        self._ranges: dict[int, list[Ranges]] = {}  # wanted of each offer, of those that are wanted partly
        self._incoming = IncomingReplicas(transport.rank, iteration, receiver, owners)
        self._under_way: list[Transfer] = []
        self._sent_bytes = self._received_bytes = self._carried_bytes = 0
        self._not_followed: list[str] = []

    def announce(self) -> None:
        """Owners send what they have."""
        table = encode_table(
            [ReplicaPiece(one.name, one.manifest, one.raw.nbytes, one.step.nbytes) for one in self._offers]
        )
        header = encode_header(self._iteration, len(self._offers) if self._has_offers else None, table)
        # In two messages: whoever receives one has to know its size, and the header says that of the table.
        found = self._swap(dict.fromkeys(self._replies, header), dict.fromkeys(self._incoming.owners, HEADER_BYTES))
        headers = {owner: self._header(owner, data) for owner, data in found.items()}
        sizes = {owner: header.table_bytes for owner, header in headers.items()}
        for owner, data in self._swap(dict.fromkeys(self._replies, table), sizes).items():
            with self._understanding(owner):
                self._incoming.offered(owner, decode_table(headers[owner], data))

    def answer(self) -> None:
        """Peers reply what they want; space is taken before, so that what is wanted can be received at once."""
        answers = {owner: encode_answers(found) for owner, found in self._incoming.answers().items()}
        rows = {owner: rows for owner, (rows, _) in answers.items()}
        counts: dict[int, list[int]] = {}
        for peer, data in self._swap(rows, dict.fromkeys(self._replies, ANSWER_BYTES * len(self._offers))).items():
            with self._understanding(peer):
                self._replies[peer], counts[peer] = decode_answers(data)
            self._note_unfollowed(peer, Reply.WANTED, "it does not have the state before")
        # Only where there are any, which both sides know from the counts.
        ranges = {owner: ranges for owner, (_, ranges) in answers.items() if ranges}
        sizes = {peer: RANGE_BYTES * sum(found) for peer, found in counts.items() if any(found)}
        for peer, data in self._swap(ranges, sizes).items():
            with self._understanding(peer):
                nbytes = [offer.raw.nbytes for offer in self._offers]
                self._ranges[peer] = decode_ranges(data, counts[peer], nbytes)

    def move(self) -> None:
        """Raw bytes of what is wanted go to peers, which verify, seal and acknowledge; the second time what arrived
        damaged."""
        # Fixed here: receipts overwrite the replies below.
        due = {
            peer: [at for at, reply in enumerate(replies) if reply in _TO_SEND]
            for peer, replies in self._replies.items()
        }
        # All receives are posted before the first wait, and sends do not wait: no order of ranks can deadlock.
        chunk_bytes = SEND_CHUNK_BYTES if self._sends is not None else None
        self._received_bytes += self._incoming.receive(self._transport, chunk_bytes)
        total_bytes = sum(self._due_bytes(peer, at) for peer, wanted in due.items() for at in wanted)
        pace = self._sends.begin(total_bytes) if self._sends is not None else None
        for peer, wanted in due.items():
            for at in wanted:
                self._give(peer, at, pace)
        # Messages between two ranks have no names, but keep their order. Both sides put receipts behind the bytes, so
        # that two ranks which keep each other's replicas take neither for the other.
        receipts = {peer: bytearray(len(wanted)) for peer, wanted in due.items()}
        for peer, receipt in receipts.items():
            self._receive(peer, receipt)
        # Waits for the bytes of one owner, verifies and seals them; what this rank sends moves meanwhile.
        for owner in self._incoming.owners:
            self._send(owner, bytes(self._incoming.taken(owner)))
        self._finish()
        for peer, receipt in receipts.items():
            followed = [at for at in due[peer] if self._replies[peer][at] is Reply.FOLLOWS]
            with self._understanding(peer):
                for at, reply in zip(due[peer], decode_replies(receipt, AFTER), strict=True):
                    self._replies[peer][at] = reply
            self._note_unfollowed(peer, Reply.DAMAGED, "the step led to other bits there", followed)

    def outcome(self) -> Exchange:
        """The result of the round."""
        not_kept = (
            f"rank {peer} did not keep {offer.name} of iteration {self._iteration} for rank"
            f" {self._transport.rank}: {_MEANING[reply]}"
            for peer, replies in self._replies.items()
            for offer, reply in zip(self._offers, replies, strict=True)
            if reply not in KEPT
        )
        acknowledged = {
            peer: self._has_offers and all(reply in KEPT for reply in replies)
            for peer, replies in self._replies.items()
        }
        return Exchange(
            self._iteration,
            acknowledged,
            self._incoming.kept(),
            self._sent_bytes,
            self._received_bytes,
            (*self._incoming.failures, *not_kept),
            self._carried_bytes,
            tuple(self._not_followed),
        )

    def give_up(self) -> None:
        """Release all memory; nothing that is open is kept."""
        self._under_way.clear()
        self._incoming.give_up()
        self._offers.clear()

    def _give(self, peer: int, at: int, pace: Pace | None) -> None:
        """Send a piece, or its step, as the peer replied."""
        reply, nbytes = self._replies[peer][at], self._offers[at].raw.nbytes
        self._carried_bytes += nbytes if reply is not Reply.DAMAGED else 0
        for first, last in self._due(peer, at):
            for start, end in chunks(first, last, SEND_CHUNK_BYTES if pace is not None else None):
                if pace is not None:
                    pace.take(end - start)
                self._send(peer, (self._offers[at].step if reply is Reply.FOLLOWS else self._offers[at].raw)[start:end])
                # One chunk under way at a time, so that training's own traffic gets in between.
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
        return count(self._due(peer, at))

    def _note_unfollowed(self, peer: int, reply: Reply, why: str, among: Sequence[int] | None = None) -> None:
        """A sentence for the pieces that go whole to this peer, which has so replied, though a step was offered."""
        for at in range(len(self._offers)) if among is None else among:
            if self._offers[at].step.nbytes and self._replies[peer][at] is reply:
                self._not_followed.append(f"{self._offers[at].name} goes whole to rank {peer}: {why}")

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
        except MalformedMessage as error:
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


class Replicator:
    """Exchanges replicas along fixed pairs: `peers` keep those of this rank, `owners` are those whose it keeps.

    If B is a peer of A, A must be an owner of B (policy.placement gives both). Any graph will do.

    Args:
        transport: Carries the bytes.
        peers: Ranks that keep replicas of this one.
        owners: Ranks whose replicas this one keeps.
        sends: The pace of what this rank sends, in chunks then; all ranks have one, or none has. None: as fast as it
            goes.
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

    def exchange(self, iteration: int, offers: Sequence[ReplicaOffer] | None, receiver: ReplicaReceiver) -> Exchange:
        """One round: every rank calls it for the same iterations in the same order.

        Blocks until all pairs of this rank are through; raw bytes go straight from and to the given memory. A piece
        that arrives damaged is sent once more. After an exception nothing that was received in this round is kept
        unless it was sealed already, nothing here refers to the memory of offers and replicas, and the transport must
        be renewed.

        Args:
            iteration: Of the snapshots.
            offers: The pieces of this rank, of which peers seal the last one last; None: it has nothing to give.
            receiver: Keeps the pieces of this rank's owners.

        Raises:
            PeerLost: A rank is lost, silent for the transport's timeout (which also limits how long a peer may be busy
                receiving and sealing its replicas), or in another round.
        """
        round_ = ReplicationRound(self._transport, iteration, receiver, offers, self._peers, self._owners, self._sends)
        del offers  # a kept traceback must not pin snapshots
        try:
            round_.announce()
            round_.answer()
            round_.move()
            # Also where nothing was damaged here: this rank's peers and owners may have something to send again.
            round_.move()
            return round_.outcome()
        except BaseException:  # also one that was raised in this thread from outside: no memory may stay referred to
            round_.give_up()
            raise
