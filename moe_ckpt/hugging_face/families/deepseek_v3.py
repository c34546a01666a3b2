"""DeepSeek-V3 (2024): latent attention, a router of sigmoids with a bias, shared experts, dense layers first.

Layers that predict further tokens (MTP) follow the others in Hugging Face's numbering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError

from ..arguments import COMMON, layer_pattern, moe_layers, resolved
from ..config import Config, base_of
from ..rotary import scales
from ..weights import Vocabulary, Weight
from .layers import LLAMA_NAMES, ends, gated_mlp, norm_before_mlp, routed_experts

MODEL_TYPE, ARCHITECTURE = "deepseek_v3", "DeepseekV3ForCausalLM"


def arguments(config: Config) -> dict[str, Any]:
    """Megatron's arguments for a model of Hugging Face. Raises UsageError for what its modules do not compute."""
    for name, value in (("attention_bias", False), ("rope_interleave", True)):
        config.require(name, value)
    require_norm(config)
    return COMMON | latent_attention(config) | router_groups(config) | mixture(config)


def require_norm(config: Config) -> None:
    """Megatron divides the sigmoids of several experts by their sum, and leaves that of a single one. Raises UsageError
    for another model."""
    said = {"norm_topk_prob": config.get("norm_topk_prob", True)}
    Config(said, config.place).require("norm_topk_prob", config.number("num_experts_per_tok") > 1)


