"""Stores that listen on one address: torch's own listen on all interfaces of a machine."""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from megatron.pretrain.errors import TrainingFailure

TIMEOUT = timedelta(minutes=5)
"""As torch's own stores wait for a key."""


def bound_store(host: str, port: int = 0, timeout: timedelta = TIMEOUT) -> TCPStore:
    """A store that this process keeps, reached at the address of `host` alone.

    Args:
        host: A name or an address of this machine.
        port: To listen at; 0 for a free one.
        timeout: How long it waits for a key.

    Raises:
        TrainingFailure: The port is taken.
        OSError: `host` is none of this machine.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A name for both, such as localhost: IPv4, which everybody tries.
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if not port or error.errno != errno.EADDRINUSE:
            raise
        raise TrainingFailure(
            f"port {port} of {host} is taken: another process listens there; end that one (ss -ltnp shows it), or start"
            " again with another port (--rdzv-endpoint HOST:PORT of torchrun, without torchrun MASTER_PORT)"
        ) from error
    name, own_port = listener.getsockname()[:2]
    return TCPStore(
        name, own_port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine that no other one reaches."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether `host` is an address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
