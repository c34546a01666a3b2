"""Qwen3-MoE (Yang et al., 2025): as Mixtral, with norms of queries and keys, and layers that may be dense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..arguments import COMMON, layer_pattern, moe_layers, resolved
from ..config import Config
from ..rotary import rotary, rotary_config
from ..weights import Weight
from .layers import LLAMA_NAMES, attention, ends, gated_mlp, norm_before_mlp, routed_experts

MODEL_TYPE, ARCHITECTURE = "qwen3_moe", "Qwen3MoeForCausalLM"


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("use_sliding_window", False)
    heads, layers = config.number("num_attention_heads"), config.number("num_hidden_layers")
    step, dense = config.number("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    with_experts = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return COMMON | {
        "num_layers": layers,
        "hidden_size": config.number("hidden_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.number("num_key_value_heads", heads),
        "kv_channels": config.number("head_dim", config.number("hidden_size") // heads),
        "ffn_hidden_size": config.number("intermediate_size"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        **rotary(config),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": True,
        "multi_latent_attention": False,
        "num_experts": config.number("num_experts", config.get("num_local_experts")),
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
        "moe_layer_freq": layer_pattern(with_experts),
        "moe_router_topk": config.number("num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        # A softmax over the selected experts is one over all of them, normalized again.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 0,
        "mtp_num_layers": 0,
    }


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    values = resolved(saved)
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": values["kv_channels"],
        "hidden_act": "silu",
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["ffn_hidden_size"],
        "max_position_embeddings": values["max_position_embeddings"],
        "mlp_only_layers": [layer for layer, experts in enumerate(moe_layers(values)) if not experts],
        "moe_intermediate_size": values["moe_ffn_hidden_size"],
        "norm_topk_prob": not values["moe_router_pre_softmax"],
        "num_attention_heads": values["num_attention_heads"],
        "num_experts": values["num_experts"],
        "num_experts_per_tok": values["moe_router_topk"],
        "num_hidden_layers": values["num_layers"],
        "num_key_value_heads": values["num_query_groups"],
        "rms_norm_eps": values["norm_epsilon"],
        **rotary_config(saved),
        "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
        "use_sliding_window": False,
    }


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    yield from ends(vocabulary, needed)
    for layer, experts in enumerate(moe_layers(needed)):
        yield from attention(layer, needed)
        yield norm_before_mlp(layer, needed["hidden_size"], experts=experts)
        if experts:
            yield from routed_experts(layer, "mlp", needed)
        else:
            yield from gated_mlp(layer, "mlp", "mlp", (needed["hidden_size"], needed["ffn_hidden_size"]), LLAMA_NAMES)
