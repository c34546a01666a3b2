"""A clock that nobody sets: seconds since this node was booted, which all of its processes share, and which they are.

The wall clock steps when it is corrected, by days on a node whose battery is empty. So what processes of one node tell
each other about when something was is told by this one, and becomes a time of day only for people and for other nodes.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

_DEAD = (b"Z", b"X", b"x")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot_s() -> float:
    """Seconds since the node was booted, those in which it slept among them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str:
    """What tells this boot of this node from all others; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# Processes of this boot.

ProcessKey = tuple[int, int]
"""Number of a process, and when it started, in ticks since its machine did: no later process has the same."""


def machine() -> str:
    """This boot of this machine, and the namespace that its process numbers are in; containers have their own."""
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


def started(process: int) -> int:
    """When a process started, in ticks since the machine did; -1 where it has ended."""
    try:
        fields = _stat(process)
    except OSError:
        return -1
    return -1 if fields[0] in _DEAD else int(fields[19])


def _stat(process: int) -> list[bytes]:
    """What the system says of a process, behind its name, which may be any bytes. Raises OSError."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()


def is_there(process: ProcessKey) -> bool:
    """Whether a process of this machine runs, and is not a later one with its number."""
    return started(process[0]) == process[1]


_ENDING, _KILLED = 0x4, 1 << 8
"""PF_EXITING among the flags of a process, and SIGKILL, the ninth, in a set of signals."""


def is_ending(process: int) -> bool:
    """Whether a process ends, or is killed and does not come to end: what it holds, as the memory of a GPU, takes time.

    Args:
        process: Its number, of this machine.
    """
    try:
        flags = int(_stat(process)[6])
        said = Path(f"/proc/{process}/status").read_text(errors="replace")
        lines = dict(line.split(":", 1) for line in said.splitlines())
    except (OSError, ValueError):
        return False
    pending = int(lines.get("SigPnd", "0"), 16) | int(lines.get("ShdPnd", "0"), 16)
    return bool(flags & _ENDING or pending & _KILLED)


# Real time.


class SystemClock:
    """As `ports.Clock`."""

    def now_s(self) -> float:
        """As `ports.Clock.now_s`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """As `ports.Clock.sleep`."""
        time.sleep(seconds)
