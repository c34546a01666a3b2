"""Mixtral (Jiang et al., 2024): grouped-query attention, experts in every layer, softmax over the selected ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..arguments import COMMON, resolved
from ..config import Config
from ..rotary import rotary, rotary_config
from ..weights import Weight
from .layers import attention, ends, norm_before_mlp, routed_experts

MODEL_TYPE, ARCHITECTURE = "mixtral", "MixtralForCausalLM"
EXPERTS = "block_sparse_moe", ("w1", "w3", "w2")


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    config.require("hidden_act", "silu")
    config.require("sliding_window", None)
    return grouped_softmax(config)


def grouped_softmax(config: Config) -> dict[str, Any]:
    """Grouped-query attention, and a softmax over the selected experts of every layer. Raises UsageError."""
    heads = config.number("num_attention_heads")
    return COMMON | {
        "num_layers": config.number("num_hidden_layers"),
        "hidden_size": config.number("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.number("num_key_value_heads", heads),
        "kv_channels": config.number("head_dim", config.number("hidden_size") // heads),
        "norm_epsilon": config.get("rms_norm_eps", 1e-5),
        **rotary(config),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": False,
        "multi_latent_attention": False,
        "num_experts": config.number("num_local_experts"),
        "moe_ffn_hidden_size": config.number("intermediate_size"),
        "moe_layer_freq": 1,
        "moe_router_topk": config.number("num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 0,
        "mtp_num_layers": 0,
    }


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    values = resolved(saved)
    return {
        "hidden_act": "silu",
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["moe_ffn_hidden_size"],
        "num_hidden_layers": values["num_layers"],
        "num_attention_heads": values["num_attention_heads"],
        "num_key_value_heads": values["num_query_groups"],
        "head_dim": values["kv_channels"],
        "max_position_embeddings": values["max_position_embeddings"],
        "num_experts_per_tok": values["moe_router_topk"],
        "num_local_experts": values["num_experts"],
        "rms_norm_eps": values["norm_epsilon"],
        **rotary_config(saved),
        "sliding_window": None,
        "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
    }


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    yield from ends(vocabulary, needed)
    for layer in range(needed["num_layers"]):
        yield from attention(layer, needed)
        yield norm_before_mlp(layer, needed["hidden_size"], experts=True)
        yield from routed_experts(layer, EXPERTS[0], needed, EXPERTS[1])
