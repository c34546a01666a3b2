"""GPT-OSS (OpenAI, 2025): biases in all linear layers and the router, sinks of attention, experts in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..arguments import resolved
from ..config import Config
from ..rotary import rotary_config
from ..weights import ExpertsOfLayer, Weight
from . import mixtral
from .layers import attention, ends, norm_before_mlp

MODEL_TYPE, ARCHITECTURE = "gpt_oss", "GptOssForCausalLM"
EXPERTS = None
"""Hugging Face has those of a layer in one tensor only."""

_OWN = {
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "softmax_type": "learnable",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    config.require("hidden_act", "silu")
    config.require("attention_bias", True)
    config.require("swiglu_limit", _OWN["activation_func_clamp_value"])
    if config.get("rope_parameters", config.get("rope_scaling")) is None:
        raise UsageError(f"{config.place} has no rope_scaling: give the config as it is published")
    return mixtral.grouped_softmax(config) | _OWN | _windows(config)


def _windows(config: Config) -> dict[str, Any]:
    layers = config.number("num_hidden_layers")
    kinds = config.get("layer_types", [_FULL if layer % 2 else _SLIDING for layer in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise UsageError(f"{config.place}: layer_types has to give each layer {_SLIDING!r} or {_FULL!r}")
    if _SLIDING not in kinds:
        return {"window_size": None}
    width = config.number("sliding_window")
    if not width:
        raise UsageError(f"{config.place}: sliding_window is 0, which must be 1 or more")
    # Megatron counts the tokens before the one that attends.
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": [int(kind == _SLIDING) for kind in kinds]}


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    values = resolved(saved)
    window = values.get("window_size")
    sliding = values["window_attn_skip_freq"] if window else [0] * values["num_layers"]
    return mixtral.config(saved) | {
        "attention_bias": True,
        "layer_types": [_SLIDING if one else _FULL for one in sliding],
        "sliding_window": window[0] + 1 if window else None,
        "swiglu_limit": values["activation_func_clamp_value"],
        "rope_scaling": {"rope_type": "default"},  # without, transformers takes that of the published models
        **rotary_config(saved),
    }


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    hidden, heads, experts = needed["hidden_size"], needed["num_attention_heads"], needed["num_experts"]
    width = needed["moe_ffn_hidden_size"]
    own: dict[str, tuple[str, tuple[int, ...]]] = {
        "self_attention.linear_proj.bias": ("self_attn.o_proj.bias", (hidden,)),
        "self_attention.core_attention.softmax_offset": ("self_attn.sinks", (heads,)),
        "mlp.router.weight": ("mlp.router.weight", (experts, hidden)),
        "mlp.router.bias": ("mlp.router.bias", (experts,)),
    }
    of_experts: dict[str, tuple[str, tuple[int, ...]]] = {
        "linear_fc1.weight": ("gate_up_proj", (experts, hidden, 2 * width)),
        "linear_fc1.bias": ("gate_up_proj_bias", (experts, 2 * width)),
        "linear_fc2.weight": ("down_proj", (experts, width, hidden)),
        "linear_fc2.bias": ("down_proj_bias", (experts, hidden)),
    }
    yield from ends(vocabulary, needed)
    for layer in range(needed["num_layers"]):
        at = f"model.layers.{layer}."
        yield from attention(layer, needed)
        yield norm_before_mlp(layer, hidden, experts=True)
        for ours, (theirs, shape) in own.items():
            yield Weight((ours,), ((at + theirs, shape),), layer=layer)
        for ours, (theirs, shape) in of_experts.items():
            form = ExpertsOfLayer(gated="fc1" in ours)
            yield Weight((f"mlp.experts.experts.{ours}",), ((f"{at}mlp.experts.{theirs}", shape),), form, layer)
