"""The steps of one round of replication on one rank: announce, answer, move, move again what was damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..ports import PeerLost, Transfer, Transport
from .messages import (
    AFTER,
    BEFORE,
    HEADER_BYTES,
    Garbled,
    Header,
    Piece,
    Word,
    decode_header,
    decode_table,
    decode_words,
    encode_header,
    encode_table,
)
from .replicas import Arrival, Exchange, Inbox, Offer

if TYPE_CHECKING:
    from typing_extensions import Buffer

_GOOD = (Word.HELD, Word.SEALED)
_MEANING = {
    Word.REFUSED: "it refused",
    Word.DAMAGED: "it arrived damaged twice",
    Word.FAILED: "it could not store it",
}


class Outgoing:
    """A peer's words about the offers that were made to it."""

    def __init__(self, offers: Sequence[Offer] | None) -> None:
        self.offers = list(offers or ())
        self.words: list[Word] = []

    def due(self) -> list[int]:
        """Which offers it waits for."""
        return [at for at, word in enumerate(self.words) if word in (Word.WANTED, Word.DAMAGED)]


@dataclass
class Coming:
    """A piece that an owner offers, and where it is received if it is wanted."""

    piece: Piece
    word: Word = Word.REFUSED
    arrival: Arrival | None = None
    transfer: Transfer | None = None

    def abandon(self) -> None:
        """Give up what is open."""
        self.transfer = None
        if self.arrival is not None:
            self.arrival.abandon()
            self.arrival = None


class Incoming:
    """What an owner offers."""

    def __init__(self) -> None:
        self.items: list[Coming] = []

    def due(self) -> list[Coming]:
        """What is to be received."""
        return [item for item in self.items if item.arrival is not None]


