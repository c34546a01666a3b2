"""What checkpoints take in the memory of one rank, as MoEvement Table 6 counts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..types import OperatorId, OperatorSize, Part, SnapshotPlan
from ..types.operators import scaled
from .base import BufferSpec

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
