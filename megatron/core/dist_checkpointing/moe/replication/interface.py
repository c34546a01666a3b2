"""The network that ranks talk over beside training: which interface, which address, and what is wrong with it."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
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


def use_for_gloo(interface: str, rank: int, gather: Callable[[Json], list[Json]] = lambda own: [own]) -> None:
    """Let gloo groups that this process makes from here on, Megatron-Core's among them, use the flag's interface.

    An interface that the variable names already is left to them.

    Args:
        interface: Of the flag.
        rank: This rank.
        gather: Gives the values of all ranks, if they can be asked; then all raise for one without that interface.

    Raises:
        UsageError: A machine does not have this interface.
    """
    problem = ""
    try:
        own_endpoint(interface)
    except UsageError as error:
        problem = f"rank {rank}: {error}"
    # Before anything is raised: all ranks gather, also one that has no such interface.
    if first := next(filter(None, gather(problem)), None):
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