class Round:
    """The state of one exchange. Its steps come in the same order on all ranks, so that messages between two ranks,
    whatever they are to each other, are received in the order in which they are sent."""

    def __init__(self, transport: Transport, iteration: int, inbox: Inbox) -> None:
        self._transport, self._iteration, self._inbox = transport, iteration, inbox
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self._under_way: list[Transfer] = []
        self._failures: list[str] = []
        self._sent_bytes = self._received_bytes = 0

    def announce(self, offered: Sequence[Piece] | None) -> None:
        """Owners say what they have."""
        table = encode_table(offered or ())
        header = encode_header(self._iteration, None if offered is None else len(offered), table)
        found = self._swap(dict.fromkeys(self.outgoing, header), dict.fromkeys(self.incoming, HEADER_BYTES))
        headers = {owner: self._checked(owner, data) for owner, data in found.items()}
        sizes = {owner: header.table_bytes for owner, header in headers.items()}
        for owner, data in self._swap(dict.fromkeys(self.outgoing, table), sizes).items():
            try:
                pieces = decode_table(headers[owner], data)
            except Garbled as error:
                raise self._nonsense(owner, error) from None
            self.incoming[owner].items = [Coming(piece) for piece in pieces]

    def answer(self) -> None:
        """Keepers say what they want."""
        words = {}
        for owner, incoming in self.incoming.items():
            for item in incoming.items:
                item.word = self._word(owner, item)
            words[owner] = bytes(item.word for item in incoming.items)
        answers = self._swap(words, {peer: len(outgoing.offers) for peer, outgoing in self.outgoing.items()})
        for peer, data in answers.items():
            self.outgoing[peer].words = list(self._decoded(peer, data, BEFORE))

    def move(self) -> None:
        """Raw bytes of what is wanted go to keepers, which verify, seal and acknowledge; the second time what arrived
        damaged."""
        due = {peer: outgoing.due() for peer, outgoing in self.outgoing.items()}
        for owner, incoming in self.incoming.items():
            for item in incoming.due():
                if item.arrival is not None:
                    item.transfer = self._transport.receive(owner, item.arrival.buffer)
        for peer, wanted in due.items():
            for at in wanted:
                self._send(peer, self.outgoing[peer].offers[at].raw)
                self._sent_bytes += self.outgoing[peer].offers[at].raw.nbytes
        receipts = {peer: bytearray(len(wanted)) for peer, wanted in due.items()}
        for peer, receipt in receipts.items():
            self._receive(peer, receipt)
        for owner, incoming in self.incoming.items():
            self._send(owner, bytes([self._taken(owner, item) for item in incoming.due()]))
        self._finish()
        for peer, receipt in receipts.items():
            for at, word in zip(due[peer], self._decoded(peer, receipt, AFTER), strict=True):
                self.outgoing[peer].words[at] = word

    def outcome(self, has_offers: bool) -> Exchange:
        """The result of the round."""
        for peer, outgoing in self.outgoing.items():
            for offer, word in zip(outgoing.offers, outgoing.words, strict=True):
                if word not in _GOOD:
                    self._failures.append(
                        f"rank {peer} did not keep {offer.name} of iteration {self._iteration} for rank"
                        f" {self._transport.rank}: {_MEANING[word]}"
                    )
        acknowledged = {
            peer: has_offers and all(word in _GOOD for word in outgoing.words)
            for peer, outgoing in self.outgoing.items()
        }
        items = [(owner, item) for owner, incoming in self.incoming.items() for item in incoming.items]
        kept = tuple((owner, item.piece.name) for owner, item in items if item.word in _GOOD)
        return Exchange(
            self._iteration, acknowledged, kept, self._sent_bytes, self._received_bytes, tuple(self._failures)
        )

    def give_up(self) -> None:
        """Let go of all memory; nothing that is open is kept. Transfers go first: what they refer to is reused."""
        self._under_way.clear()
        items = [item for incoming in self.incoming.values() for item in incoming.items]
        for item in items:
            item.transfer = None
        for item in items:
            item.abandon()
        for outgoing in self.outgoing.values():
            outgoing.offers.clear()

    def _word(self, owner: int, item: Coming) -> Word:
        """What to answer to an offer."""
        try:
            if self._inbox.holds(owner, item.piece.manifest):
                return Word.HELD
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return Word.REFUSED
        return Word.WANTED if self._begin(owner, item) else Word.REFUSED

    def _begin(self, owner: int, item: Coming) -> bool:
        """Make room for a piece."""
        try:
            item.arrival = self._inbox.begin(owner, item.piece.manifest)
        except MoECheckpointError as error:
            self._refuse(owner, item.piece, str(error))
            return False
        if item.arrival is None:
            self._refuse(owner, item.piece, "there is no room")
            return False
        if item.arrival.buffer.nbytes != item.piece.raw_bytes:
            expected_bytes = item.arrival.buffer.nbytes
            item.abandon()
            self._refuse(owner, item.piece, f"{item.piece.raw_bytes} bytes, but its manifest needs {expected_bytes}")
            return False
        return True

    def _refuse(self, owner: int, piece: Piece, why: str) -> None:
        self._failures.append(
            f"rank {self._transport.rank} does not keep {piece.name} of iteration {self._iteration} for rank {owner}:"
            f" {why}"
        )

    def _taken(self, owner: int, item: Coming) -> Word:
        """Wait for a piece, verify and seal it; after damage make room for the second try, of which there is one."""
        assert item.transfer is not None and item.arrival is not None
        item.transfer.wait()
        item.transfer = None
        self._received_bytes += item.piece.raw_bytes
        is_second = item.word == Word.DAMAGED
        try:
            item.arrival.seal()
            item.arrival, item.word = None, Word.SEALED
        except UnreadableCheckpoint as error:
            item.abandon()
            item.word = Word.DAMAGED
            if is_second:
                self._refuse(owner, item.piece, f"it arrived damaged twice: {error}")
            elif not self._begin(owner, item):
                item.word = Word.FAILED
        except MoECheckpointError as error:
            item.abandon()
            item.word = Word.FAILED
            self._refuse(owner, item.piece, str(error))
        return item.word

    def _checked(self, owner: int, data: Buffer) -> Header:
        """The header of an owner in the same round."""
        try:
            header = decode_header(data)
        except Garbled as error:
            raise self._nonsense(owner, error) from None
        if header.iteration != self._iteration:
            raise PeerLost(
                f"rank {owner} replicates iteration {header.iteration}, but rank {self._transport.rank} is at iteration"
                f" {self._iteration}: the ranks lost step and must agree on the next round"
            )
        return header

    def _decoded(self, peer: int, data: Buffer, allowed: frozenset[Word]) -> tuple[Word, ...]:
        try:
            return decode_words(bytes(data), allowed)
        except Garbled as error:
            raise self._nonsense(peer, error) from None

    def _nonsense(self, other: int, error: Garbled) -> PeerLost:
        return PeerLost(
            f"rank {other} and rank {self._transport.rank} do not understand each other about iteration"
            f" {self._iteration}: {error}"
        )

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
        """Wait for all small messages and for all that is sent."""
        for at in range(len(self._under_way)):
            self._under_way[at].wait()
        self._under_way.clear()
