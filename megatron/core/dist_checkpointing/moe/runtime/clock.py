"""Real time."""

from __future__ import annotations

import time


class SystemClock:
    """As `ports.Clock`."""

    def now_s(self) -> float:
        """As `ports.Clock.now_s`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """As `ports.Clock.sleep`."""
        time.sleep(seconds)
