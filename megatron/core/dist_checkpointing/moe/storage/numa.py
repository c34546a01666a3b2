"""Memory near the device that writes to it: on a node with several sockets the other one's memory is slower.

Linux puts a page where the thread runs that touches it first. Segments are touched as they are allocated, so the thread
that allocates them runs on the cores of the device's socket for as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SYSFS = Path("/sys")


def local_cpus(pci_address: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """The cores near the device at this address, such as `0000:3b:00.0`; none where the system does not tell."""
    with suppress(OSError, ValueError):
        return _parsed((sysfs / "bus/pci/devices" / pci_address.lower() / "local_cpulist").read_text())
    return frozenset()


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """This thread runs on these cores, as far as it may; on those that it had afterwards. Without any it stays."""
    before = os.sched_getaffinity(0)
    near = cpus & before
    if not near:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _parsed(text: str) -> frozenset[int]:
    """From a list such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
