"""Connections of one rank to the others that it talks to, each made when the first message needs it.

A connection goes one way: whoever has something to send dials, and says with the listener's secret who it is. So no two
ranks dial each other at once, and each connection has one thread, its lane, that moves whole messages with blocking
calls: a call for each chunk, in which Python's lock is free, and in which `shutdown` of the socket wakes it.

All connections of a transport end together: with the first that fails, when the transport is renewed or closed, and
when this process hangs up. Then every message that is not through is void.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from ..device import device_thread
from .interface import BACKLOG, Greeting

CHUNK_BYTES = 8 << 20
"""Most bytes of one call; each must arrive within the timeout of whoever waits."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds of silence before the first probe, between two, and how many may stay unanswered: 11 s for a power cut."""

HELLO = struct.Struct("!8s16sIB")  # magic, secret of the listener, rank, purpose
_MAGIC = b"moe-ckpt"
AT_ONCE_BYTES = 16 << 10
"""Most bytes of a message that whoever posts it sends itself, where it fits the socket's buffer: waking a thread for it
would cost more than the message."""
PROBE = 255
"""What a connection is for that carries nothing."""
PROBE_AFTER_S = 0.2
"""How long whoever waits for a connection does so before it looks whether the other rank is still there."""
_JOIN_S = 10.0

_ALL: weakref.WeakSet[Connections] = weakref.WeakSet()


def keep_alive(connection: socket.socket) -> None:
    """Let the system find out that the machine at the other end is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def hang_up() -> None:
    """End the connections of all transports of this process, whichever threads wait on them."""
    for connections in list(_ALL):
        connections.end("this rank hangs up")


def _close_in_child() -> None:
    for connections in list(_ALL):
        connections.forget()


# A helper that outlives a killed trainer would hold the connections open, and hide its death.
os.register_at_fork(after_in_child=_close_in_child)


class ConnectionsClosed(ConnectionError):
    """The connections have ended; the text says why."""


class Message:
    """One message on its way: its bytes until it is `ended`, and then whether it is `through`."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.ended = threading.Event()
        self.through = False

    def end(self, *, through: bool) -> None:
        """Release the bytes."""
        self.memory, self.through = memoryview(b""), through
        self.ended.set()


Mover = Callable[[socket.socket, memoryview, Callable[[], None]], None]
"""Moves the bytes of one message over a connection; calls the last argument as often as some have moved. May raise
OSError and RuntimeError."""


