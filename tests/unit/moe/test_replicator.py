"""The protocol of replication over a transport in memory, for any graph of peers, and how ranks meet again."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from xxhash import xxh3_128_digest

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import NoRoom, PeerLost, StoreFailure
from megatron.core.dist_checkpointing.moe.replication import replicator as exchanges
from megatron.core.dist_checkpointing.moe.replication.agreement import ConnectionEpochs
from megatron.core.dist_checkpointing.moe.replication.messages import (
    HEADER_BYTES,
    MalformedMessage,
    Ranges,
    ReplicaPiece,
    Reply,
    decode_answers,
    decode_header,
    decode_ranges,
    decode_table,
    encode_answers,
    encode_header,
    encode_table,
)
from megatron.core.dist_checkpointing.moe.replication.replicator import Exchange, ReplicaOffer, Replicator

HANG_TIMEOUT_S = 30.0


class Network:
    """Messages in memory: as over a socket without buffers, one is sent only when its receiver has a place for it."""

    def __init__(self, spoil: Callable[[int, int, int, memoryview], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._counts: dict[tuple[int, int], int] = defaultdict(int)
        self.spoil, self._why = spoil, ""

    def post(self, message: Message, pair: tuple[int, int], *, is_sent: bool) -> None:
        with self._changed:
            (self._sent if is_sent else self._awaited)[pair].append(message)
            while self._sent[pair] and self._awaited[pair]:
                source, target = self._sent[pair].popleft(), self._awaited[pair].popleft()
                if source.view.nbytes != target.view.nbytes:
                    self._why = f"{source.view.nbytes} bytes were sent, {target.view.nbytes} expected"
                    break
                target.view[:] = source.view
                self._counts[pair] += 1
                if self.spoil is not None:
                    self.spoil(*pair, self._counts[pair], target.view)
                for one in (source, target):
                    one.is_through = True
            self._changed.notify_all()

    def wait(self, message: Message) -> None:
        with self._changed:
            self._changed.wait_for(lambda: message.is_through or self._why, HANG_TIMEOUT_S)
            message.view = memoryview(b"")
            if not message.is_through:
                raise PeerLost(self._why or "nothing came")

    def lose(self, why: str) -> None:
        with self._changed:
            self._why = why
            self._changed.notify_all()


@dataclass(eq=False)
class Message:
    network: Network
    view: memoryview
    is_through: bool = False

    def wait(self) -> None:
        self.network.wait(self)


class FakeTransport:
    """What a replicator uses of a transport."""

    def __init__(self, network: Network, rank: int, world_size: int) -> None:
        self.network, self.rank, self.world_size = network, rank, world_size

    def send(self, to: int, data: Any) -> Message:
        return self._posted(data, (self.rank, to), is_sent=True)

    def receive(self, source: int, into: memoryview) -> Message:
        return self._posted(into, (source, self.rank), is_sent=False)

    def _posted(self, data: Any, pair: tuple[int, int], *, is_sent: bool) -> Message:
        message = Message(self.network, memoryview(data))
        self.network.post(message, pair, is_sent=is_sent)
        return message


def manifest_of(name: str, raw: bytes) -> bytes:
    return f"{name} {len(raw)} ".encode() + xxh3_128_digest(raw)


@dataclass
class Room:
    """A receiver: seals what matches its manifest. `refuse`, `unstorable`, `full`: pieces it does not take."""

    sealed: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    refuse: frozenset[str] = frozenset()
    unstorable: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    open: list[Slot] = field(default_factory=list)

    def manifest(self, owner: int, data: bytes) -> tuple[int, bytes]:
        return owner, data

    def holds(self, wanted: tuple[int, bytes]) -> bool:
        return wanted in self.sealed

    def lacking(self, wanted: tuple[int, bytes]) -> None:
        return None

    def begin(self, wanted: tuple[int, bytes]) -> Slot | None:
        owner, manifest = wanted
        name, size, _ = manifest.split(b" ", 2)
        if name.decode() in self.refuse:
            raise NoRoom("all segments are in use")
        if name.decode() in self.full:
            return None
        slot = Slot(self, owner, manifest, bytearray(int(size)))
        self.open.append(slot)
        return slot


@dataclass(eq=False)
class Slot:
    room: Room
    owner: int
    manifest: bytes
    data: bytearray

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.data)

    def seal(self) -> None:
        self.data.append(0)  # a BufferError while anything refers to the bytes
        raw = bytes(self.data[:-1])
        name = self.manifest.split(b" ", 1)[0].decode()
        if name in self.room.unstorable:
            raise StoreFailure("the storage refuses")
        if manifest_of(name, raw) != self.manifest:
            raise UnreadableCheckpoint("a record does not match its checksum")
        self.room.sealed[self.owner, self.manifest] = raw
        self.room.open.remove(self)

    def abandon(self) -> None:
        self.data.append(0)
        self.room.open.remove(self)


Peers = Mapping[int, Sequence[int]]
Pieces = Mapping[int, Mapping[str, bytes] | None]


def offers_of(pieces: Mapping[str, bytes] | None) -> list[ReplicaOffer] | None:
    if pieces is None:
        return None
    return [ReplicaOffer(name, manifest_of(name, raw), memoryview(raw)) for name, raw in pieces.items()]


def exchange(peers: Peers, pieces: Pieces, rooms: Sequence[Room], network: Network | None = None) -> list[Exchange]:
    """One round of all ranks, each on a thread."""
    network, world = network or Network(), range(len(rooms))

    def play(rank: int) -> Exchange:
        owners = [owner for owner in world if rank in peers[owner]]
        replicator = Replicator(FakeTransport(network, rank, len(rooms)), peers[rank], owners)
        return replicator.exchange(7, offers_of(pieces[rank]), rooms[rank])

    with ThreadPoolExecutor(len(rooms)) as threads:
        return list(threads.map(play, world))


def pair(raw: bytes = b"some bytes", network: Network | None = None, **room: Any) -> tuple[list[Exchange], list[Room]]:
    """Rank 0 gives one piece to rank 1."""
    rooms = [Room(), Room(**room)]
    return exchange({0: [1], 1: []}, {0: {"snapshot": raw}, 1: None}, rooms, network), rooms


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Peers, Pieces, list[Room]]:
    """Any graph, any pieces, any refusals, and some pieces that are there already."""
    ranks = range(draw(st.integers(1, 5)))
    peers = {
        rank: draw(
            st.lists(st.sampled_from(ranks), unique=True).map(lambda found, me=rank: [r for r in found if r != me])
        )
        for rank in ranks
    }
    names = st.sampled_from(["snapshot", "parked", "log"])
    pieces = {rank: draw(st.none() | st.dictionaries(names, st.binary(max_size=40))) for rank in ranks}
    few = st.frozensets(names, max_size=1)
    rooms = [Room(refuse=draw(few), unstorable=draw(few), full=draw(few)) for _ in ranks]
    for owner, given_ in pieces.items():
        for name, raw in (given_ or {}).items():
            for peer in peers[owner]:
                if draw(st.booleans()):
                    rooms[peer].sealed[owner, manifest_of(name, raw)] = raw
    return peers, pieces, rooms


@given(worlds())
@settings(max_examples=examples(150))
def test_in_any_graph_what_is_acknowledged_is_sealed_and_nothing_else(world: tuple[Peers, Pieces, list[Room]]) -> None:
    peers, pieces, rooms = world
    before = [dict(room.sealed) for room in rooms]
    results = exchange(peers, pieces, rooms)
    for owner, offered in pieces.items():
        for peer in peers[owner]:
            manifests = {name: manifest_of(name, raw) for name, raw in (offered or {}).items()}
            held = [name for name, manifest in manifests.items() if rooms[peer].holds((owner, manifest))]
            assert results[owner].acknowledged[peer] == (offered is not None and len(held) == len(manifests))
            assert [name for kept, name in results[peer].kept if kept == owner] == held
            declined = rooms[peer].refuse | rooms[peer].full | rooms[peer].unstorable
            there = [name for name, manifest in manifests.items() if (owner, manifest) in before[peer]]
            assert held == [name for name in manifests if name in there or name not in declined]
    assert sum(found.sent_bytes for found in results) == sum(found.received_bytes for found in results)
    assert not any(room.open for room in rooms)


def test_what_is_held_already_is_not_sent() -> None:
    raw = b"some bytes"
    (giver, keeper), _ = pair(raw, sealed={(0, manifest_of("snapshot", raw)): raw})
    assert giver.acknowledged == {1: True}
    assert (giver.sent_bytes, keeper.received_bytes, keeper.kept) == (0, 0, ((0, "snapshot"),))


@pytest.mark.parametrize("raw", [b"", b"some bytes"])
def test_a_piece_of_any_size_arrives(raw: bytes) -> None:
    (giver, keeper), rooms = pair(raw)
    assert giver.acknowledged == {1: True}
    assert rooms[1].sealed == {(0, manifest_of("snapshot", raw)): raw}
    assert (giver.failures, keeper.failures) == ((), ())


@pytest.mark.parametrize(
    ("room", "why"),
    [
        ({"refuse": frozenset({"snapshot"})}, "all segments are in use"),
        ({"full": frozenset({"snapshot"})}, "there is no room"),
        ({"unstorable": frozenset({"snapshot"})}, "the storage refuses"),
    ],
)
def test_both_sides_say_what_was_not_kept_and_the_keeper_why(room: dict[str, Any], why: str) -> None:
    (giver, keeper), _ = pair(**room)
    assert giver.acknowledged == {1: False}
    assert "rank 1 did not keep snapshot of iteration 7 for rank 0" in giver.failures[0]
    assert keeper.failures == (f"rank 1 does not keep snapshot of iteration 7 for rank 0: {why}",)


def test_a_segment_of_another_size_than_its_manifest_says_is_refused() -> None:
    rooms, network = [Room(), Room()], Network()

    def play(rank: int) -> Exchange:
        replicator = Replicator(FakeTransport(network, rank, 2), [1] * (rank == 0), [0] * rank)
        offer = ReplicaOffer("snapshot", manifest_of("snapshot", b"1234"), memoryview(b"12345"))
        return replicator.exchange(7, [offer] if rank == 0 else None, rooms[rank])

    with ThreadPoolExecutor(2) as threads:
        giver, keeper = threads.map(play, range(2))
    assert giver.acknowledged == {1: False}
    assert "5 bytes, but its manifest needs 4" in keeper.failures[0]
    assert not rooms[1].open


def flipping(times: int) -> Network:
    """Flips a bit of raw bytes, told by their size, as they pass."""
    left = [times]

    def spoil(source: int, to: int, number: int, data: memoryview) -> None:
        if data.nbytes == 10 and left[0]:
            left[0] -= 1
            data[3] ^= 4

    return Network(spoil)


def test_a_piece_damaged_on_the_way_is_sent_once_more() -> None:
    (giver, keeper), rooms = pair(b"0123456789", flipping(1))
    assert giver.acknowledged == {1: True}
    assert (giver.sent_bytes, keeper.received_bytes) == (20, 20)
    assert list(rooms[1].sealed.values()) == [b"0123456789"]
    assert giver.failures == ()


def test_a_piece_damaged_twice_is_given_up_by_both() -> None:
    (giver, keeper), rooms = pair(b"0123456789", flipping(2))
    assert giver.acknowledged == {1: False}
    assert (giver.sent_bytes, keeper.kept, rooms[1].sealed, rooms[1].open) == (20, (), {}, [])
    assert "damaged twice" in giver.failures[0]
    assert "damaged twice" in keeper.failures[0]


def lost_in_round(network: Network, iterations: tuple[int, int]) -> tuple[list[PeerLost], list[Room]]:
    """What two ranks raise that give to each other, each in its own round."""
    rooms = [Room(), Room()]

    def play(rank: int) -> PeerLost:
        other = 1 - rank
        replicator = Replicator(FakeTransport(network, rank, 2), [other], [other])
        with pytest.raises(PeerLost) as caught:
            replicator.exchange(iterations[rank], offers_of({"snapshot": b"0123456789"}), rooms[rank])
        network.lose(f"rank {rank} left")
        return caught.value

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(play, range(2))), rooms


def test_ranks_in_different_rounds_say_both() -> None:
    errors, rooms = lost_in_round(Network(), (7, 8))
    assert any("lost step" in str(error) for error in errors)
    assert all("7" in str(error) and "8" in str(error) for error in errors if "lost step" in str(error))
    assert not any(room.sealed or room.open for room in rooms)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_garbage_in_place_of_any_control_message_is_noticed(number: int) -> None:
    def spoil(source: int, to: int, count: int, data: memoryview) -> None:
        if source == 0 and count == number:
            data[0] ^= 0xF0

    errors, rooms = lost_in_round(Network(spoil), (7, 7))
    assert any("do not understand each other" in str(error) for error in errors)
    assert not any(room.open for room in rooms)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_peer_lost_at_any_message_leaves_nothing_open_and_no_memory_in_use(number: int) -> None:
    network = Network()

    def lose(source: int, to: int, count: int, data: memoryview) -> None:
        if source == 0 and count == number:
            network.lose("rank 0 was killed")

    network.spoil = lose
    errors, rooms = lost_in_round(network, (7, 7))
    assert len(errors) == 2
    for room in rooms:
        assert not room.open  # `abandon` fails while anything refers to the bytes


@pytest.mark.parametrize(("peers", "owners"), [([0], []), ([], [2]), ([1, 1], []), ([-1], [])])
def test_a_rank_cannot_be_its_own_peer_nor_one_of_another_world(peers: list[int], owners: list[int]) -> None:
    with pytest.raises(UsageError, match="different other ranks"):
        Replicator(FakeTransport(Network(), 0, 2), peers, owners)


@given(
    st.integers(0, 2**62),
    st.none() | st.lists(st.builds(ReplicaPiece, st.text(max_size=20), st.binary(), st.integers(0, 2**60))),
)
def test_headers_and_tables_are_read_back_as_they_were(iteration: int, pieces: list[ReplicaPiece] | None) -> None:
    table = encode_table(pieces or ())
    header = decode_header(encode_header(iteration, None if pieces is None else len(pieces), table))
    assert (header.iteration, header.pieces) == (iteration, None if pieces is None else len(pieces))
    assert decode_table(header, table) == tuple(pieces or ())


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_no_bit_of_a_header_can_change_unnoticed(bit: int) -> None:
    header = bytearray(encode_header(12, 1, encode_table([ReplicaPiece("snapshot", b"manifest", 9)])))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedMessage):
        decode_header(header)


ANSWERS = [(Reply.HELD, ()), (Reply.PARTLY, ((0, 4), (64, 100))), (Reply.PARTLY, ()), (Reply.PARTLY, ((8, 9),))]


def test_answers_are_read_as_they_were_written() -> None:
    rows, ranges = encode_answers(ANSWERS)
    replies, counts = decode_answers(rows)
    assert list(zip(replies, decode_ranges(ranges, counts, [9, 100, 3, 9]), strict=True)) == ANSWERS


@pytest.mark.parametrize("wanted", [((0, 101),), ((8, 4),), ((0, 8), (4, 12))], ids=["beyond", "backwards", "twice"])
def test_ranges_that_a_piece_does_not_have_are_garbled(wanted: Ranges) -> None:
    rows, ranges = encode_answers([(Reply.PARTLY, wanted)])
    with pytest.raises(MalformedMessage, match="of a piece of 100 bytes"):
        decode_ranges(ranges, decode_answers(rows)[1], [100])


def meet(
    meetings: Sequence[ConnectionEpochs], timeout_s: float = HANG_TIMEOUT_S, pauses_s: Sequence[float] = ()
) -> list[int]:
    def come(rank: int) -> int:
        time.sleep(pauses_s[rank] if pauses_s else 0)
        return meetings[rank].meet(timeout_s)

    with ThreadPoolExecutor(len(meetings)) as threads:
        return list(threads.map(come, range(len(meetings))))


def test_ranks_that_come_at_different_times_agree_on_one_number() -> None:
    store = HashStore()
    meetings = [ConnectionEpochs(store, rank, 3) for rank in range(3)]
    assert meet(meetings, pauses_s=(0, 0.1, 0.05)) == [1, 1, 1]
    assert meet(meetings, pauses_s=(0.1, 0, 0.05)) == [2, 2, 2]


def test_ranks_that_gave_up_several_times_meet_the_late_one_at_a_new_number() -> None:
    store = HashStore()
    meetings = [ConnectionEpochs(store, rank, 3) for rank in range(3)]
    for rank in (0, 0, 1):
        with pytest.raises(PeerLost):
            meetings[rank].meet(0.0)
    numbers = meet(meetings)
    assert len(set(numbers)) == 1
    assert numbers[0] > 2


def test_who_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(PeerLost, match="ranks 1, 2 did not come"):
        ConnectionEpochs(store, 0, 3).meet(0.0)
    with pytest.raises(PeerLost, match="rank 1 did not come"):
        ConnectionEpochs(store, 2, 3).meet(0.0)


class Sending:
    """A pace that lets everything go at once, and notes it."""

    chunk_bytes = free_bytes = 0
    moving_s = 0.0

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.chunks: list[int] = []

    def begin(self, total_bytes: int) -> Sending:
        self.totals.append(total_bytes)
        return self

    def take(self, nbytes: int) -> float:
        self.chunks.append(nbytes)
        return 0.0

    def moved(self, nbytes: int) -> None:
        assert self.chunks[-1] == nbytes

    def hurry(self) -> None:
        """Nothing is held back."""


def test_where_sends_have_a_pace_both_sides_cut_messages_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "SEND_CHUNK_BYTES", 10)
    network, rooms, sends = Network(), [Room(), Room()], [Sending(), Sending()]
    raw = {0: bytes(range(25)), 1: b""}

    def play(rank: int) -> Exchange:
        mine = Replicator(FakeTransport(network, rank, 2), [1 - rank], [1 - rank], sends[rank])
        return mine.exchange(7, offers_of({"snapshot": raw[rank]}), rooms[rank])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(play, range(2)))
    assert [one.acknowledged for one in found] == [{1: True}, {0: True}]
    assert [one.sent_bytes for one in found] == [25, 0]
    assert (sends[0].totals[0], sends[0].chunks) == (25, [10, 10, 5])
    for rank in range(2):
        assert rooms[1 - rank].sealed[rank, manifest_of("snapshot", raw[rank])] == raw[rank]
