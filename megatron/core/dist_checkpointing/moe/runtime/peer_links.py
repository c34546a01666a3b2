"""How a rank notices at once that another one has ended, and what torch is told about NCCL so that it can go on.

The transports beside training cannot tell it. Most of the time no message is under way on them, so nothing fails; and
they close by themselves when a peer is late. Nothing is ever sent over a link but one byte before a good end, so it
closes when the process at the other end dies, hangs up, or (by keep-alive probes) when its machine is gone.

Each rank has links to those 1, 2, 4, ... ranks after it: 2 log2(N) sockets. Whoever loses a peer hangs up, which its
own links tell to others, so all N ranks hear of a loss in log2(N) steps.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import resource
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ..device import device_thread
from ..errors import OF_ALL_RANKS, PeerSilent, ranks_named
from ..policy.determinism import NONDETERMINISTIC_OPTIONS, DeviceSettings
from ..ports import PeerLost
from ..replication.connections import hang_up, keep_alive
from ..replication.interface import BACKLOG, Greeting

log = logging.getLogger(__name__)

_GOODBYE = b"."
_SECRET_BYTES = 16
_HELLO = struct.Struct("!16sQ")  # what only ranks of the job can know, from the store; the rank that calls

_ALL: weakref.WeakSet[PeerLinks] = weakref.WeakSet()


_Callers = queue.SimpleQueue[tuple[socket.socket, int] | None]
"""Ranks that have called, and at last None."""


def _greet(greeting: Greeting, callers: _Callers) -> None:
    try:
        greeting.run()
    finally:
        callers.put(None)


def stop_waiting() -> None:
    """No rank is waited for any more, whichever threads do."""
    for links in list(_ALL):
        links.stop_waiting()


def _close_in_child() -> None:
    for links in list(_ALL):
        links.forget()


# A helper that outlives a killed trainer would hold the connections open, and hide its death.
os.register_at_fork(after_in_child=_close_in_child)


class PeerLinks:
    """The links of one rank; `sockets` has the rank at the other end of each.

    Making them is a collective over all ranks, which find each other in `store`.

    Args:
        store: Of this attempt.
        rank: This rank.
        world_size: Number of ranks.
        address: Under which other ranks reach this one.
        timeout_s: How long the others may take to come.

    Raises:
        PeerLost: One did not; says which, and where it should have been.
    """

    def __init__(self, store: Store, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        self._rank, self._deadline_s = rank, time.monotonic() + timeout_s
        self._store, self._timeout_s = PrefixStore("peer-links", store), timeout_s
        self.sockets: dict[socket.socket, int] = {}
        self._listener: socket.socket | None = None
        steps = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
        _ALL.add(self)
        if steps:
            try:
                self._connect([(rank + step) % world_size for step in steps], address, world_size)
            except BaseException:
                self.forget()
                raise

    def _connect(self, others: list[int], address: str, world_size: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        secret, callers = secrets.token_bytes(_SECRET_BYTES), _Callers()
        with socket.create_server((address, 0), family=family, backlog=BACKLOG) as listener:
            self._listener = listener
            greeting = Greeting(
                f"rank {self._rank}", listener, _HELLO.size,
                lambda hello: secrets.compare_digest(hello[:_SECRET_BYTES], secret),
                lambda connection, hello: callers.put((connection, _HELLO.unpack(hello)[1])),
            )  # fmt: skip
            thread = threading.Thread(target=_greet, args=(greeting, callers), name="moe-ckpt-greet", daemon=True)
            thread.start()
            try:
                self._store.set(str(self._rank), f"{address}:{listener.getsockname()[1]} {secret.hex()}")
                places = self._places(others)
                for other in others:
                    self._add(self._called(other, places.get(other)), other)
                waited = {(2 * self._rank - other) % world_size for other in others}  # as far before this rank
                while waited:
                    connection, caller = self._caller(callers, address, tuple(sorted(waited)))
                    self._add(connection, caller)
                    waited.discard(caller)
            finally:
                # Shuts the listener down, which ends the thread. Who has called since then, or once too often, is
                # closed after that, when nobody is added any more.
                self.stop_waiting()
                thread.join()
                while (unused := callers.get()) is not None:
                    unused[0].close()

    def _caller(self, callers: _Callers, address: str, left: tuple[int, ...]) -> tuple[socket.socket, int]:
        """The next rank that calls, of those that have not. Raises PeerLost."""
        try:
            found = callers.get(timeout=self._left_s)
        except queue.Empty:
            raise PeerSilent(f"{self._waited(address, left)}: timed out") from None  # some may wait for others
        if found is None:
            callers.put(None)
            raise PeerLost(f"{self._waited(address, left)}: connections were given up")
        return found

    def _waited(self, address: str, left: tuple[int, ...]) -> str:
        return f"rank {self._rank} waited {self._timeout_s:g} s at {address} for {ranks_named(left)} to connect"

    def _places(self, others: Sequence[int]) -> dict[int, bytes]:
        """Where ranks listen, of one answer of the store, which all ranks ask; empty where one of them did not say."""
        keys = list(map(str, others))
        try:
            # A tenth of the time: then ranks are dialled one by one, as far as each has published its address.
            self._store.wait(keys, timedelta(seconds=self._left_s / 10))
            return dict(zip(others, self._store.multi_get(keys), strict=True))
        except RuntimeError:
            return {}

    def _called(self, other: int, place: bytes | None) -> socket.socket:
        where = "an address that it never told"
        try:
            if place is None:
                self._store.wait([str(other)], timedelta(seconds=self._left_s))
                place = self._store.get(str(other))
            where, _, secret = place.decode().partition(" ")
            host, port = where.rsplit(":", 1)
            connection = socket.create_connection((host, int(port)), timeout=self._left_s)
            connection.sendall(_HELLO.pack(bytes.fromhex(secret), self._rank))
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            advice = "let the nodes reach each other there, or name another interface with --moe-ckpt-interface"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "raise the limit of open files (ulimit -n), of which training alone may take all"
            raise PeerSilent(
                f"rank {self._rank} could not reach rank {other} at {where} within {self._timeout_s:g} s ({reason}):"
                f" {advice}",
                (other,),
            ) from None
        return connection

    def stop_waiting(self) -> None:
        """From any thread: whoever waits for ranks to call fails."""
        if self._listener is not None:
            with suppress(OSError):  # it is closed already
                self._listener.shutdown(socket.SHUT_RDWR)

    def _add(self, connection: socket.socket, other: int) -> None:
        connection.setblocking(False)
        keep_alive(connection)
        self.sockets[connection] = other

    @property
    def _left_s(self) -> float:
        return max(0.1, self._deadline_s - time.monotonic())

    def lost(self, connection: socket.socket) -> str:
        """What happened where a link can be read; empty where its rank has ended well. The link is dropped."""
        other = self.sockets.pop(connection)
        with connection:
            try:
                return "" if connection.recv(1) else f"peer failure: rank {other} closed its connection"
            except OSError as error:
                return f"peer failure: rank {other}: {error.strerror}"

    def end(self) -> None:
        """Say goodbye: this rank ends well, and no other loses it."""
        for connection in self.sockets:
            with suppress(OSError):
                connection.sendall(_GOODBYE)
        self.forget()

    def forget(self) -> None:
        """Close all links, without a word: other ranks lose this one, unless another process has them too."""
        links, self.sockets = self.sockets, {}
        # Not `shutdown`, which would end the connections of the parent as well where this is a forked child.
        for connection in links:
            with suppress(OSError):
                connection.close()

    def hang_up(self) -> None:
        """Let others know that this rank is leaving; may be called from another thread than the one that waits."""
        # Not `close`: the thread that waits still polls these descriptors.
        for connection in list(self.sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


# The end of connections to peers: how a rank hears that one is gone, and lets others know that it is leaving.

_DESCRIPTORS = Path("/proc/self/fd")
_ABORT_TIMEOUT_S = 5.0
_STDERR = 2  # the last messages still go there, whatever the standard streams are

_ABORTED: dict[str, dist.ProcessGroup] = {}

# What gloo, NCCL and torch's store say when the process at the other end is gone.
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out"),
    *("Application timeout caused pair closure", "Socket Timeout", "ncclRemoteError", "NCCL communicator was aborted"),
    "wait timeout after",  # of the store, where a rank does not come to a group
    "Connection was likely closed",  # that of the store, which ended with its node
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that another rank is gone: nothing is wrong with this one."""
    while error is not None:
        if isinstance(error, PeerLost):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER):
            return True
        error = error.__cause__
    return False


