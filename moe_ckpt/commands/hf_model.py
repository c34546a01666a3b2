"""The shape of a model from its `config.json` of Hugging Face: sizes alone, for any family whose layers are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..hugging_face.config import Config

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss"),
)
"""`model_type` of those whose layers have the parts that a shape counts."""

LARGEST_COUNT = 100_000
"""Of layers, experts or heads of a model."""

_GATED_SHARED = ("qwen2_moe", "qwen3_next")
_NORMED = ("qwen3", "qwen3_moe", "qwen3_next")
_BIASED_QKV = ("qwen2", "qwen2_moe")


def is_hf_config(values: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a `config.json`: it names its family, and its layers as Hugging Face does."""
    inner = values.get("text_config", values)
    return "model_type" in values and isinstance(inner, dict) and "num_hidden_layers" in inner


def shape_values(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields of `ModelShape` that the config stands for.

    Args:
        values: Content of the file.
        place: Name of the file in errors.

    Raises:
        UsageError: The family is not known, or a size is missing or no whole number.
    """
    inner = values.get("text_config", values)
    config, family = Config(inner, place), inner.get("model_type", values["model_type"])
    if family not in FAMILIES:
        raise UsageError(
            f"{place}: model_type {family!r} is not known (known: {', '.join(FAMILIES)}): describe the model by the"
            " fields of ModelShape"
        )
    layers, ffn = config.number("num_hidden_layers"), config.number("intermediate_size")
    if layers > LARGEST_COUNT:
        raise UsageError(f"{place}: num_hidden_layers is {layers}, but must be at most {LARGEST_COUNT}")
    found: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": config.number("hidden_size"),
        "num_attention_heads": config.number("num_attention_heads"),
        "vocab_size": config.number("vocab_size"),
        "ffn_hidden_size": ffn,
        "gated_linear_unit": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "qk_layernorm": family in _NORMED or bool(config.get("use_qk_norm", False)),
        "add_qkv_bias": bool(config.get("attention_bias", family in _BIASED_QKV)),
        "add_bias_linear": family == "gpt_oss",
    }
    found |= _latent(config) if config.get("kv_lora_rank") else _grouped(config)
    if ahead := config.number("num_nextn_predict_layers", 0):
        found["note"] = f"Layers that predict further tokens ({ahead}) are not modelled: a rank may need more memory."
    elif family == "qwen3_next":
        found["note"] = (
            "Counted with attention in all layers: gated DeltaNet is of about the same size, with fewer scores."
        )
    if experts := _first(config, "num_experts", "num_local_experts", "n_routed_experts"):
        found |= _experts(config, family, experts, layers, ffn)
    return found


def _grouped(config: Config) -> dict[str, Any]:
    heads = config.number("num_attention_heads")
    width = config.number("head_dim", 0)
    return {"num_query_groups": config.number("num_key_value_heads", heads)} | ({"kv_channels": width} if width else {})


def _latent(config: Config) -> dict[str, Any]:
    """Attention of DeepSeek."""
    rank = config.number("q_lora_rank", 0)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": rank or None,
        "kv_lora_rank": config.number("kv_lora_rank"),
        "qk_head_dim": config.number("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.number("qk_rope_head_dim"),
        "v_head_dim": config.number("v_head_dim"),
    }


def _experts(config: Config, family: str, experts: int, layers: int, ffn: int) -> dict[str, Any]:
    width = config.number("moe_intermediate_size", ffn)
    shared = config.number("shared_expert_intermediate_size", 0) or config.number("n_shared_experts", 0) * width
    dense, step = config.number("first_k_dense_replace", 0), config.number("decoder_sparse_step", 1) or 1
    only = config.get("mlp_only_layers", [])
    if not isinstance(only, list) or not all(isinstance(at, int) for at in only):
        raise UsageError(f"{config.place}: mlp_only_layers is {only!r}, which must be a list of whole numbers")
    pattern = tuple(int(at >= dense and at not in only and (at + 1) % step == 0) for at in range(layers))
    return {
        "num_experts": experts,
        "moe_router_topk": _first(config, "num_experts_per_tok", "experts_per_token"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": 1 if all(pattern) else list(pattern),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": bool(shared) and family in _GATED_SHARED,
    }


def _first(config: Config, *names: str) -> int:
    """The first of these that is there; 0 without any."""
    return next((config.number(name) for name in names if config.get(name) is not None), 0)
