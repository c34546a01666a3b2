"""The contract of transports, held by every implementation between ranks of this process; no two share a thread."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import PeerLost, UsageError
from megatron.core.dist_checkpointing.moe.replication import connections, staged, tcp
from megatron.core.dist_checkpointing.moe.replication.agreement import ConnectionEpochs
from megatron.core.dist_checkpointing.moe.replication.connections import AT_ONCE_BYTES, Connections, hang_up
from megatron.core.dist_checkpointing.moe.replication.staged import StagedTransport
from megatron.core.dist_checkpointing.moe.replication.tcp import TcpTransport
from megatron.core.dist_checkpointing.moe.replication.transports import TRANSPORTS

LONG_S, SHORT_S = 30.0, 0.5
CHUNK_BYTES = 3000
KINDS = {"tcp": TcpTransport, "process-group": StagedTransport}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def connected(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Makes the transports of some ranks; chunks are small, so that a message has many."""
    monkeypatch.setattr(connections, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(staged, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(staged, "LEAST_BYTES", 500)
    # How long they talk may be short; that they meet takes as long as threads of a loaded machine take to begin.
    meet = ConnectionEpochs.meet
    monkeypatch.setattr(ConnectionEpochs, "meet", lambda epochs, timeout_s: meet(epochs, max(timeout_s, LONG_S)))
    made: list[Any] = []

    def connect(ranks: int, timeout_s: float = LONG_S) -> list[Any]:
        store = HashStore()
        new = on_all(range(ranks), lambda rank: KINDS[kind](store, rank, ranks, "test", timeout_s))
        made.extend(new)
        return new

    yield connect
    for transport in made:
        transport.close()


def on_all(ranks: Any, work: Callable[[Any], Any]) -> list[Any]:
    """What all ranks return, each on a thread."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


def lost(work: Callable[[], Any]) -> str:
    """What an error says that has to come."""
    with pytest.raises(PeerLost) as error:
        work()
    return str(error.value)


def test_each_name_of_the_flag_is_a_transport() -> None:
    assert tuple(TRANSPORTS) == tuple(KINDS)
    assert MoECheckpointConfig.__dataclass_fields__["transport"].metadata["flag"].choices == tuple(TRANSPORTS)


def test_messages_of_many_sizes_arrive_whole_and_in_order_in_both_directions(connected: Any) -> None:
    sizes = (5, 0, CHUNK_BYTES, 1, 5 * CHUNK_BYTES + 1, 499, 500, 2 * CHUNK_BYTES)

    def play(transport: Any) -> bool:
        other = 1 - transport.rank
        into = [bytearray(size) for size in sizes]
        under_way = [transport.receive(other, memoryview(buffer)) for buffer in into]
        under_way += [transport.send(other, bytes([at]) * size) for at, size in enumerate(sizes)]
        for transfer in under_way:
            transfer.wait()
        for buffer in into:
            buffer.append(0)  # fails while anything refers to it
        return all(buffer[:-1] == bytes([at]) * sizes[at] for at, buffer in enumerate(into))

    assert on_all(connected(2), play) == [True, True]


def test_small_messages_are_sent_without_waking_a_thread(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = connected(2)
    one.send(1, b"abc").wait()  # the first one connects
    (lane,) = one.connections.lanes
    woken: list[int] = []
    wake = lane.due.notify
    monkeypatch.setattr(lane.due, "notify", lambda n=1: (woken.append(n), wake(n)))
    for _ in range(50):
        one.send(1, b"abc").wait()
        time.sleep(0.005)
    arrived = bytearray(3 * 51)
    other.receive(0, memoryview(arrived)).wait()
    assert arrived == b"abc" * 51
    assert len(woken) < 50


def test_small_messages_that_fill_a_connection_arrive_whole_and_in_order(connected: Any) -> None:
    one, other = connected(2)
    sizes = [AT_ONCE_BYTES // 2, 3, AT_ONCE_BYTES] * 400
    under_way = [one.send(1, at.to_bytes(2, "big") * (size // 2) + b"." * (size % 2)) for at, size in enumerate(sizes)]
    for at, size in enumerate(sizes):
        arrived = bytearray(size)
        other.receive(0, memoryview(arrived)).wait()
        assert arrived == at.to_bytes(2, "big") * (size // 2) + b"." * (size % 2)
    for transfer in under_way:
        transfer.wait()


def test_ranks_that_compare_and_add_different_numbers_are_told_so(connected: Any) -> None:
    made = connected(2)
    texts = on_all(
        made,
        lambda transport: lost(
            lambda: transport.least_and_total([1] * (1 + transport.rank), [1] * (2 - transport.rank))
        ),
    )
    assert "ranks call for different things" in texts[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_numbers_and_values_of_all_ranks_come_together(connected: Any, ranks: int) -> None:
    def play(transport: Any) -> Any:
        rank = transport.rank
        return (
            transport.least([rank, -rank, 2**62 + rank]),
            transport.total([rank, -(2**40)]),
            transport.least([]),
            transport.least_and_total([rank], [rank, 1]),
            transport.gather({"rank": rank, "text": "ä" * rank * 300}),  # some take more than one message
        )

    total = (ranks * (ranks - 1) // 2, -ranks * 2**40)
    both = ((0,), (total[0], ranks))
    values = [{"rank": rank, "text": "ä" * rank * 300} for rank in range(ranks)]
    assert on_all(connected(ranks), play) == [((0, 1 - ranks, 2**62), total, (), both, values)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_values_of_all_ranks_become_one_on_the_way(connected: Any, ranks: int) -> None:
    def play(transport: Any) -> bytes:
        return transport.merge(bytes([65 + transport.rank]) * 900, lambda lower, higher: lower + higher)

    assert on_all(connected(ranks), play) == [b"".join(bytes([65 + rank]) * 900 for rank in range(ranks))] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_what_ranks_have_for_others_arrives_there_whoever_they_are(connected: Any, ranks: int) -> None:
    def has(source: int, to: int) -> bool:
        return (source * 7 + to * 3) % 4 != 0 or source == to

    def play(transport: Any) -> list[tuple[int, bytes]]:
        rank = transport.rank
        return transport.exchange({to: bytes([rank, to]) * 3000 for to in range(ranks) if has(rank, to)})

    for to, came in enumerate(on_all(connected(ranks), play)):
        assert came == [(source, bytes([source, to]) * 3000) for source in range(ranks) if has(source, to)]


def test_a_rank_that_is_gone_ends_what_others_exchange(connected: Any) -> None:
    made = connected(3, SHORT_S)
    made[2].close()
    texts = on_all(made[:2], lambda transport: lost(lambda: transport.exchange({0: b"a"})))
    assert all("could not exchange values with all 3 ranks" in text for text in texts)


def test_a_rank_has_connections_only_to_those_that_it_talks_to(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROBE_AFTER_S", LONG_S)
    ranks = 8
    made = connected(ranks)

    def sockets(transport: Any) -> int:
        return len(transport.connections.sockets) - 1

    assert [sockets(transport) for transport in made] == [0] * ranks
    on_all(made, lambda transport: transport.gather(None))
    assert sum(map(sockets, made)) == 4 * (ranks - 1)  # each edge of a tree, both ways, at both ends
    assert max(map(sockets, made)) == 2 * 3


def test_a_closed_transport_lets_go_of_what_was_under_way_and_its_peer_hears_of_it(connected: Any) -> None:
    one, other = connected(2)
    into, data = bytearray(10), bytearray(50_000_000)
    under_way = [one.receive(1, memoryview(into)), one.send(1, data)]
    for buffer in (into, data):
        with pytest.raises(BufferError):
            buffer.append(0)
    waiting = other.receive(0, memoryview(bytearray(len(data) + 1)))
    begun_s = time.monotonic()
    one.close()
    for buffer in (into, data):
        buffer.append(0)
    for transfer in under_way:
        assert "before connections are renewed: the transport was closed" in lost(transfer.wait)
    assert "rank 1 failed to receive 50000001 bytes from rank 0" in lost(waiting.wait)
    assert time.monotonic() - begun_s < LONG_S / 2


def test_a_transfer_that_is_dropped_lets_go_of_its_memory_and_breaks_the_connections(connected: Any) -> None:
    one, _ = connected(2)
    into = bytearray(10 * CHUNK_BYTES)
    transfer = one.receive(1, memoryview(into))
    del transfer
    into.append(0)
    assert "rank 0 gave up to receive" in lost(lambda: one.total([1]))


def test_a_transfer_that_is_collected_while_its_thread_posts_a_message_stops_nobody(
    connected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where frames of an exception hold it, in a circle."""
    monkeypatch.setattr(tcp, "_LET_GO_S", SHORT_S)
    one, _ = connected(2)
    held, lane = [one.receive(1, memoryview(bytearray(10 * CHUNK_BYTES)))], one.lane(1, 4, is_send=True)

    def collect() -> None:
        with lane.due:  # of the lock under which messages are posted
            held.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert "rank 0 gave up to receive" in lost(lambda: one.total([1]))


def test_a_queued_transfer_that_is_collected_there_does_not_wait_for_its_lane(connected: Any) -> None:
    """The lane could end it only once it has the lock, for which it would wait until the wait is given up."""
    one, _ = connected(2)
    moving, held = one.receive(1, memoryview(bytearray(10))), [one.receive(1, memoryview(bytearray(10)))]
    begun_s = time.monotonic()
    with one.lane(1, 4, is_send=True).due:
        held.clear()
    assert time.monotonic() - begun_s < 5
    assert "rank 0 gave up to receive" in lost(moving.wait)


def test_a_transport_that_is_renewed_works_again_after_a_failure(connected: Any) -> None:
    made = connected(2, 2.0)
    assert "(timeout 2 s)" in lost(made[0].receive(1, memoryview(bytearray(10 * CHUNK_BYTES))).wait)
    for work in (made[0].send(1, b"abc").wait, lambda: made[0].gather(None)):
        assert "before connections are renewed: rank 0 failed to receive" in lost(work)

    def play(transport: Any) -> Any:
        transport.renew()
        return transport.total([transport.rank + 1])

    assert on_all(made, play) == [(3,), (3,)]


def test_who_is_silent_is_named_after_the_timeout(connected: Any) -> None:
    one, *_ = connected(3, SHORT_S)
    begun_s = time.monotonic()
    assert f"failed to receive 9 bytes from rank 2 (timeout {SHORT_S:g} s): nothing moved" in lost(
        one.receive(2, memoryview(bytearray(9))).wait
    )
    assert SHORT_S <= time.monotonic() - begun_s < LONG_S / 3


def test_what_all_ranks_agree_on_ends_on_all_when_one_gives_up(connected: Any) -> None:
    made = connected(4)

    def play(transport: Any) -> str:
        if transport.rank == 3:
            transport.close()
            return ""
        return lost(lambda: transport.gather("value"))

    texts = on_all(made, play)
    assert all(f"rank {rank} could not gather values of all 4 ranks" in texts[rank] for rank in range(3))


def test_ranks_that_call_for_different_things_are_told_so(connected: Any) -> None:
    made = connected(2)
    texts = on_all(made, lambda transport: lost(lambda: transport.total([1] * (1 + transport.rank))))
    assert "ranks call for different things: 1 and 2 numbers" in texts[0]


def test_a_rank_that_waits_for_a_connection_is_woken_when_this_process_hangs_up(
    connected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PROBE_AFTER_S", LONG_S)  # the other ranks of this process hang up as well
    one, *_ = connected(3)
    transfers = [one.receive(other, memoryview(bytearray(2 * CHUNK_BYTES))) for other in (1, 2)]
    threading.Timer(0.2, hang_up).start()
    begun_s = time.monotonic()
    assert "this rank hangs up" in lost(transfers[0].wait)
    assert time.monotonic() - begun_s < LONG_S / 2


def test_a_transport_that_nobody_keeps_ends_its_threads(connected: Any, kind: str) -> None:
    store = HashStore()
    made = on_all(range(2), lambda rank: KINDS[kind](store, rank, 2, "kept by nobody", LONG_S))
    on_all(made, lambda transport: transport.total([1]))
    kept = weakref.ref(made[0].connections)
    ended = made[0].connections
    threads = [lane.thread for lane in ended.lanes]
    made.clear()
    gc.collect()
    ended.join()
    assert ended.why == "the transport is gone"
    assert threads
    assert all(not thread.is_alive() for thread in threads)
    del ended
    assert kept() is None or not kept().acceptor.is_alive()


def test_a_closed_transport_goes_without_the_garbage_collector(connected: Any) -> None:
    made = connected(2)
    on_all(made, lambda transport: transport.total([1]))
    kept = [weakref.ref(transport.connections) for transport in made]
    gc.collect()
    gc.disable()
    try:
        on_all(made, lambda transport: transport.close())
        assert [connections() for connections in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("error")
def test_read_only_memory_is_sent_without_a_warning_and_stays_mapped_until_then(connected: Any, tmp_path: Path) -> None:
    one, other = connected(2)
    content = os.urandom(9 * CHUNK_BYTES)
    path = tmp_path / "segment"
    path.write_bytes(content)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(mapped)[10:-60]
    sent = one.send(1, view)
    del view
    with pytest.raises(BufferError):
        mapped.close()
    into = bytearray(len(content) - 70)
    other.receive(0, memoryview(into)).wait()
    sent.wait()
    mapped.close()
    assert into == content[10:-60]


def test_what_cannot_be_sent_or_received_is_refused_at_once(connected: Any) -> None:
    transport, _ = connected(2)
    with pytest.raises(UsageError, match="read-only"):
        transport.receive(1, memoryview(b"abc"))
    with pytest.raises(UsageError, match="not contiguous"):
        transport.send(1, memoryview(b"abcd")[::2])
    for other in (0, 2, -1):
        with pytest.raises(UsageError, match="in a world of 2 ranks"):
            transport.send(other, b"abc")
    with pytest.raises(UsageError, match="no JSON value"):
        transport.gather({"loss": float("nan")})


def test_who_does_not_know_the_secret_is_not_let_in(connected: Any) -> None:
    one, other = connected(2)
    host, port, _ = one.connections.place.split()
    for hello in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", connections.HELLO.pack(b"moe-ckpt", bytes(16), 1, 0)):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(hello)
            stranger.settimeout(LONG_S)
            with contextlib.suppress(ConnectionResetError):  # where not all was read of what it sent
                assert stranger.recv(1) == b""
    sent = other.send(0, b"abc")
    into = bytearray(3)
    one.receive(1, memoryview(into)).wait()
    sent.wait()
    assert into == b"abc"


def test_an_address_that_is_not_of_this_machine_is_named(kind: str) -> None:
    with pytest.raises(PeerLost, match=r"rank 0 cannot listen at 192\.0\.2\.1: "):
        KINDS[kind](HashStore(), 0, 1, "test", SHORT_S, address="192.0.2.1")


def test_a_forked_helper_does_not_hide_the_death_of_its_trainer() -> None:
    ends = [Connections(rank, "127.0.0.1") for rank in range(2)]
    open_ = partial(ends[0].dial, ends[1].place, 1, 0, LONG_S)
    ends[0].lane(open_, "to rank 1", connections.send_over).post(memoryview(b"abc")).ended.wait(LONG_S)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        signal.raise_signal(signal.SIGKILL)
    try:
        into = memoryview(bytearray(4))
        arrival = partial(ends[1].arrival, lambda: ends[0].place, 0, 0, LONG_S)
        waiting = ends[1].lane(arrival, "from rank 0", connections.receive_over).post(into)
        time.sleep(0.1)
        for connection in list(ends[0].sockets):  # as the system does when a process ends: no shutdown
            os.close(connection.detach())
        assert waiting.ended.wait(LONG_S) and not waiting.through
        assert ends[1].why == "from rank 0: its connection has closed"
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)
        for end in ends:
            end.end("the test is over")


def test_a_connection_that_comes_while_this_process_is_slow_to_accept_it_is_not_taken_for_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that is busy with starting many processes."""
    monkeypatch.setattr(connections, "PROBE_AFTER_S", 0.01)
    accept, accepts = Connections._arrive, threading.Event()

    def late(self: Connections, *caller: Any) -> None:
        assert self.rank or accepts.wait(LONG_S)
        accept(self, *caller)

    monkeypatch.setattr(Connections, "_arrive", late)
    waiting, other = ends = [Connections(rank, "127.0.0.1") for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(waiting.arrival, lambda: other.place, 1, 0, LONG_S)
        while (0, connections.PROBE) not in other._arrived:
            time.sleep(0.01)
        dialled = other.dial(waiting.place, 0, 0, LONG_S)
        with pytest.raises(TimeoutError):
            arrived.result(0.5)
        accepts.set()
        dialled.sendall(b"x")
        assert arrived.result(LONG_S).recv(1) == b"x"
    for end in ends:
        end.end("the test is over")
