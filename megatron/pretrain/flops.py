"""What the planner knows of a model that is about to be built: its shape, and its floating point operations."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.moe.types import ModelShape
from megatron.core.transformer.transformer_config import TransformerConfig
from moe_ckpt.simulator.cost import operator_flops


def flops_per_token(transformer: TransformerConfig, *, vocab_size: int, seq_length: int) -> float:
    """Forward and backward, for one input token of a sequence of `seq_length`; recomputation counts once.

    vocab_size: padded. See `moe_ckpt.simulator.cost.operator_flops`.
    """
    return sum(operator_flops(shape_of(transformer, vocab_size), seq_length).values())


def shape_of(transformer: TransformerConfig, vocab_size: int, *, tied: bool = True) -> ModelShape:
    """The model as plans describe it. vocab_size: padded. tied: whether both embeddings are one."""
    frequency: Any = transformer.moe_layer_freq
    return ModelShape(
        "of this job",
        transformer.num_layers,
        transformer.hidden_size,
        transformer.num_attention_heads,
        vocab_size,
        transformer.ffn_hidden_size or 1,  # core rounds it down to 64, where no layer is dense that does not matter
        num_experts=transformer.num_moe_experts or 0,
        moe_router_topk=transformer.moe_router_topk,
        moe_ffn_hidden_size=transformer.moe_ffn_hidden_size,
        moe_layer_freq=tuple(frequency) if isinstance(frequency, list) else frequency,
        moe_shared_expert_intermediate_size=transformer.moe_shared_expert_intermediate_size or 0,
        num_query_groups=transformer.num_query_groups,
        kv_channels=transformer.kv_channels,
        gated_linear_unit=transformer.gated_linear_unit,
        qk_layernorm=transformer.qk_layernorm,
        normalization=transformer.normalization,
        untie_embeddings_and_output_weights=not tied,
    )