def is_blameless(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is no fault of this rank or its node."""
    if is_lost_peer(error):
        return True
    while error is not None and not isinstance(error, OF_ALL_RANKS):
        error = error.__cause__
    return error is not None


def close_connections() -> int:
    """Close this process's connections to other processes; returns how many there were.

    A rank that waits for this one in a collective fails at once, instead of after this process has ended: otherwise a
    chain of ranks would wait for each other's parking. Gloo has no call for that which peers notice, so all connected
    TCP sockets are shut down, those to the rendezvous too; communicators of NCCL are aborted, which also lets kernels
    on the device go that wait for a lost peer. Transports are told, since they may wait where there is no connection
    yet. No collective is possible afterwards. What was sent before arrives. No file is opened where none may be.
    """
    hang_up()
    stop_waiting()
    _abort_communicators()
    return sum(_shut(descriptor) for descriptor in _open_descriptors() if descriptor > _STDERR)


def named_groups() -> dict[str, dist.ProcessGroup]:
    """All groups of this process that c10d knows, by the name that it gave them."""
    return {str(name): group for group, name in dist.distributed_c10d._world.pg_names.items()}


def take_aborted_groups() -> dict[str, dist.ProcessGroup]:
    """The groups that were aborted since the last call."""
    groups = dict(_ABORTED)
    _ABORTED.clear()
    return groups


def _open_descriptors() -> Iterable[int]:
    """Those of this process; all that it may have where they cannot be listed, which takes one more."""
    try:
        return sorted(int(name) for name in os.listdir(_DESCRIPTORS) if name.isdecimal())
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _shut(descriptor: int) -> bool:
    """Whether this was a connected TCP socket."""
    # Asked first: to close a copy of a file's descriptor ends the locks that this process has on the file, and waits
    # until a network file system has taken what was written.
    try:
        socket.socket(fileno=descriptor).detach()
    except OSError:
        return False
    # A copy, since another thread may close the descriptor meanwhile, and something else may get its number.
    try:
        copy = os.dup(descriptor)
    except OSError as error:
        # Without a descriptor for a copy the socket itself has to do, else it was closed by another thread meanwhile.
        return error.errno in (errno.EMFILE, errno.ENFILE) and _shut_itself(descriptor)
    try:
        return _shut_itself(copy)
    finally:
        os.close(copy)


def _shut_itself(descriptor: int) -> bool:
    """As `_shut`; the descriptor stays open."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # no socket
        return False
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # listens, or is gone already
        return False
    finally:
        connection.detach()  # else this object would close the descriptor, which is its owner's
    return True


def _abort_communicators() -> None:
    """Abort all groups of NCCL; waits a while for it, since a driver that hangs must not keep state from parking.

    Each on a thread of its own: an abort may wait for the device, on which a kernel of another group spins until that
    one is aborted, too. Torch aborts them one after the other, each for as long as the timeout of its group.
    """
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return
    groups, took_s = named_groups(), dict[str, float]()
    _ABORTED.update(groups)  # c10d forgets them

    def abort(name: str, group: dist.ProcessGroup) -> None:
        begun_s = time.monotonic()
        with contextlib.suppress(Exception):  # it is broken already, or another thread aborts it
            group.abort() if hasattr(group, "abort") else group._get_backend(torch.device("cuda")).abort()
        took_s[name] = time.monotonic() - begun_s

    def forget() -> None:
        with contextlib.suppress(Exception):  # aborts again, which does nothing by now
            dist.distributed_c10d._abort_process_group()

    threads = [device_thread(partial(abort, *one), f"moe-ckpt-abort-{one[0]}") for one in groups.items()]
    until_s = time.monotonic() + _ABORT_TIMEOUT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    if late := sorted(groups.keys() - took_s.keys()):
        log.warning("communicators not aborted within %g s: groups %s", _ABORT_TIMEOUT_S, ", ".join(late))
        return
    slowest = max(took_s, key=took_s.__getitem__, default="")
    log.info("aborted %d communicators; slowest: group %s, %.2f s", len(groups), slowest, took_s.get(slowest, 0.0))
    forgetting = device_thread(forget, "moe-ckpt-forget-groups")
    forgetting.start()
    forgetting.join(max(0.0, until_s - time.monotonic()))


# What torch has to be told about NCCL so that a rank which lost a peer can put its state aside.
#
# By default torch's watchdog ends the process when a communicator fails or a collective takes too long, with no word
# to Python. All of it is read when process groups are made, so it has to be set before.

SETTINGS: Mapping[str, tuple[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "torch's watchdog ends the process before its state is put aside"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "an error of an aborted kernel ends the process from a thread of torch"),
    # For each failed work torch's watchdog sleeps four times the wait for a dump (60 s), with the lock that every new
    # collective of the group needs; each rank's heartbeat monitor then sleeps 480 s, and destructors join both.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "torch's watchdog dumps and sleeps before the group can be used or dropped"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": ("1", "torch's watchdog sleeps 60 s for each failed collective"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "torch's heartbeat monitor sleeps 480 s, and whoever drops the group waits"),
}
"""What has to be set, and what happens otherwise."""

_DEFAULT_TIMEOUT = timedelta(minutes=10)

_FROM_AGENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets for workers where nobody else did; the same value of a user cannot be told from it."""


def set_for_parking(backend: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Set what nobody has set otherwise; before process groups are made, and only for NCCL.

    Args:
        backend: Of the process groups.
        environment: Is changed; that of this process if not given.
    """
    if "nccl" not in backend:
        return
    environment = os.environ if environment is None else environment
    is_worker = "TORCHELASTIC_RUN_ID" in environment
    # Other values are somebody's wish and stay; `wrong_settings` says what they cost.
    for name, (value, _) in SETTINGS.items():
        if name not in environment or (is_worker and environment[name] == _FROM_AGENT.get(name)):
            environment[name] = value


def wrong_settings(environment: Mapping[str, str] | None = None, backend: str | None = None) -> Iterator[str]:
    """A sentence for each variable with which no rank parks under NCCL; none for other backends.

    Args:
        environment: Is read; that of this process if not given.
        backend: Of the process groups; that of the default group if not given.
    """
    if "nccl" not in (process_group_backend() if backend is None else backend):
        return
    environment = os.environ if environment is None else environment
    for name, (value, why) in SETTINGS.items():
        found = environment.get(name)
        if found != value:
            is_now = f"is {found}" if found is not None else "is not set"
            yield f"{name} {is_now}: when a peer is lost, {why}; set {name}={value} before process groups are made"


def process_group_backend() -> str:
    """Of the default group; empty where there is none."""
    return str(dist.get_backend()) if dist.is_initialized() else ""


def process_group_timeout_s(device: str = "cuda") -> float:
    """How long a collective of the default group may take, as whoever made it said, else as torch says."""
    options = getattr(dist.distributed_c10d._get_default_group()._get_backend(torch.device(device)), "options", None)
    timeout = getattr(options, "_timeout", None) or _DEFAULT_TIMEOUT
    return float(timeout.total_seconds())


# How this process computes, read from torch, from Megatron-Core's configuration and from the environment.


def device_of(chunk: torch.nn.Module) -> str:
    """Where a model chunk is: cuda or cpu."""
    return next((parameter.device.type for parameter in chunk.parameters()), "cpu")


def device_settings(chunk: torch.nn.Module, transformer: Any, ranks: int) -> DeviceSettings:
    """The settings of a job with this model.

    Args:
        chunk: A model chunk of this rank.
        transformer: The configuration that its modules share.
        ranks: Number of ranks.
    """
    # Algorithms that only warn are not deterministic.
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return DeviceSettings(
        device_of(chunk),
        ranks,
        dict(os.environ),
        transformer_engine=getattr(transformer, "transformer_impl", "") == "transformer_engine",
        deterministic_mode=bool(getattr(transformer, "deterministic_mode", False)),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled() and not warns_only,
        fusions=tuple(name for name in NONDETERMINISTIC_OPTIONS if getattr(transformer, name, False)),
        dsa_kernel_backend=getattr(transformer, "dsa_kernel_backend", "none"),
    )