class Connections:
    """Those of one rank, from one renewal of a transport to the next.

    Args:
        rank: This rank.
        address: Of its interface, on which it listens.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, rank: int, address: str) -> None:
        self.rank, self.why = rank, ""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Any process that reaches the port can dial. Ranks of the job learn the secret from the store.
        self._secret = secrets.token_bytes(16)
        self._listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        # One lock for lanes, sockets and arrivals: whoever ends them finds all that is there, and what comes later
        # finds `why`.
        self._lock = threading.RLock()  # a transfer may be collected, and end them, by whoever holds it
        self._arriving, self.lanes = threading.Condition(self._lock), list[MessageLane]()
        self._arrived: dict[tuple[int, int], socket.socket] = {}
        self.sockets = {self._listener}
        self.place = f"{address} {self._listener.getsockname()[1]} {self._secret.hex()}"
        """What others need to reach this rank."""
        _ALL.add(self)
        self.acceptor = threading.Thread(target=self._accept, name="moe-ckpt-accept", daemon=True)
        self.acceptor.start()

    def dial(self, place: str, other: int, purpose: int, timeout_s: float) -> socket.socket:
        """A connection to another rank.

        Args:
            place: Of that rank, as its `place` says it.
            other: That rank, for errors.
            purpose: Which messages it is for, a byte; the other side asks for it by `arrival`.
            timeout_s: Longest wait for the connection.

        Raises:
            OSError: The rank cannot be reached, or these connections have ended.
        """
        host, port, secret = place.split()
        # Noted before it connects, so that `end` reaches it, too.
        connection = self._watched(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        try:
            connection.settimeout(timeout_s)
            connection.connect((host, int(port)))
            connection.sendall(HELLO.pack(_MAGIC, bytes.fromhex(secret), self.rank, purpose))
        except OSError as error:
            self.close(connection)
            raise ConnectionError(f"rank {other} cannot be reached at {host}:{port} ({_said(error)})") from None
        return _made_ready(connection)

    def arrival(self, place: Callable[[], str], source: int, purpose: int, timeout_s: float) -> socket.socket:
        """The connection that another rank has dialled; waits for it until these end, or those of that rank.

        Args:
            place: Gives that of that rank, as its `place` says it; asked where it has not dialled at once.
            source: That rank.
            purpose: What it has dialled for, a byte.
            timeout_s: Longest wait for a connection that looks whether the rank is still there.

        Raises:
            OSError: These connections have ended, or those of that rank.
        """
        if not self._has_come(source, purpose, PROBE_AFTER_S):
            # Nothing says that it has ended before it dialled, but a connection in the other direction; which it keeps
            # when it dials, since here its end may be seen before the connection that has come is.
            probe = self.dial(place(), source, PROBE, timeout_s)
            try:
                while not self._has_come(source, purpose, PROBE_AFTER_S):
                    check_open(probe)
            finally:
                self.close(probe)
        with self._lock:
            return self._arrived.pop((source, purpose))

    def _has_come(self, source: int, purpose: int, wait_s: float) -> bool:
        with self._arriving:
            self._arriving.wait_for(lambda: self.why or (source, purpose) in self._arrived, wait_s)
            self.check()
            return (source, purpose) in self._arrived

    def check(self) -> None:
        """Raises Ended."""
        if self.why:
            raise ConnectionsClosed(self.why)

    def end(self, why: str) -> None:
        """End all, for the reason that is given first; from any thread, and does not wait."""
        if self.why:
            return
        with self._lock:
            if self.why:
                return
            self.why = why
            self._arriving.notify_all()
            for lane in self.lanes:
                lane.end()
            # Not `close`: that would wake no thread inside a call, and the system could give its descriptor to
            # something else while the thread still uses it. Each socket is closed by whoever uses it.
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until no thread uses any message or connection; after `end`."""
        until_s = time.monotonic() + _JOIN_S
        for thread in (*(lane.thread for lane in self.lanes), self.acceptor):
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:  # each refers to these: a circle, in which what it was opened with would stay
            self.lanes = [lane for lane in self.lanes if lane.thread.is_alive()]

    def forget(self) -> None:
        """Close what a forked child has of them; takes no lock, which a thread of the parent may have held."""
        self.why = self.why or "this is a forked process"
        for connection in tuple(self.sockets):
            with contextlib.suppress(OSError):
                connection.close()

    def lane(
        self, open_: Callable[[], socket.socket], other: str, move: Mover, close: Callable[[], None] = lambda: None
    ) -> MessageLane:
        """A new lane.

        Args:
            open_: Makes its connection; called on the lane's thread for the first message.
            other: Who is at the other end, for errors.
            move: Moves the bytes of each message.
            close: Called by the thread as its last act.
        """
        # Under the lock: `end` either finds this lane, or has set `why` by now, which the lane's thread then reads.
        with self._lock:
            lane = MessageLane(self, self._lock, open_, other, move, close)
            self.lanes.append(lane)
        return lane

    def close(self, connection: socket.socket) -> None:
        """Close one of them that nobody uses any more."""
        with self._lock:
            self.sockets.discard(connection)
        connection.close()

    def _accept(self) -> None:
        Greeting(
            f"rank {self.rank}", self._listener, HELLO.size, self._is_known, self._arrive,
            opened=self._watched, close=self.close,
        ).run()  # fmt: skip
        # The listener was shut down. What has come and nobody has taken is closed here.
        for left in (self._listener, *self._arrived.values()):
            self.close(left)

    def _is_known(self, hello: bytes) -> bool:
        """Whoever does not know the secret is none of this job."""
        magic, secret, *_ = HELLO.unpack(hello)
        # In constant time: how long it takes tells a stranger nothing of the secret.
        return magic == _MAGIC and secrets.compare_digest(secret, self._secret)

    def _arrive(self, connection: socket.socket, hello: bytes) -> None:
        """Note who has dialled."""
        *_, rank, purpose = HELLO.unpack(hello)
        with self._arriving:
            before = self._arrived.pop((rank, purpose), None)
            self._arrived[rank, purpose] = _made_ready(connection)
            self._arriving.notify_all()
        if before is not None:  # an earlier probe
            self.close(before)

    def _watched(self, connection: socket.socket) -> socket.socket:
        with self._lock:
            self.sockets.add(connection)
            if self.why:  # too late to be shut down with the others
                connection.close()
        return connection


