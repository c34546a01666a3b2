"""Finds out who has connected to a listener of this rank; all callers are greeted at once, so none holds up another.

Anybody who reaches the port can connect, and say nothing. So each caller has a deadline by which it has said what only
ranks of the job know, no more than `MOST` of them are waited for, and the oldest of these leave first.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

BACKLOG = 1024
"""How many callers the system may keep until they are accepted."""
HELLO_S = 5.0
"""How long a caller may take to say who it is."""
MOST = 128
"""How many callers may be about to say it."""
PERIOD_S = 10.0
"""Strangers are reported once in this time, all in one line."""
_SHUT = (errno.EINVAL, errno.EBADF, errno.ENOTSOCK)
_PAUSE_S = 0.05
_NAMED = 4


@dataclass
class _Caller:
    address: str
    until_s: float
    heard: bytes = b""


class Greeting:
    """Of those who connect to one listener.

    Args:
        name: Of this rank, for people.
        listener: On which it waits for them.
        hello_bytes: What each has to send first.
        is_known: Whether such bytes come from this job.
        arrived: Gets each connection of this job, not blocking, and its hello; called on the thread of `run`.
        opened: Gets each connection as it is accepted.
        close: Closes one of a stranger.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        hello_bytes: int,
        is_known: Callable[[bytes], bool],
        arrived: Callable[[socket.socket, bytes], None],
        *,
        opened: Callable[[socket.socket], object] = lambda connection: None,
        close: Callable[[socket.socket], None] = socket.socket.close,
    ) -> None:
        self._name, self._listener, self._hello_bytes = name, listener, hello_bytes
        self._is_known, self._arrived, self._opened, self._close = is_known, arrived, opened, close
        self._callers: dict[socket.socket, _Caller] = {}  # oldest first
        self._strangers, self._say_at_s = Counter[str](), 0.0
        self._port = listener.getsockname()[1]

    def run(self) -> None:
        """Greet until the listener is shut down."""
        self._listener.setblocking(False)
        # `poll`, whose list is this process's own: a forked child would share that of `epoll`.
        with selectors.PollSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            try:
                while True:
                    self._turn()
            except OSError:  # it was shut down
                for connection in list(self._callers):
                    self._let_go(connection)
                self._report(now_s=float("inf"))

    def _turn(self) -> None:
        ready = [key.fileobj for key, _ in self._selector.select(self._wait_s())]
        # Before deadlines are looked at: nobody is hung up on whose hello is here.
        for connection in ready:
            if connection in self._callers:
                assert isinstance(connection, socket.socket)
                self._hear(connection)
        now_s = time.monotonic()
        for connection in [one for one, caller in self._callers.items() if caller.until_s <= now_s]:
            self._hang_up(connection)
        if self._listener in ready:
            self._accept()
        self._report(now_s)

    def _wait_s(self) -> float | None:
        due_s = [caller.until_s for caller in self._callers.values()][:1] + [self._say_at_s] * bool(self._strangers)
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _accept(self) -> None:
        """Take the callers that have come. Raises OSError where the listener is shut down."""
        # No more in one turn: those who came before, and whose hello may be here by now, come first.
        for _ in range(MOST):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SHUT:
                    raise
                time.sleep(_PAUSE_S)  # no descriptor is left, or the caller is gone
                return
            connection.setblocking(False)
            self._opened(connection)
            try:
                self._selector.register(connection, selectors.EVENT_READ)
            except (KeyError, ValueError):  # the connections of this rank end just now, and closed it, too
                self._close(connection)
                continue
            self._callers[connection] = _Caller(address[0], time.monotonic() + HELLO_S)
            self._hear(connection)  # a rank sends its hello as it connects
            if len(self._callers) > MOST:
                self._hang_up(next(iter(self._callers)))

    def _hear(self, connection: socket.socket) -> None:
        caller = self._callers[connection]
        try:
            said = connection.recv(self._hello_bytes - len(caller.heard))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        caller.heard += said
        if not said:  # it has left
            self._let_go(connection)
        elif len(caller.heard) == self._hello_bytes:
            if self._is_known(caller.heard):
                self._forget(connection)
                self._arrived(connection, caller.heard)
            else:
                self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        if not self._strangers:
            self._say_at_s = time.monotonic() + PERIOD_S
        self._strangers[self._callers[connection].address] += 1
        self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._forget(connection)
        self._close(connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._callers[connection]

    def _report(self, now_s: float) -> None:
        if not self._strangers or now_s < self._say_at_s:
            return
        count, named = self._strangers.total(), self._strangers.most_common(_NAMED)
        where = ", ".join(f"{address} ({times})" for address, times in named)
        more = f" and {len(self._strangers) - _NAMED} more addresses" if len(self._strangers) > _NAMED else ""
        log.warning(
            "%s: rejected %d unauthenticated connection%s on port %d from %s%s",
            self._name, count, "s" * (count > 1), self._port, where, more,
        )  # fmt: skip
        self._strangers.clear()