def mixture(config: Config) -> dict[str, Any]:
    """Layers, experts and router: dense layers first, shared experts, sigmoids with a bias. Raises UsageError."""
    config.require("hidden_act", "silu")
    layers, dense = config.number("num_hidden_layers"), config.number("first_k_dense_replace", 0)
    experts = config.number("n_routed_experts", config.get("num_local_experts"))
    width = config.number("moe_intermediate_size")
    return {
        "num_layers": layers,
        "hidden_size": config.number("hidden_size"),
        "num_attention_heads": config.number("num_attention_heads"),
        "ffn_hidden_size": config.number("intermediate_size"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "num_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": layer_pattern([layer >= dense for layer in range(layers)]),
        "moe_router_topk": config.number("num_experts_per_tok"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
        "moe_shared_expert_intermediate_size": width * config.number("n_shared_experts", 0),
        "moe_shared_expert_gate": False,
        "mtp_num_layers": config.number("num_nextn_predict_layers", 0),
    }


def latent_attention(config: Config) -> dict[str, Any]:
    """Latent attention (MLA). Raises UsageError for rotary embeddings that Megatron does not compute."""
    config.require("rms_norm_eps", 1e-6)  # transformers norms latents with that whatever the config says
    rope = config.rope()
    found: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config.number("kv_lora_rank"),
        "qk_head_dim": config.number("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": config.number("qk_rope_head_dim"),
        "v_head_dim": config.number("v_head_dim"),
        "rotary_base": base_of(rope, config.place),
        "rotary_scaling_factor": 1.0,
    }
    if rope["rope_type"] == "default":
        return found
    if rope["rope_type"] != "yarn" or (rope.get("beta_fast", 32), rope.get("beta_slow", 1)) != (32, 1):
        raise UsageError(
            f"{config.place}: rotary embeddings of type {rope['rope_type']!r} with beta_fast {rope.get('beta_fast')}"
            f" and beta_slow {rope.get('beta_slow')} cannot be converted, only 'yarn' with 32 and 1 can"
        )
    if missing := [name for name in (*_SCALES, "factor", _POSITIONS) if name not in rope]:
        raise UsageError(f"{config.place}: rope_scaling has no {', '.join(missing)}")
    if rope["mscale_all_dim"] and not rope["mscale"]:  # transformers scales softmax by the one, and angles by neither
        raise UsageError(
            f"{config.place}: mscale {rope['mscale']} with mscale_all_dim {rope['mscale_all_dim']} cannot be converted"
        )
    found |= {"rope_type": "yarn", "rotary_scaling_factor": float(rope["factor"]), _POSITIONS: rope[_POSITIONS]}
    return found | scales(rope, config.place)


_SCALES, _POSITIONS = ("mscale", "mscale_all_dim"), "original_max_position_embeddings"


def router_groups(config: Config) -> dict[str, Any]:
    """Groups of experts of which some are selected first. Raises UsageError where Megatron ranks them otherwise."""
    groups, selected = config.number("n_group", 1), config.number("topk_group", 1)
    if groups > 1 and config.number("num_experts_per_tok") // selected != 2:
        raise UsageError(
            f"{config.place}: topk_group {selected} with num_experts_per_tok {config.number('num_experts_per_tok')} "
            "cannot be converted: Megatron ranks groups by their best num_experts_per_tok / topk_group experts, "
            "Hugging Face by their best 2"
        )
    # All groups are selected, or there is one: the same as none.
    return {"moe_router_num_groups": groups, "moe_router_group_topk": selected} if groups > 1 else {}


def config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` for Megatron's arguments, without the vocabulary and the dtype. Raises UsageError."""
    found = mixture_config(saved, "DeepSeek-V3") | latent_config(saved)
    return found | {"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def mixture_config(saved: Mapping[str, Any], family: str) -> dict[str, Any]:
    """What `mixture` reads, from Megatron's arguments. Raises UsageError.

    Args:
        saved: Arguments of Megatron that the checkpoint was trained with.
        family: Name of the family in errors.
    """
    values = resolved(saved)
    with_experts, width = moe_layers(values), values["moe_ffn_hidden_size"]
    dense = with_experts.index(True) if True in with_experts else len(with_experts)
    if not all(with_experts[dense:]) or values["moe_shared_expert_intermediate_size"] % width:
        raise UsageError(
            f"no {family} has moe_layer_freq {values['moe_layer_freq']} with shared experts of "
            f"{values['moe_shared_expert_intermediate_size']} beside experts of {width}: dense layers come first, and "
            "shared experts are as wide as whole experts"
        )
    if saved.get("mtp_use_repeated_layer") and values["mtp_num_layers"] > 1:
        raise UsageError(
            f"--mtp-use-repeated-layer: no {family} predicts further tokens with one layer again and again"
        )
    return {
        "first_k_dense_replace": dense,
        "hidden_act": "silu",
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["ffn_hidden_size"],
        "max_position_embeddings": values["max_position_embeddings"],
        "moe_intermediate_size": width,
        "n_group": values["moe_router_num_groups"],
        "n_routed_experts": values["num_experts"],
        "n_shared_experts": values["moe_shared_expert_intermediate_size"] // width,
        "norm_topk_prob": values["moe_router_topk"] > 1,
        "num_attention_heads": values["num_attention_heads"],
        "num_experts_per_tok": values["moe_router_topk"],
        "num_hidden_layers": values["num_layers"],
        "num_nextn_predict_layers": values["mtp_num_layers"],
        "rms_norm_eps": values["norm_epsilon"],
        "rope_theta": float(values["rotary_base"]),
        "routed_scaling_factor": values["moe_router_topk_scaling_factor"],
        "tie_word_embeddings": not values["untie_embeddings_and_output_weights"],
        "topk_group": values["moe_router_group_topk"],
    }


def latent_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `latent_attention` reads, from Megatron's arguments."""
    values = resolved(saved)
    found = {
        "attention_bias": False,
        "kv_lora_rank": values["kv_lora_rank"],
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": values["q_lora_rank"],
        "qk_nope_head_dim": values["qk_head_dim"],
        "qk_rope_head_dim": values["qk_pos_emb_head_dim"],
        "v_head_dim": values["v_head_dim"],
    }
    # A stretch of 1 is none, whatever the type is called.
    if (values.get("rope_type") or "yarn") == "yarn" and values.get("rotary_scaling_factor", 1.0) != 1.0:
        scaling = {"type": "yarn", "factor": values["rotary_scaling_factor"], "beta_fast": 32, "beta_slow": 1}
        found["rope_scaling"] = scaling | {name: values[name] for name in (*_SCALES, _POSITIONS)}
    return found


def weights(needed: Mapping[str, Any], vocabulary: int) -> Iterator[Weight]:
    """All tensors of a model.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
    """
    return mixture_weights(needed, vocabulary, latent_weights)


Attention = Callable[[int, Mapping[str, Any]], Iterator[Weight]]


def mixture_weights(needed: Mapping[str, Any], vocabulary: int, attention: Attention) -> Iterator[Weight]:
    """All tensors of a model of this kind.

    Args:
        needed: Arguments of Megatron for this model.
        vocabulary: Rows of the embedding in Hugging Face's tensors, without Megatron's padding.
        attention: Gives the tensors of the attention of a layer.
    """
    yield from ends(vocabulary, needed)
    with_experts = moe_layers(needed)
    for layer, experts in enumerate(with_experts):
        yield from _layer(layer, needed, attention, experts=experts)
    for ahead in range(needed["mtp_num_layers"]):
        yield from _layer_ahead(ahead, needed, vocabulary, attention, experts=with_experts[-1])


def _layer(layer: int, needed: Mapping[str, Any], attention: Attention, *, experts: bool) -> Iterator[Weight]:
    hidden = needed["hidden_size"]
    yield from attention(layer, needed)
    yield norm_before_mlp(layer, hidden, experts=experts)
    if not experts:
        yield from gated_mlp(layer, "mlp", "mlp", (hidden, needed["ffn_hidden_size"]), LLAMA_NAMES)
        return
    yield from routed_experts(layer, "mlp", needed)
    if needed["moe_router_enable_expert_bias"]:
        bias = (f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (needed["num_experts"],))
        yield Weight(("mlp.router.expert_bias",), (bias,), layer=layer)
    if shared := needed["moe_shared_expert_intermediate_size"]:
        yield from gated_mlp(layer, "mlp.shared_experts", "mlp.shared_experts", (hidden, shared), LLAMA_NAMES)


def _layer_ahead(
    ahead: int, needed: Mapping[str, Any], vocabulary: int, attention: Attention, *, experts: bool
) -> Iterator[Weight]:
    """One layer that predicts a further token; Hugging Face repeats the embedding and the head of the model in it."""
    layer, hidden = needed["num_layers"] + ahead, needed["hidden_size"]
    at, table = f"model.layers.{layer}.", (vocabulary, hidden)
    yield Weight(
        ("embedding.word_embeddings.weight",), ((f"{at}embed_tokens.weight", table),), Vocabulary(), is_copy=True
    )
    if needed["untie_embeddings_and_output_weights"]:
        yield Weight(("output_layer.weight",), ((f"{at}shared_head.head.weight", table),), Vocabulary(), is_copy=True)
    own: dict[str, tuple[str, tuple[int, ...]]] = {
        "enorm.weight": ("enorm.weight", (hidden,)),
        "hnorm.weight": ("hnorm.weight", (hidden,)),
        "eh_proj.weight": ("eh_proj.weight", (hidden, 2 * hidden)),
        "final_layernorm.weight": ("shared_head.norm.weight", (hidden,)),
    }
    for ours, (theirs, shape) in own.items():
        yield Weight((ours,), ((at + theirs, shape),), ahead=ahead)
    for weight in _layer(layer, needed, attention, experts=experts):
        names = tuple(f"transformer_layer.{name}" for name in weight.names)
        yield replace(weight, names=names, layer=None, ahead=ahead)


def latent_weights(layer: int, needed: Mapping[str, Any]) -> Iterator[Weight]:
    """Latent attention of one layer with the norm before it.

    Args:
        layer: Number of the layer, from 0.
        needed: Arguments of Megatron for this model.
    """
    hidden, heads = needed["hidden_size"], needed["num_attention_heads"]
    rotated, plain, values = needed["qk_pos_emb_head_dim"], needed["qk_head_dim"], needed["v_head_dim"]
    queries, latent = needed["q_lora_rank"], needed["kv_lora_rank"]
    shapes: dict[tuple[str, ...], tuple[str, tuple[int, ...]]] = {
        ("linear_kv_down_proj.weight",): ("kv_a_proj_with_mqa", (latent + rotated, hidden)),
        ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"): ("kv_a_layernorm", (latent,)),
        ("linear_kv_up_proj.weight",): ("kv_b_proj", (heads * (plain + values), latent)),
        ("linear_proj.weight",): ("o_proj", (hidden, heads * values)),
    }
    if queries is None:
        shapes[("linear_q_proj.weight",)] = "q_proj", (heads * (plain + rotated), hidden)
    else:
        shapes |= {
            ("linear_q_down_proj.weight",): ("q_a_proj", (queries, hidden)),
            ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"): ("q_a_layernorm", (queries,)),
            ("linear_q_up_proj.weight",): ("q_b_proj", (heads * (plain + rotated), queries)),
        }
    for ours, (theirs, shape) in shapes.items():
        names = tuple(f"self_attention.{name}" for name in ours)
        yield Weight(names, ((f"model.layers.{layer}.self_attn.{theirs}.weight", shape),), layer=layer)
    norm = (f"model.layers.{layer}.input_layernorm.weight", (hidden,))
    yield Weight(("input_layernorm.weight",), (norm,), layer=layer)
