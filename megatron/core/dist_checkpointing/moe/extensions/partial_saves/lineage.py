"""From which checkpoint the next one may leave experts out, and what routers counted since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from moe_ckpt.dense.chain import Chain


@dataclass
class ExpertLineage:
    """Where the copies of experts are that saving can continue from.

    Attributes:
        chain: Of the newest checkpoint of this training; None: the next one has to be complete.
        counts: By the iteration up to which they were counted, tokens that all ranks routed, of no checkpoint yet.
    """

    chain: Chain | None = None
    counts: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def counted(self) -> dict[int, tuple[int, ...]]:
        """By MoE layer and expert, tokens that all ranks routed to it since the checkpoint of `chain`."""
        return reduce(summed, self.counts.values(), {})

    def count(self, iteration: int, tokens: Mapping[int, Sequence[int]]) -> None:
        """Add tokens.

        Args:
            iteration: Up to which they were counted.
            tokens: By MoE layer and expert, of all ranks.
        """
        self.counts[iteration] = summed(self.counts.get(iteration, {}), tokens)

    def saved(self, chain: Chain) -> None:
        """The checkpoint of a chain is there. What was counted after it, while it was written, is of a later one."""
        self.chain = chain
        self.counts = {until: tokens for until, tokens in self.counts.items() if until > chain.iteration}


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
