"""Callers at the listeners of a rank: those who say nothing, or something else, keep no rank out."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.replication import interface
from megatron.core.dist_checkpointing.moe.replication.connections import HELLO, Connections
from megatron.core.dist_checkpointing.moe.replication.interface import Greeting
from megatron.core.dist_checkpointing.moe.resharding.record_server import RecordServer, RemoteRecords
from megatron.core.dist_checkpointing.moe.runtime.peer_links import PeerLinks

LONG_S = 60.0
LATER_S = 20.0
"""How much longer a rank may take because of strangers, on a busy machine; each of them alone kept it out before."""

HELLO_BYTES = 24
PASSWORD = b"p" * HELLO_BYTES


@contextlib.contextmanager
def strangers(host: str, port: int, count: int, say: bytes = b"") -> Iterator[None]:
    """In this block so many connections to there say that and nothing more; each that ends is renewed."""
    is_over, selector = threading.Event(), selectors.PollSelector()

    def call() -> None:
        connection = socket.create_connection((host, port), timeout=LONG_S)
        connection.sendall(say)
        selector.register(connection, selectors.EVENT_READ)

    def renew() -> None:
        while not is_over.is_set():
            for key, _ in selector.select(0.05):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                with contextlib.suppress(OSError):
                    call()

    for _ in range(count):
        call()
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def seconds_until_a_message_arrives(count: int, say: bytes) -> float:
    listening, calling = (Connections(rank, "127.0.0.1") for rank in range(2))
    host, port, _ = listening.place.split()
    try:
        with strangers(host, int(port), count, say):
            begun_s = time.monotonic()
            calling.dial(listening.place, 0, 0, LONG_S)
            listening.arrival(lambda: calling.place, 1, 0, LONG_S)
            return time.monotonic() - begun_s
    finally:
        for one in (listening, calling):
            one.end("the test is over")
            one.join()


def seconds_until_ranks_are_linked(count: int, say: bytes) -> float:
    store, found = HashStore(), list[PeerLinks]()
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(PeerLinks(store, rank, 2, "127.0.0.1", LONG_S)))
        for rank in range(2)
    ]
    threads[0].start()
    store.wait(["peer-links/0"])
    host, port = store.get("peer-links/0").decode().split()[0].split(":")
    with strangers(host, int(port), count, say):
        begun_s = time.monotonic()
        threads[1].start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - begun_s
    assert sorted(sorted(links.sockets.values()) for links in found) == [[0, 0], [1, 1]]
    for links in found:
        links.end()
    return took_s


def seconds_until_a_record_server_answers(count: int, say: bytes) -> float:
    def open_nothing(snapshot: SnapshotId) -> NoReturn:
        raise UnreadableCheckpoint("no such snapshot")

    server = RecordServer(open_nothing, "127.0.0.1", LONG_S)
    host, port, _ = server.place.split()
    try:
        with strangers(host, int(port), count, say):
            begun_s = time.monotonic()
            records = RemoteRecords(0, server.place, LONG_S)
            with pytest.raises(UnreadableCheckpoint, match="no such snapshot"):
                records.open(SnapshotId(1, 0, "full"))
            records.close()
            return time.monotonic() - begun_s
    finally:
        server.close()


@pytest.mark.parametrize(
    "say", [b"", b"moe-ckpt", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"], ids=["silent", "half", "http"]
)
@pytest.mark.parametrize("count", [12, 200])
@pytest.mark.parametrize(
    "seconds",
    [seconds_until_a_message_arrives, seconds_until_ranks_are_linked, seconds_until_a_record_server_answers],
    ids=["transport", "links", "records"],
)
def test_a_rank_gets_in_as_promptly_as_without_strangers(
    seconds: Callable[[int, bytes], float], count: int, say: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "HELLO_S", LONG_S)
    assert seconds(count, say) < seconds(0, b"") + LATER_S


class Greeted:
    """A greeting at a free port, on a thread of its own. arrived: what those said who were let in."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.listener, self.arrived = listener or socket.create_server(("127.0.0.1", 0)), list[bytes]()
        self._is_there = threading.Event()
        self.greeting = Greeting("rank 3", self.listener, HELLO_BYTES, lambda hello: hello == PASSWORD, self._arrive)
        self._thread = threading.Thread(target=self.greeting.run)
        self._thread.start()

    def _arrive(self, connection: socket.socket, hello: bytes) -> None:
        self.arrived.append(hello)
        connection.setblocking(True)
        connection.sendall(b"welcome")
        connection.close()

    def called(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=LONG_S)

    def is_let_in(self) -> bool:
        with self.called() as connection:
            connection.sendall(PASSWORD)
            return connection.recv(7, socket.MSG_WAITALL) == b"welcome"

    def end(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.listener.close()


@pytest.fixture
def greeted() -> Iterator[Greeted]:
    one = Greeted()
    yield one
    one.end()


def test_a_caller_whose_connection_is_closed_as_it_arrives_ends_nothing(
    greeted: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeted.greeting, "_opened", socket.socket.close)  # as a rank does that closes all it has
    with greeted.called() as connection:
        assert hung_up_on(connection)
    monkeypatch.undo()
    assert greeted.is_let_in()


def hung_up_on(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):  # where not all was read of what it sent
        return connection.recv(1) == b""
    return True


def test_who_says_its_hello_a_byte_at_a_time_has_no_longer_than_others(
    greeted: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "HELLO_S", 1.0)
    begun_s = time.monotonic()
    with greeted.called() as slow:
        slow.settimeout(0.2)
        for byte in PASSWORD[:-1]:
            with contextlib.suppress(OSError):
                slow.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                assert hung_up_on(slow)
                break
        else:
            pytest.fail("it was waited for as long as it said something")
        assert time.monotonic() - begun_s >= 0.9
    assert greeted.arrived == []
    assert greeted.is_let_in()


def test_a_hello_in_pieces_is_one(greeted: Greeted) -> None:
    with greeted.called() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, HELLO_BYTES, 5):
            connection.sendall(PASSWORD[at : at + 5])
            time.sleep(0.01)
        assert connection.recv(7, socket.MSG_WAITALL) == b"welcome"


