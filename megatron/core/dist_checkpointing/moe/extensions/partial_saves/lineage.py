"""From which checkpoint the next one may leave experts out, and what routers counted since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_ckpt.dense.chain import Chain


@dataclass
class ExpertLineage:
    """Where the copies of experts are that saving can continue from.

    Attributes:
        chain: Of the newest checkpoint of this training; None: the next one has to be complete.
        counted: By MoE layer and expert, tokens that all ranks routed to it since the checkpoint of `chain`.
    """

    chain: Chain | None = None
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def count(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Add tokens of all ranks."""
        self.counted = summed(self.counted, tokens)

    def saved(self, chain: Chain | None) -> None:
        """The checkpoint of a chain is there."""
        self.chain, self.counted = chain, {}


def summed(first: Mapping[int, Sequence[int]], second: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The sums of the numbers of each layer; a layer that one of them lacks counts as zeros there.

    Args:
        first: Numbers by layer.
        second: As many numbers by layer.
    """
    return {
        layer: tuple(map(sum, zip(*(rows[layer] for rows in (first, second) if layer in rows), strict=True)))
        for layer in sorted({*first, *second})
    }
