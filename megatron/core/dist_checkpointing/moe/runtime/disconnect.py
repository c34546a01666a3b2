"""The end of connections to peers: how a rank hears that one is gone, and lets others know that it is leaving."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from ..ports import PeerLost
from ..replication.connections import hang_up
from .peer_links import stop_waiting

_DESCRIPTORS = Path("/proc/self/fd")
_ABORT_TIMEOUT_S = 5.0
_STDERR = 2  # the last messages still go there, whatever the standard streams are

_ABORTED: dict[str, dist.ProcessGroup] = {}

# What gloo and NCCL say when the process at the other end is gone.
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "Timed out"),
    *("Application timeout caused pair closure", "Socket Timeout", "ncclRemoteError", "NCCL communicator was aborted"),
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
        connection.detach()
    return True


def _abort_communicators() -> None:
    """Abort all groups of NCCL; waits a while for it, since a driver that hangs must not keep state from parking."""
    if not dist.is_initialized() or "nccl" not in dist.get_backend():
        return

    _ABORTED.update(named_groups())  # c10d forgets them

    def abort() -> None:
        # A group that is broken already, or is being aborted by another thread, may raise; nobody needs to know.
        with contextlib.suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    thread = threading.Thread(target=abort, name="abort-communicators", daemon=True)
    thread.start()
    thread.join(_ABORT_TIMEOUT_S)
