"""Gives sealed snapshots of this rank to its peers and keeps those of its owners, verified before acknowledged.

One exchange has four steps, which come in the same order on all ranks:

    announce   owners send their peers a header, and a table of the pieces that they offer
    answer     peers reply about each piece: it is wanted, held already, or refused
    move       what is wanted goes from memory to memory; peers verify, seal and acknowledge it
    move       once more, with what arrived damaged

In place of the bytes of a piece an owner may offer the step that led to it (`recomputation`). A peer that has the state
before it wants that, takes the same step, and verifies what comes of it against the owner's checksums like any bytes
that arrive: what differs counts as damaged, and is sent whole.

Two ranks may be owner and peer of each other. The transport keeps the order of messages between two ranks, so they
need no names: each step receives and sends for all pairs, and ends only when all of it is through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import MoECheckpointError, PeerLost, UnreadableCheckpoint, UsageError
from ..ports import Clock, Manifest, MappedStore, MappedWriter, NoRoom, Reader, Transfer, Transport
from ..storage.manifest import decode
from . import recomputation
from .messages import (
    AFTER,
    BEFORE,
    HEADER_BYTES,
    Garbled,
    Header,
    ReplicaPiece,
    Reply,
    decode_header,
    decode_replies,
    decode_table,
    encode_header,
    encode_table,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

PATIENCE_S = 10.0
PAUSE_S = 0.005

_TO_SEND = (Reply.WANTED, Reply.DAMAGED, Reply.FOLLOWS)
_KEPT = (Reply.HELD, Reply.SEALED)
_MEANING = {
    Reply.REFUSED: "it refused",
    Reply.DAMAGED: "it arrived damaged twice",
    Reply.FAILED: "it could not store it",
}


class StoreReplica:
    """A snapshot that is being received into a memory store."""

    def __init__(self, store: MappedStore, writer: MappedWriter, manifest: Manifest) -> None:
        self._store, self._writer, self._manifest = store, writer, manifest
        self.buffer = writer.whole()

    def follow(self, step: bytearray) -> None:
        """Make the bytes from the state before and the step. Raises UnreadableCheckpoint."""
        base = replace(self._manifest.snapshot, iteration=self._manifest.snapshot.iteration - 1)
        with self._store.open(base) as reader:
            recomputation.follow(step, reader, self._manifest, self.buffer)

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

    job: in which they must have been made, else this node would list them in vain after a fault; empty for any.
    """

    def __init__(self, store: MappedStore, clock: Clock, job: str = "") -> None:
        self._store, self._clock, self._job = store, clock, job

    def holds(self, owner: int, manifest: bytes) -> bool:
        """Whether exactly this snapshot is sealed here already; one that differs under its name is given up.

        Raises UsageError for a snapshot that no recovery would take from here.
        """
        wanted = decode(manifest, f"manifest from rank {owner}")
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

    def can_follow(self, owner: int, manifest: bytes) -> bool:
        """Whether the state one iteration before this snapshot is here, so that it can be made from the step."""
        wanted = decode(manifest, f"manifest from rank {owner}").snapshot
        try:
            with self._store.open(replace(wanted, iteration=wanted.iteration - 1)):
                return True
        except (UnreadableCheckpoint, UsageError):
            return False

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
    transfer: Transfer | None = None
    step: bytearray = field(default_factory=bytearray)

    def arriving(self) -> memoryview:
        """Where the bytes go that come next: the piece itself, or the step that it is made from."""
        assert self.replica is not None
        if self.reply is not Reply.FOLLOWS:
            return self.replica.buffer
        self.step = bytearray(self.piece.step_bytes)
        return memoryview(self.step)

    def abandon(self) -> None:
        """Give up what is open."""
        self.transfer, self.step = None, bytearray()
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
    ) -> None:
        self._transport, self._iteration, self._receiver = transport, iteration, receiver
        self._has_offers, self._offers = offers is not None, list(offers or ())
        self._replies: dict[int, list[Reply]] = {peer: [] for peer in peers}  # one for each offer
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
        replies = {owner: bytes(item.reply for item in items) for owner, items in self._incoming.items()}
        for peer, data in self._swap(replies, dict.fromkeys(self._replies, len(self._offers))).items():
            with self._understanding(peer):
                self._replies[peer] = decode_replies(data, BEFORE)
            self._note_unfollowed(peer, Reply.WANTED, "it does not have the state before")

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
        for owner, items in coming.items():
            for item in items:
                if item.replica is not None:
                    item.transfer = self._transport.receive(owner, item.arriving())
        for peer, wanted in due.items():
            for at in wanted:
                self._give(peer, at)
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
            item.transfer = None
        for item in items:
            item.abandon()
        self._offers.clear()

    def _give(self, peer: int, at: int) -> None:
        """Send a piece, or its step, as the peer replied."""
        reply, nbytes = self._replies[peer][at], self._offers[at].raw.nbytes
        is_step = reply is Reply.FOLLOWS
        self._send(peer, self._offers[at].step if is_step else self._offers[at].raw)
        self._sent_bytes += self._offers[at].step.nbytes if is_step else nbytes
        self._carried_bytes += nbytes if reply is not Reply.DAMAGED else 0

    def _first_reply(self, owner: int, item: _IncomingPiece) -> Reply:
        try:
            if self._receiver.holds(owner, item.piece.manifest):
                return Reply.HELD
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return Reply.REFUSED
        if not self._begin(owner, item):
            return Reply.REFUSED
        can_follow = item.piece.step_bytes and self._receiver.can_follow(owner, item.piece.manifest)
        return Reply.FOLLOWS if can_follow else Reply.WANTED

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
        assert item.transfer is not None and item.replica is not None
        item.transfer.wait()
        item.transfer = None
        is_second, is_step = item.reply == Reply.DAMAGED, item.reply is Reply.FOLLOWS
        self._received_bytes += item.piece.step_bytes if is_step else item.piece.raw_bytes
        try:
            if is_step:
                item.replica.follow(item.step)
                item.step = bytearray()
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


class Replicator:
    """Exchanges replicas along fixed pairs: `peers` keep those of this rank, `owners` are those whose it keeps.

    If B is a peer of A, A must be an owner of B (policy.placement gives both). Any graph will do.
    """

    def __init__(self, transport: Transport, peers: Sequence[int], owners: Sequence[int]) -> None:
        for name, ranks in (("peers", peers), ("owners", owners)):
            others = set(ranks) & set(range(transport.world_size)) - {transport.rank}
            if len(others) < len(ranks):
                raise UsageError(
                    f"{name} {list(ranks)} of rank {transport.rank}: must be different other ranks of a world of"
                    f" {transport.world_size}"
                )
        self._transport, self._peers, self._owners = transport, tuple(peers), tuple(owners)

    def exchange(self, iteration: int, offers: Sequence[Offer] | None, receiver: ReplicaReceiver) -> Exchange:
        """One round: every rank calls it for the same iterations in the same order, None for having nothing to give.

        Blocks until all pairs of this rank are through; raw bytes go straight from and to the given memory. A piece
        that arrives damaged is sent once more. Raises PeerLost when a rank is lost, silent for the transport's timeout
        (which also limits how long a peer may be busy receiving and sealing its replicas), or in another round. After
        an exception nothing that was received in this round is kept unless it was sealed already, nothing here refers
        to the memory of offers and replicas, and the transport must be renewed.
        """
        round_ = ReplicationRound(self._transport, iteration, receiver, offers, self._peers, self._owners)
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
