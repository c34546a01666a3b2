"""A clock that nobody sets: seconds since this node was booted, which all of its processes share.

The wall clock steps when it is corrected, by days on a node whose battery is empty. So what processes of one node tell
each other about when something was is told by this one, and becomes a time of day only for people and for other nodes.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

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


# Real time.


class SystemClock:
    """As `ports.Clock`."""

    def now_s(self) -> float:
        """As `ports.Clock.now_s`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """As `ports.Clock.sleep`."""
        time.sleep(seconds)
