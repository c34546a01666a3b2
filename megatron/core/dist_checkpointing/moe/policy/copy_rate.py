"""How fast a snapshot is copied: no faster than it has to be, since training uses the same memory and the same bus."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UsageError

HEADROOM = 0.8
"""Share of the passes in which a copy is to end: they are never alike, and it is better early than late."""

AUTO, FASTEST = "auto", "max"


@dataclass(frozen=True)
class CopyRate:
    """Bytes per second, or what it takes to end within the passes; None of the two: as fast as it goes."""

    bytes_per_s: float | None = None
    follows_passes: bool = False

    @classmethod
    def parse(cls, text: str) -> CopyRate:
        """From `auto`, `max`, or GB/s (1e9 bytes). Raises UsageError."""
        if text == AUTO:
            return cls(follows_passes=True)
        if text == FASTEST:
            return cls()
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(
                f"--moe-ckpt-copy-rate {text} is neither {AUTO} nor {FASTEST} nor a number of GB/s above 0, such as 10"
            )
        return cls(bytes_per_s=value * 1e9)

    def of(self, nbytes: int, passes_s: float | None) -> float | None:
        """Bytes per second for a copy of so many, beside passes that take so long; None: as fast as it goes.

        passes_s: None where they are not known yet.
        """
        if self.follows_passes and nbytes and passes_s:
            return nbytes / (HEADROOM * passes_s)
        return self.bytes_per_s