def test_of_too_many_silent_callers_the_oldest_are_hung_up_on(
    greeted: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "MOST", 4)
    monkeypatch.setattr(interface, "HELLO_S", LONG_S)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(greeted.called()) for _ in range(6)]
        assert all(map(hung_up_on, silent[:2]))
        silent[-1].sendall(PASSWORD)
        assert silent[-1].recv(7, socket.MSG_WAITALL) == b"welcome"
        for one in silent[2:-1]:
            one.settimeout(0.1)
            with pytest.raises(TimeoutError):
                one.recv(1)


def said_of_strangers(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "unauthenticated" in text]


def test_strangers_are_reported_once_in_a_period_with_where_they_came_from(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PERIOD_S", LONG_S)
    one = Greeted()
    port = one.listener.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with one.called() as liar:
                liar.sendall(b"x" * HELLO_BYTES)
                assert hung_up_on(liar)
        monkeypatch.setattr(one.greeting, "_say_at_s", 0.0)  # the period is over when it looks next
        assert one.is_let_in()
        until_s = time.monotonic() + LONG_S
        while not said_of_strangers(caplog) and time.monotonic() < until_s:
            time.sleep(0.01)  # who comes before the end of that turn is counted in it
        with one.called() as liar:
            liar.sendall(b"x" * HELLO_BYTES)
            assert hung_up_on(liar)
        one.end()
    assert said_of_strangers(caplog) == [
        f"rank 3: rejected 3 unauthenticated connections on port {port} from 127.0.0.1 (3)",
        f"rank 3: rejected 1 unauthenticated connection on port {port} from 127.0.0.1 (1)",
    ]


def test_who_leaves_by_itself_or_waits_when_all_ends_is_no_stranger(caplog: pytest.LogCaptureFixture) -> None:
    one = Greeted()
    with caplog.at_level(logging.WARNING), one.called() as waiting:
        with one.called() as leaving:
            leaving.sendall(PASSWORD[:5])
        assert one.is_let_in()
        one.end()
        assert hung_up_on(waiting)
    assert said_of_strangers(caplog) == []


class Full(socket.socket):
    """A listener of a process that has no descriptor left, twice."""

    times = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_process_that_runs_out_of_descriptors_for_a_while_greets_again() -> None:
    listener = Full()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    one = Greeted(listener)
    assert one.is_let_in()
    assert Full.times == 2
    assert listener.times == 0
    one.end()


def test_callers_that_are_not_greeted_yet_are_among_those_that_a_forked_child_closes() -> None:
    listening = Connections(0, "127.0.0.1")
    host, port, _ = listening.place.split()
    with socket.create_connection((host, int(port)), timeout=LONG_S) as caller:
        caller.sendall(HELLO.pack(b"moe-ckpt", bytes(16), 1, 0)[:8])
        until_s = time.monotonic() + LONG_S
        while len(listening.sockets) < 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert len(listening.sockets) == 2
    listening.end("the test is over")
    listening.join()


def test_the_page_on_security_says_how_many_callers_are_waited_for_and_for_how_long() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()
    assert re.search(rf"at most {interface.MOST} .* {interface.HELLO_S:g} s", page), page
