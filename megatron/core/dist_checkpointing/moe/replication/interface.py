"""The network that ranks talk over: which interface and address, what is wrong with it, and who calls at a listener."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..boot_clock import boot_id
from ..errors import UsageError
from ..ports import Json

log = logging.getLogger(__name__)

FLAG = "--moe-ckpt-interface"
VARIABLE = "GLOO_SOCKET_IFNAME"
"""Gloo's own environment variable, which counts where the flag is not given; gloo takes the first of several names."""

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Endpoint:
    """Where a rank can be reached.

    Attributes:
        interface: Empty where the address is the one that the host's name resolves to.
        machine: Differs where hosts may have one name.
        interfaces: All that it has.
    """

    interface: str
    address: str
    host: str
    machine: str
    interfaces: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine reaches this address."""
        return ipaddress.ip_address(self.address).is_loopback


def of_local_rank(interfaces: str, local_rank: int) -> str:
    """The interface of a process, of those that the flag names: a list goes by local rank, and begins again at its end.

    Args:
        interfaces: Of the flag: names with commas between them.
        local_rank: Of the process on its node.

    Raises:
        UsageError: A name is empty.
    """
    names = [name.strip() for name in interfaces.split(",")]
    if not all(names):
        raise UsageError(f"{FLAG} {interfaces}: a name is empty; give one, or one for each local rank: eth0,eth1")
    return names[local_rank % len(names)]


def own_endpoint(interface: str | None) -> Endpoint:
    """That of this process, on the interface of the flag, else of the variable, else as gloo chooses it.

    Raises UsageError for an interface that this machine does not have.
    """
    name = interface or os.environ.get(VARIABLE, "").split(",")[0]
    host = socket.gethostname()
    address = _address_of(name, FLAG if interface else VARIABLE) if name else _resolved(host)
    return Endpoint(name, address, host, boot_id() or host, _shown_interfaces())


def use_for_gloo(interface: str, rank: int, first_of: Callable[[Json], Json] = lambda own: own) -> None:
    """Let gloo groups that this process makes from here on, Megatron-Core's among them, use the flag's interface.

    An interface that the variable names already is left to them.

    Args:
        interface: Of the flag.
        rank: This rank.
        first_of: The first problem of all ranks, if they can be asked; then all raise for one without that interface.

    Raises:
        UsageError: A machine does not have this interface.
    """
    problem = ""
    try:
        own_endpoint(interface)
    except UsageError as error:
        problem = f"rank {rank}: {error}"
    # Before anything is raised: all ranks say so, also one that has no such interface.
    if first := first_of(problem):
        raise UsageError(str(first))
    named = os.environ.setdefault(VARIABLE, interface)
    if rank == 0 and named == interface:
        log.info("network: gloo uses interface %s (%s)", interface, FLAG)
    elif rank == 0:
        log.info("network: gloo uses interface %s (%s was already set)", named, VARIABLE)


def check_endpoints(endpoints: Sequence[Endpoint]) -> None:
    """Raises UsageError where the job has several machines, and the address of one of them is its loopback."""
    if len({endpoint.machine for endpoint in endpoints}) < 2:
        return
    for rank, endpoint in enumerate(endpoints):
        if endpoint.is_loopback:
            what = f"interface {endpoint.interface}" if endpoint.interface else f"host name {endpoint.host}"
            raise UsageError(
                f"the {what} of rank {rank} leads to {endpoint.address}, which no other machine reaches: give {FLAG}"
                f" (or {VARIABLE}) the interface that connects the nodes; that machine has {endpoint.interfaces}"
            )


def _address_of(name: str, source: str) -> str:
    """The IPv4 address of an interface. Raises UsageError for one that is not there, or has none."""
    if name not in (known for _, known in socket.if_nameindex()):
        raise UsageError(f"{source} {name}: this machine has no such interface, but {_shown_interfaces()}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise UsageError(
                f"{source} {name}: the interface has no IPv4 address ({error.strerror}); there are"
                f" {_shown_interfaces()}"
            ) from error
    # Behind the 16 bytes of the name comes a sockaddr_in: family and port take four bytes, then its address follows.
    return socket.inet_ntoa(answer[20:24])


def _resolved(host: str) -> str:
    """The first address of this host's name that it has; its loopback where there is none, as gloo does."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, where in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        # Only an address of this machine can be bound; a name may resolve to one that it no longer has.
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((where[0], 0))
            return str(where[0])
    return "127.0.0.1"


def _shown_interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


# Finds out who has connected to a listener of this rank; all callers are greeted at once, so none holds up another.
#
# Anybody who reaches the port can connect, and say nothing. So each caller has a deadline by which it has said what
# only ranks of the job know, no more than `MOST` of them are waited for, and the oldest of these leave first.

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
        """Greet until the listener is shut down, and close it.

        Nobody else may close it: this thread would wait for good where another file got the number that it polls.
        """
        self._listener.setblocking(False)
        # `poll`, whose list is this process's own: a forked child would share that of `epoll`.
        with self._listener, selectors.PollSelector() as self._selector:
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