class MessageLane:
    """Messages of one direction between this rank and another, moved one after another by a thread; small ones are
    sent by whoever posts them while the thread has nothing to do."""

    def __init__(
        self,
        connections: Connections,
        lock: threading.RLock,
        open_: Callable[[], socket.socket],
        other: str,
        move: Mover,
        close: Callable[[], None],
    ) -> None:
        self._connections, self._open, self._other, self._move, self._close = connections, open_, other, move, close
        self._lock, self.due = lock, threading.Condition(lock)
        self._queue: deque[Message] = deque()
        self._connection: socket.socket | None = None
        self._is_moving = False
        self.moved_s = time.monotonic()
        """When something moved last."""
        self.thread = device_thread(self._run, f"moe-ckpt {other}")  # the staged transport copies on it
        self.thread.start()

    def post(self, memory: memoryview) -> Message:
        """Begin to move these bytes; void from the start where the connections have ended."""
        message = Message(memory)
        # Under the lock, which keeps the order: nothing is sent at once past what is queued or being moved.
        with self._lock:
            is_void = bool(self._connections.why)
            is_through = not is_void and self._sent_at_once(message)
            if not is_void and not is_through:
                self._queue.append(message)
                self.due.notify()
        if is_void or is_through:
            message.end(through=is_through)
        return message

    def _sent_at_once(self, message: Message) -> bool:
        """Whether that has sent all of it; what is left then is for the thread, and whatever goes wrong too."""
        is_small = self._move is send_over and len(message.memory) <= AT_ONCE_BYTES
        if not is_small or self._connection is None or self._is_moving or self._queue:
            return False
        # Without waiting: the lock is held, and whoever posts may be the thread that trains.
        with contextlib.suppress(OSError):
            message.memory = message.memory[self._connection.send(message.memory, socket.MSG_DONTWAIT) :]
            self._moved()
        return not message.memory

    def _run(self) -> None:
        while (message := self._next()) is not None:
            through = False
            try:
                # Here, for the first message: whoever posts one does not wait for the other rank to dial or to listen.
                self._connection = self._connection or self._open()
                self._move(self._connection, message.memory, self._moved)
                through = True
            except (OSError, RuntimeError, ValueError) as error:
                self._connections.end(f"{self._other}: {_said(error)}")
            message.end(through=through)  # here, where no traceback refers to its bytes any more
        if self._connection is not None:
            self._connections.close(self._connection)
        self._close()

    def _next(self) -> Message | None:
        """None once the connections have ended; then nothing is left in the queue."""
        with self.due:
            self._is_moving = False
            self.due.wait_for(lambda: self._queue or self._connections.why)
            if self._connections.why:
                self.end()  # once more: a message may have been posted by the thread that ended them, in the middle
                return None
            # Set in one go with taking the message: no small one may be sent past it.
            self._is_moving = True
            return self._queue.popleft()

    def end(self) -> None:
        """As the connections end, whose lock is held: nothing waits for this lane any more.

        Whoever gives a message up may hold that lock, and waits until nothing refers to its bytes.
        """
        void, self._queue = self._queue, deque()
        for message in void:
            message.end(through=False)
        self.due.notify_all()

    def _moved(self) -> None:
        self.moved_s = time.monotonic()


def send_over(connection: socket.socket, memory: memoryview, moved: Callable[[], None]) -> None:
    """As `Mover`: send all bytes. Raises OSError."""
    at = 0
    while at < len(memory):
        # Released at once: in the traceback of an error a slice would keep the memory of a snapshot exported.
        with memory[at : at + CHUNK_BYTES] as part:
            at += connection.send(part)
        moved()


def receive_over(connection: socket.socket, memory: memoryview, moved: Callable[[], None]) -> None:
    """As `Mover`: receive as many bytes as there is memory for. Raises OSError."""
    at = 0
    while at < len(memory):
        # WAITALL: one call for a whole chunk, with Python's lock free, and not one for what each packet brings.
        with memory[at : at + CHUNK_BYTES] as part:
            count = connection.recv_into(part, len(part), socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("its connection has closed")
        at += count
        moved()


def check_open(connection: socket.socket) -> None:
    """Raises ConnectionError where the other end has closed."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        raise ConnectionError("its connection has closed")


def _made_ready(connection: socket.socket) -> socket.socket:
    """Blocking: only then a call continues until all of a chunk has moved."""
    connection.settimeout(None)
    # Small messages are answered one by one: Nagle's algorithm would hold them back for acknowledgements.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
