"""GLM-4.5 (2025): the experts of DeepSeek-V3 with grouped-query attention, of which a part of each head is rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..arguments import COMMON, resolved
from ..config import Config
from ..rotary import rotary, rotary_config
from ..weights import Weight
from .deepseek_v3 import mixture, mixture_config, mixture_weights, require_norm, router_groups
from .layers import attention

MODEL_TYPE, ARCHITECTURE = "glm4_moe", "Glm4MoeForCausalLM"


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    require_norm(config)
    heads = config.number("num_attention_heads")
    rotated = config.rope().get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
    return COMMON | router_groups(config) | mixture(config) | {
        "num_query_groups": config.number("num_key_value_heads", heads),
        "kv_channels": config.number("head_dim", config.number("hidden_size") // heads),
        **rotary(config, float(rotated)),
        "rotary_percent": float(rotated),
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        "multi_latent_attention": False,
    }  # fmt: skip


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    values = resolved(saved)
    return mixture_config(saved, "GLM-4.5") | {
        "attention_bias": values["add_qkv_bias"],
        "head_dim": values["kv_channels"],
        "num_key_value_heads": values["num_query_groups"],
        "partial_rotary_factor": values["rotary_percent"],
        "use_qk_norm": values["qk_layernorm"],
        **rotary_config(saved),
    }


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    return mixture_weights(needed, vocabulary, attention)
