"""How much memory checkpoints may take on a node: what a person asked for, in bytes or as a share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from ..errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B?)")


def parse_bytes(text: str) -> int:
    """From `200GiB`, `200GB` or a number of bytes; 0 where it is none of these."""
    found = _LIMIT.fullmatch(text.strip())
    return int(Fraction(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0


@dataclass(frozen=True)
class MemoryLimit:
    """So many bytes of a node, or this share of its memory; one of the two is None."""

    nbytes: int | None = None
    share: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> MemoryLimit:
        """From `200GiB`, `200GB`, a number of bytes, or `70%`. Raises UsageError."""
        found = _LIMIT.fullmatch(text.strip())
        unit = found[2] if found else None
        value = Fraction(found[1]) if found else Fraction(0)
        if found and unit == "%" and 0 < value <= 100:
            return cls(share=value / 100)
        if nbytes := parse_bytes(text):
            return cls(nbytes=nbytes)
        raise UsageError(
            f"invalid --moe-ckpt-memory-limit {text} (expected a size, such as 200GiB, or a share of a node's memory,"
            " such as 70%)"
        )

    def of_node(self, node_bytes: int) -> int:
        """Bytes on a node with so much memory."""
        return self.nbytes if self.nbytes is not None else int((self.share or 0) * node_bytes)


# How fast a snapshot is copied: no faster than it has to be, since training uses the same memory and the same bus.

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
                f"invalid --moe-ckpt-copy-rate {text} (expected {AUTO}, {FASTEST} or GB/s above 0, such as 10)"
            )
        return cls(bytes_per_s=value * 1e9)

    def of(self, nbytes: int, passes_s: float | None) -> float | None:
        """Bytes per second for a copy that runs along with forward and backward passes.

        Args:
            nbytes: Bytes of the copy.
            passes_s: Seconds that the passes take; None where they are not known yet.

        Returns:
            The rate; None: as fast as it goes.
        """
        if self.follows_passes and nbytes and passes_s:
            return nbytes / (HEADROOM * passes_s)
        return self.bytes_per_s
