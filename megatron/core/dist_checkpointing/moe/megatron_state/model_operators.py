"""All operators of a model and their sizes, also of those that other ranks own, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.utils import unwrap_model

from ..errors import UsageError
from ..types import ModelShape, OperatorId, iterate_operators
from .module_tree import is_plain_gpt, tree_of


def model_operators(chunks: Sequence[torch.nn.Module]) -> tuple[OperatorId, ...]:
    """The operators of the whole model that these chunks are a part of, ascending; the same on all ranks."""
    tree = tree_of(chunks)
    if tree is not None:
        return tree.operators
    config = unwrap_model(list(chunks))[0].config
    return tuple(iterate_operators(config.num_layers, config.num_moe_experts or 0, config.moe_layer_freq))


def model_shape(chunks: Sequence[torch.nn.Module]) -> ModelShape:
    """The whole model that these chunks are a part of, as the policies see it; the same on all ranks.

    Options that ModelShape does not know may make the live model larger: compare the counts of parameters before
    relying on them.

    Raises:
        UsageError: ModelShape cannot describe the model.
    """
    chunk = unwrap_model(list(chunks))[0]
    config = chunk.config
    if not is_plain_gpt(chunk):
        raise UsageError(f"the sizes of a {type(chunk).__name__} are not known: only a GPT can be shared out by them")
    frequency, learned = config.moe_layer_freq, chunk.position_embedding_type == "learned_absolute"
    latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    same_names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "normalization",
        "multi_latent_attention",
        *(latent if config.multi_latent_attention else ()),
    )
    return ModelShape(
        name="in training",
        vocab_size=chunk.vocab_size,
        num_experts=config.num_moe_experts or 0,
        moe_layer_freq=frequency if isinstance(frequency, int) else tuple(frequency),
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size or 0,
        moe_shared_expert_gate=config.moe_shared_expert_gate,
        max_position_embeddings=chunk.max_sequence_length if learned else 0,
        untie_embeddings_and_output_weights=not chunk.share_embeddings_and_output_weights,
        **{name: getattr(config, name) for name in same_names},
    )
