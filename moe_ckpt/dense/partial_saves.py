"""Which experts successive dense checkpoints hold: `--save-experts` and the flags beside it. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.moe.policy.partial import Stages, by_load, in_turn, next_position
from megatron.core.dist_checkpointing.moe.types import OperatorId, expert

from .chain import Chain

Rows = Mapping[int, Sequence[int]]
"""By MoE layer, a number for each expert."""


@dataclass(frozen=True)
class PartialSaves:
    """The choice of experts, by the policies that snapshots of `pec` follow too.

    stages: the MoE layers of each pipeline stage. k: experts per MoE layer in each checkpoint. ep: expert-parallel
    ranks, among which `sequential` spreads them evenly, and each of which has a capacity with `load-aware`.
    """

    stages: Stages
    num_experts: int
    stacked_layers: int | None
    ep: int
    content: str
    k: int
    selection: str
    scope: str

    @property
    def counts_tokens(self) -> bool:
        """Whether the choice depends on where routers send tokens."""
        return self.selection == "load-aware"

    @property
    def layers(self) -> tuple[int, ...]:
        """All MoE layers, ascending."""
        return tuple(sorted(layer for stage in self.stages for layer in stage))

    def continues(self, previous: Chain | None) -> bool:
        """Whether `previous` is of the same state, so that experts can be left to it and to those that it names."""
        return (
            previous is not None
            and previous.content == self.content
            and tuple(sorted(previous.holders)) == self.layers
            and previous.num_experts == self.num_experts
        )

    def complete(self, iteration: int, mark: str) -> Chain:
        """The chain of a checkpoint of all experts.

        Args:
            iteration: Iteration of the checkpoint.
            mark: Its mark: 16 random hexadecimal digits.
        """
        holders = {layer: (iteration,) * self.num_experts for layer in self.layers}
        zeros = self._zeros if self.counts_tokens else {}
        return Chain(
            iteration, holders, {iteration: mark}, 0, self.stacked_layers, self.content, self.scope, zeros, zeros
        )

    def following(self, previous: Chain, iteration: int, mark: str, counted: Rows) -> Chain:
        """The chain of the next checkpoint, with the experts that the policy selects.

        Args:
            previous: The chain of the checkpoint before it.
            iteration: Iteration of the next checkpoint.
            mark: Its mark: 16 random hexadecimal digits.
            counted: Tokens that were routed to each expert since the previous checkpoint, by layer, the same on all
                ranks; a layer that is missing has none.
        """
        previous = self._with_tokens(previous, counted)
        if self.counts_tokens:
            unsaved, ages = _by_expert(previous.unsaved), _by_expert(previous.ages)
            chosen, position = by_load(self.stages, self.num_experts, self.k, unsaved, ages, self.ep), previous.position
        else:
            last, position = _by_expert(previous.holders), previous.position
            chosen = in_turn(self.stages, self.num_experts, self.k, last, position, self.ep)
            position = next_position(position, self.k, self.num_experts)
        return previous.followed_by(iteration, mark, chosen, position)

    @property
    def _zeros(self) -> dict[int, tuple[int, ...]]:
        return {layer: (0,) * self.num_experts for layer in self.layers}

    def _with_tokens(self, chain: Chain, counted: Rows) -> Chain:
        if not self.counts_tokens:
            return replace(chain, scope=self.scope, unsaved={}, ages={})
        before, ages = chain.unsaved or self._zeros, chain.ages or _ages(chain)
        nothing = (0,) * self.num_experts
        unsaved = {
            layer: tuple(old + new for old, new in zip(row, counted.get(layer, nothing), strict=True))
            for layer, row in before.items()
        }
        return replace(chain, scope=self.scope, unsaved=unsaved, ages=ages)


def after_loading(chain: Chain) -> Chain:
    """The chain to continue from when its iteration was loaded: what experts learned since their copies is gone, so
    that nothing of it is unsaved any more."""
    return replace(chain, unsaved={layer: (0,) * len(row) for layer, row in chain.unsaved.items()})


def _ages(chain: Chain) -> dict[int, tuple[int, ...]]:
    """How many checkpoints that the chain names came after the newest copy of each expert."""
    newer = sorted(chain.iterations, reverse=True)
    return {layer: tuple(newer.index(holder) for holder in row) for layer, row in chain.holders.items()}


def _by_expert(rows: Rows) -> dict[OperatorId, int]:
    return {expert(layer, index): number for layer, row in rows.items() for index, number in enumerate(row)}
