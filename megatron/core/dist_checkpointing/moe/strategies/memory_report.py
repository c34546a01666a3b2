"""How much memory checkpoints may take on a node and how fast they are copied, and what they take of one rank's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import UsageError
from ..types import OperatorId, OperatorSize, Part, SnapshotPlan
from ..types.operators import scaled
from .base import BufferSpec

# What a person asked for, in bytes or as a share.

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


_STEPS = 32
"""Sizes of segments between a power of two and the next."""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank's checkpoints in memory, without random states.

    window: iterations of one checkpoint. checkpoint_bytes: of all its snapshots, the X of MoEvement Table 6.
    dense_bytes: of a checkpoint that takes everything at once, as Gemini's. log_bytes: of boundary logs, the Y of
    Table 6. own_bytes, replica_bytes: of the segments for the rank's own checkpoints, and for the replicas it keeps.
    """

    window: int
    checkpoint_bytes: int
    dense_bytes: int
    own_bytes: int
    replica_bytes: int
    log_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"memory per rank: one checkpoint {scaled(self.checkpoint_bytes)} (window of {self.window} iterations; full"
            f" copy {scaled(self.dense_bytes)}), boundary logs {scaled(self.log_bytes)};"
            f" buffers: own {scaled(self.own_bytes)}, replicas {scaled(self.replica_bytes)}"
        )


def memory_report(specs: Sequence[BufferSpec], sizes: Mapping[OperatorId, OperatorSize], owners: int) -> MemoryReport:
    """The account of one rank.

    Args:
        specs: The buffers that its strategy asks for.
        sizes: Bytes of the operators that it owns.
        owners: How many ranks' replicas it keeps.
    """
    plans = [plan for spec in specs for plan in (spec.largest, *spec.also)]
    largest = [(spec, max(_bytes(plan, sizes) for plan in (spec.largest, *spec.also))) for spec in specs]
    segments = [(spec, segment_bytes(nbytes, varies=bool(spec.also))) for spec, nbytes in largest]
    return MemoryReport(
        window=max((1 + len(spec.also) for spec in specs), default=0),
        checkpoint_bytes=sum(_bytes(plan, sizes) for plan in plans),
        dense_bytes=sum(size.full_bytes for size in sizes.values()),
        own_bytes=sum(spec.own * nbytes for spec, nbytes in segments),
        replica_bytes=sum(spec.replica * owners * nbytes for spec, nbytes in segments),
    )


def segment_bytes(nbytes: int, *, varies: bool) -> int:
    """The size of a segment for pieces.

    Args:
        nbytes: Bytes of the largest piece.
        varies: They change as windows do: then there are only so many sizes, so that not every change takes new memory.
    """
    step = max(1, (1 << nbytes.bit_length() - 1) // _STEPS) if varies and nbytes else 1
    return -(-nbytes // step) * step


def _bytes(plan: SnapshotPlan, sizes: Mapping[OperatorId, OperatorSize]) -> int:
    total = 0
    for operator, size in sizes.items():
        part = plan.parts.get(operator, Part.NOTHING)
        if Part.MASTER in part:
            total += size.full_bytes
        elif Part.COMPUTE in part:
            total += size.weights_bytes
    return total
