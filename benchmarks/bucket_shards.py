"""Which bytes of which operators one rank owns when Megatron's distributed optimizer cuts its buckets.

As `optimizer.param_layout` of Megatron-Core: parameters from the last to the first, in buckets that end once they are
large enough, each cut into equal ranges for the ranks that share it. A bucket is all parameters unless gradients are
reduced while they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorKind, OperatorSize, Topology
from megatron.core.optimizer.param_layout import pad_bucket_end, pad_param_start
from moe_ckpt.simulator.shards import owned_operators

FULL, WEIGHTS = 12, 2
"""Bytes per parameter in mixed precision."""
LEAST_BUCKET, PER_RANK = 40_000_000, 1_000_000
"""Parameters of a bucket with --overlap-grad-reduce, in all or for each rank that shares it: what is more."""
PIECES = 4
"""Equal parameters that stand for those of an operator that is no expert."""


class BucketShards:
    """Of a job: what each rank owns.

    Args:
        shape: The model.
        topology: The ranks; tensor and context parallelism are 1.
        overlaps: Whether gradients are reduced while they are computed.
    """

    def __init__(self, shape: ModelShape, topology: Topology, *, overlaps: bool) -> None:
        self._shape, self._topology, self._overlaps = shape, topology, overlaps
        self._owned, self._buckets = owned_operators(shape, topology), cache(self._buckets_of)

    def sizes(self, rank: int) -> dict[OperatorId, OperatorSize]:
        """Of what a rank owns, by operator, ascending."""
        at, found = self._topology.coordinates(rank), dict[OperatorId, int]()
        groups = ((at.pp, 0, False, at.dp, self._topology.dp), (at.pp, at.ep, True, at.edp, self._topology.edp))
        for stage, ep, experts, place, sharing in groups:
            for start, end, pieces in self._buckets(stage, ep, experts, sharing):
                share = (end - start) // sharing
                first = start + place * share
                for operator, begin, stop in pieces:
                    here = min(stop, first + share) - max(begin, first)
                    if here > 0:
                        found[operator] = found.get(operator, 0) + here
        return {one: OperatorSize(FULL * found[one], WEIGHTS * found[one]) for one in sorted(found)}

    def _buckets_of(
        self, stage: int, ep: int, experts: bool, sharing: int
    ) -> list[tuple[int, int, list[tuple[OperatorId, int, int]]]]:
        most = max(LEAST_BUCKET, PER_RANK * sharing) if self._overlaps else float("inf")
        operators = [one for one in self._owned[stage, ep] if one.is_expert == experts]
        buckets, pieces, start, end = [], list[tuple[OperatorId, int, int]](), 0, 0
        for operator, count in reversed(list(self._parameters(operators))):
            begin = pad_param_start(end)
            end = begin + count
            pieces.append((operator, begin, end))
            if end - start >= most:
                end = pad_bucket_end(end, sharing, False)
                buckets.append((start, end, pieces))
                pieces, start = [], end
        if pieces:
            buckets.append((start, pad_bucket_end(end, sharing, False), pieces))
        return buckets

    def _parameters(self, operators: Sequence[OperatorId]) -> Iterator[tuple[OperatorId, int]]:
        """In the order of the model: of each layer the first matrices of all experts, then the second ones."""
        for layer in sorted({one.layer for one in operators}):
            here = [one for one in operators if one.layer == layer]
            for operator in here:
                if operator.kind is not OperatorKind.EXPERT:
                    yield from ((operator, self._shape.parameters[operator] // PIECES) for _ in range(PIECES))
            for part in (2, 1):  # a gated unit has two of the one and one of the other
                for operator in here:
                    if operator.kind is OperatorKind.EXPERT:
                        yield operator, self._shape.parameters[operator] * part // 3
