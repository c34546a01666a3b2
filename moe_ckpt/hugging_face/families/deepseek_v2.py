"""DeepSeek-V2 (2024): as V3, with a softmax over all experts that is not normalized again, and no bias of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..arguments import COMMON
from ..config import Config
from ..weights import Weight
from .deepseek_v3 import latent_attention, latent_config, latent_weights, mixture, mixture_config, mixture_weights

MODEL_TYPE, ARCHITECTURE = "deepseek_v2", "DeepseekV2ForCausalLM"
_ROUTER = {
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": False,
}


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    for name in ("attention_bias", "mlp_bias", "norm_topk_prob"):
        config.require(name, False)
    method = config.get("topk_method", "greedy")
    if method != "greedy" and config.number("n_group", 1) > config.number("topk_group", 1):
        raise UsageError(
            f"{config.place}: topk_method {method!r} with n_group {config.number('n_group', 1)} cannot be converted:"
            " Megatron ranks groups by the sum of their best experts, DeepSeek-V2 by the best one"
        )
    return COMMON | latent_attention(config) | mixture(config) | _ROUTER


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    found = mixture_config(saved, "DeepSeek-V2") | latent_config(saved)
    return found | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"}


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    return mixture_weights(needed, vocabulary, latent_weights)
