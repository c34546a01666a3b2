"""Seconds of a GPU and of a network: operations and bytes by a roofline, collectives by a latency and a rate.

A matrix product takes its operations at the share of the peak that tuned kernels reach in its precision, and the
traffic of its operands beside that: with the narrow experts of fine-grained MoE models the operands weigh as much. All
other kernels (norms, residuals, activations, the permutations of tokens to experts and back) only move bytes. Scores of
attention stay in 16 bits where the rest is in eight, and what is cast to eight bits is read and written once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, OperatorKind

PASSES = 3
"""A matrix product runs forward, for the gradients of its input, and for those of its weights."""

BLOCK_BYTES = 68
"""Of each channel of the hidden size and token, what the kernels between matrix products of a dense block read and
write, forward and backward: twice the 34 bytes of its activations (Korthikanti et al. 2022, 4.1)."""

PERMUTED_BYTES = 32
"""Of each channel of a routed token: permuted, sorted by local expert and both undone, each read and written in 16
bits, forward and backward (Megatron-Core's all-to-all dispatcher)."""

ACTIVATION_BYTES = 16
"""Of each channel within an expert or dense block: a gated activation reads two values and writes one, backward reads
three and writes two, in 16 bits."""

SIXTEEN_BITS = 2


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches: operations per second of matrix products in a job's precision, and of attention in 16 bits;
    bytes per second of its memory, infinite where that is not known."""

    flops: float
    attention_flops: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Work:
    """What a token costs in one operator, forward and backward: FLOPs of matrix products, FLOPs of attention's scores,
    bytes of memory; and bytes that each pass over the weights moves, whatever the tokens."""

    flops: float
    score_flops: float = 0.0
    token_bytes: float = 0.0
    weight_bytes: float = 0.0

    def seconds(self, tokens: float, rates: Rates, ranks: int = 1) -> float:
        """Seconds of this work on one of the GPUs that share the operator's weights.

        Args:
            tokens: Tokens of this GPU; each of the others has as many.
            rates: FLOPs and bytes per second that kernels reach.
            ranks: Number of GPUs that share the weights.
        """
        moved = tokens * self.token_bytes + self.weight_bytes / ranks
        products_s = tokens * (self.flops / rates.flops + self.score_flops / rates.attention_flops)
        return products_s + moved / rates.memory_bytes_per_s


def works(shape: ModelShape, seq_length: int, element_bytes: int) -> Iterator[tuple[OperatorId, Work]]:
    """The work of each operator for one token of the model's input, averaged over tokens, all experts alike.

    Args:
        shape: The model.
        seq_length: Tokens of a sequence.
        element_bytes: Bytes of an element in matrix products: 2 for BF16, 1 for FP8.
    """
    cast = 1.5 if element_bytes < SIXTEEN_BITS else 1.0
    for operator, parameters in shape.parameters.items():
        weights = PASSES * parameters * max(element_bytes, SIXTEEN_BITS)
        hidden, topk = shape.hidden_size, shape.moe_router_topk
        if operator.kind is OperatorKind.EMBEDDING:
            yield operator, Work(0.0, token_bytes=2 * SIXTEEN_BITS * hidden)
        elif operator.kind is OperatorKind.HEAD:
            operands = PASSES * SIXTEEN_BITS * (hidden + shape.vocab_size)
            yield operator, Work(6.0 * shape.vocab_size * hidden, 0.0, operands, weights)
        elif operator.is_expert:
            width = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
            moved = cast * _products(shape, width) + ACTIVATION_BYTES * width + PERMUTED_BYTES * hidden
            share = topk / shape.num_experts
            yield operator, Work(6.0 * parameters * share, 0.0, moved * share, weights)
        elif operator.kind is OperatorKind.NON_EXPERT:
            width = shape.moe_shared_expert_intermediate_size if operator.layer in shape.moe_layers else 0
            width = width if operator.layer in shape.moe_layers else shape.ffn_hidden_size
            block = cast * PASSES * SIXTEEN_BITS * (2 * hidden + 4 * attention_width(shape))
            ffn = cast * _products(shape, width) + ACTIVATION_BYTES * width if width else 0.0
            scores = 6.0 * seq_length * attention_width(shape)
            yield operator, Work(6.0 * parameters, scores, BLOCK_BYTES * hidden + block + ffn, weights)
        else:
            yield operator, Work(6.0 * parameters, 0.0, PASSES * SIXTEEN_BITS * hidden, weights)


def _products(shape: ModelShape, width: int) -> float:
    """Bytes of inputs and outputs of a feed-forward block's products, for one token and all passes."""
    inner = (3 if shape.gated_linear_unit else 2) * width
    return PASSES * SIXTEEN_BITS * (2 * shape.hidden_size + inner)


def attention_width(shape: ModelShape) -> float:
    """Channels of all heads together; with latent attention the mean of what scores and values multiply."""
    if shape.multi_latent_attention:
        return shape.num_attention_heads * (shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim) / 2
    return shape.num_attention_heads * (shape.kv_channels or shape.hidden_size // shape.num_attention_heads)


# Seconds of collectives over groups of ranks, by the affine law of a latency and a rate (MoEvement App. C).


@dataclass(frozen=True)
class GroupSpread:
    """How a group lies over nodes: `inside` of its `ranks` on each of them.

    copies: of what a rank sends in an all-to-all, the share that crosses between nodes; None: as evenly over all ranks.
    """

    ranks: int
    inside: int
    copies: float | None = None

    @classmethod
    def of(cls, ranks: int, distance: int, ranks_per_node: int) -> GroupSpread:
        """The spread of a group of ranks at equal distances.

        Args:
            ranks: Size of the group.
            distance: Distance of neighbours in the group, in the order of all ranks.
            ranks_per_node: Ranks on each node.
        """
        return cls(ranks, max(1, min(ranks, ranks_per_node // distance)))

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return -(-self.ranks // self.inside)


@dataclass(frozen=True)
class Links:
    """Bytes per second that one rank reaches within its node and to others, and seconds per step of a collective."""

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    latency_s: float

    def ring_s(self, size: float, spread: GroupSpread) -> float:
        """Seconds of a reduce-scatter or an all-gather: within nodes first, then each rank's part between them.

        Args:
            size: Bytes of the whole buffer.
            spread: Where the ranks of the group lie.
        """
        steps = spread.inside - 1 + spread.nodes - 1
        local_s = (spread.inside - 1) / spread.inside * size / self.intra_bytes_per_s
        return steps * self.latency_s + local_s + self.ring_network_s(size, spread)

    def ring_network_s(self, size: float, spread: GroupSpread) -> float:
        """The seconds of `ring_s` in which the NIC is busy, without latency.

        Args:
            size: Bytes of the whole buffer.
            spread: Where the ranks of the group lie.
        """
        return (spread.nodes - 1) / spread.nodes * size / spread.inside / self.inter_bytes_per_s

    def all_to_all_s(self, size: float, spread: GroupSpread) -> float:
        """Seconds of an all-to-all, within the node and to other nodes at once.

        Args:
            size: Bytes that each rank sends, evenly over the group.
            spread: Where the ranks of the group lie.
        """
        # What comes to a node once continues from there to all ranks of it that have experts for it.
        within = spread.ranks if spread.copies is None else spread.inside
        local_s = (spread.inside - 1) / within * size / self.intra_bytes_per_s
        return (spread.ranks - 1) * self.latency_s + max(local_s, self.all_to_all_network_s(size, spread))

    def all_to_all_network_s(self, size: float, spread: GroupSpread) -> float:
        """The seconds of `all_to_all_s` in which the NIC is busy, without latency.

        Args:
            size: Bytes that each rank sends, evenly over the group.
            spread: Where the ranks of the group lie.
        """
        crossing = (spread.ranks - spread.inside) / spread.ranks if spread.copies is None else spread.copies
        return crossing * size / self.inter_bytes_per_s
