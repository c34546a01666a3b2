"""Megatron's arguments as a checkpoint records them, with what Megatron derives where they are silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

COMMON = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "layernorm_zero_centered_gamma": False,
    # No tensor shows these, and no family computes with them: an export that ignored them would be another model.
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "no_rope_freq": None,
    "softmax_scale": None,
    "qk_l2_norm": False,
    "use_mup": False,
    "apply_residual_connection_post_layernorm": False,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "moe_router_topk_limited_devices": None,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
}
"""What all families need unless they say otherwise."""


def ffn_width(hidden: int, *, swiglu: bool) -> int:
    """As Megatron-LM takes it without `--ffn-hidden-size`.

    Args:
        hidden: Hidden size of the model.
        swiglu: Whether `--swiglu` is given, which has a third matrix.
    """
    return int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def resolved(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with defaults of Megatron that depend on others filled in."""
    found = dict(saved)
    if found.get("norm_epsilon") is None and "layernorm_epsilon" in found:  # as newer Megatron-LM records it
        found["norm_epsilon"] = found["layernorm_epsilon"]
    heads = found.get("num_attention_heads")
    if found.get("kv_channels") is None and heads:
        found["kv_channels"] = found["hidden_size"] // heads
    if found.get("num_query_groups") is None or found.get("group_query_attention") is False:
        found["num_query_groups"] = heads
    if "apply_layernorm_1p" in found:  # as older Megatron-LM records it
        found.setdefault("layernorm_zero_centered_gamma", found["apply_layernorm_1p"])
    if found.get("ffn_hidden_size") is None and found.get("hidden_size"):
        found["ffn_hidden_size"] = ffn_width(found["hidden_size"], swiglu=True)
    if found.get("moe_ffn_hidden_size") is None:
        found["moe_ffn_hidden_size"] = found.get("ffn_hidden_size")
    for name, default in _DEFAULTS.items():
        if found.get(name) is None:
            found[name] = default
    step = found["moe_layer_freq"]
    if isinstance(step, int) and step > 1:
        found["moe_layer_freq"] = [int(layer % step == 0) for layer in range(int(found["num_layers"]))]
    if isinstance(found["moe_layer_freq"], list) and all(found["moe_layer_freq"]):
        found["moe_layer_freq"] = 1
    if found.get("window_size"):
        found["window_size"] = tuple(found["window_size"])
        step, layers = found.get("window_attn_skip_freq"), range(1, int(found["num_layers"]) + 1)
        if not isinstance(step, list):
            found["window_attn_skip_freq"] = [int(step is None or layer % step != 0) for layer in layers]
    return found


_DEFAULTS: dict[str, Any] = {
    "softmax_type": "vanilla",
    "rotary_percent": 1.0,
    "add_qkv_bias": False,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 0,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_enable_expert_bias": False,
    "moe_router_num_groups": 1,
    "moe_router_group_topk": 1,
    "multi_latent_attention": False,
    "rope_type": "yarn",
    "original_max_position_embeddings": 4096,  # for which Megatron-LM has no flag
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "qk_layernorm": False,
    "mtp_num_layers": 0,
}


def require_same(saved: Mapping[str, Any], needed: Mapping[str, Any], what: str) -> None:
    """Raises UsageError naming the first arguments in which a checkpoint is not what a model of Hugging Face needs.

    Args:
        saved: Arguments of Megatron that the checkpoint was trained with.
        needed: Arguments of Megatron that a model with the config of Hugging Face has.
        what: Name of that model in the error.
    """
    have, want = resolved(saved), resolved(needed)
    wrong = [
        f"{name} is {have[name]}, not {want[name]}" for name in needed if name in have and have[name] != want[name]
    ]
    balancing = saved.get("moe_router_load_balancing_type")
    if balancing in ("sinkhorn", "quantile_balancing"):
        wrong.append(f"moe_router_load_balancing_type is {balancing}, not a loss, and chooses other experts")
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise UsageError(f"the checkpoint is not a {what}: {'; '.join(wrong[:3])}{more}")


def moe_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts."""
    pattern, layers = resolved(arguments)["moe_layer_freq"], int(arguments["num_layers"])
    return [True] * layers if pattern == 1 else [bool(one) for one in pattern]


def layer_pattern(with_experts: list[bool]) -> int | list[int]:
    """As `--moe-layer-freq` says it."""
    return 1 if all(with_experts) else [int(one) for one in with_experts]
