"""The models of the papers, from their published hyper-parameters."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import ModelShape


@dataclass(frozen=True)
class PublishedModel:
    """A model's published size: all parameters, and where the figure stands."""

    total_parameters: int
    source: str


_SHAPES = (
    ModelShape(
        name="GPT-125M-8E",
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        vocab_size=50257,
        ffn_hidden_size=3072,
        num_experts=8,
        moe_router_topk=1,
        moe_layer_freq=(0, 1) * 6,
        max_position_embeddings=1024,
        add_bias_linear=True,
        normalization="LayerNorm",
        note="GPT-2's vocabulary and 1,024 learned positions; the paper gives neither.",
    ),
    ModelShape(
        name="GPT-350M-16E",
        num_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=50257,
        ffn_hidden_size=4096,
        num_experts=16,
        moe_router_topk=1,
        moe_layer_freq=(0, 1) * 12,
        max_position_embeddings=1024,
        add_bias_linear=True,
        normalization="LayerNorm",
        note=(
            "The published hyper-parameters give 1.87 G parameters, not the published 1.7 G; the published composition"
            " of its checkpoint (MoC Fig. 2) fits the hyper-parameters."
        ),
    ),
    ModelShape(
        name="GPT2-MoE-Small",
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        vocab_size=50257,
        ffn_hidden_size=3072,
        num_experts=8,
        moe_router_topk=1,
        moe_layer_freq=(0, 1) * 6,
        max_position_embeddings=1024,
        add_bias_linear=True,
        normalization="LayerNorm",
        note="The same shape as GPT-125M-8E: the PEC preprint and MoC-System train one model under two names.",
    ),
    ModelShape(
        name="MoE-LLaVa",
        num_layers=24,
        hidden_size=2048,
        num_attention_heads=32,
        vocab_size=100352,
        ffn_hidden_size=5632,
        num_experts=4,
        moe_router_topk=2,
        moe_layer_freq=(0, 1) * 12,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        normalization="LayerNorm",
        note=(
            "StableLM-1.6B with 4 experts in every other layer, without the vision tower. MoEvement Table 2 gives it 32"
            " layers, with which its 2.9 G cannot be met; StableLM-1.6B has 24 layers and 32 attention heads."
        ),
    ),
    ModelShape(
        name="GPT-MoE",
        num_layers=12,
        hidden_size=1536,
        num_attention_heads=16,
        vocab_size=50257,
        ffn_hidden_size=6144,
        num_experts=32,
        moe_router_topk=6,
        max_position_embeddings=2048,
        add_bias_linear=True,
        normalization="LayerNorm",
        note=(
            "The hidden size is not published: 1,536 is chosen so that total and active parameters match MoEvement"
            " Table 2 (7.3 G and 1.6 G)."
        ),
    ),
    ModelShape(
        name="QWen-MoE",
        num_layers=24,
        hidden_size=2048,
        num_attention_heads=16,
        vocab_size=151936,
        ffn_hidden_size=5632,
        num_experts=60,
        moe_router_topk=4,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=5632,
        moe_shared_expert_gate=True,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        add_qkv_bias=True,
        note=(
            "Qwen1.5-MoE-A2.7B. The 64 experts, 8 of them active, of MoEvement Table 2 are 60 routed ones, 4 of them"
            " active, and a shared expert of the size of 4."
        ),
    ),
    ModelShape(
        name="DeepSeek-MoE",
        num_layers=28,
        hidden_size=2048,
        num_attention_heads=16,
        vocab_size=102400,
        ffn_hidden_size=10944,
        num_experts=64,
        moe_router_topk=8,
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816,
        moe_layer_freq=(0,) + (1,) * 27,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        note=(
            "DeepSeekMoE-16B. MoEvement Table 2 says that 8 experts are active, the model's own report routes each"
            " token to 6 of 64 beside 2 shared ones; that changes no bytes."
        ),
    ),
    ModelShape(
        name="DeepSeek-V3-671B",
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        vocab_size=129280,
        ffn_hidden_size=18432,
        num_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=(0,) * 3 + (1,) * 58,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        multi_latent_attention=True,
        q_lora_rank=1536,
        note="Without the multi-token-prediction module.",
    ),
    ModelShape(
        name="Mixtral-8x7B",
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        vocab_size=32000,
        ffn_hidden_size=14336,
        num_experts=8,
        moe_router_topk=2,
        num_query_groups=8,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        note="Mixtral-8x7B-v0.1.",
    ),
    ModelShape(
        name="Qwen3-30B-A3B",
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        vocab_size=151936,
        ffn_hidden_size=6144,
        num_experts=128,
        moe_router_topk=8,
        moe_ffn_hidden_size=768,
        num_query_groups=4,
        kv_channels=128,
        gated_linear_unit=True,
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
        note="All layers have experts: ffn_hidden_size is not used.",
    ),
)

PRESETS = {shape.name: shape for shape in _SHAPES}

PUBLISHED = {
    "GPT-125M-8E": PublishedModel(323_000_000, "MoC-System Table 1"),
    "GPT-350M-16E": PublishedModel(1_700_000_000, "MoC-System Table 1"),
    "GPT2-MoE-Small": PublishedModel(323_000_000, "PEC preprint, appendix Table 1"),
    "MoE-LLaVa": PublishedModel(2_900_000_000, "MoEvement Table 2"),
    "GPT-MoE": PublishedModel(7_300_000_000, "MoEvement Table 2"),
    "QWen-MoE": PublishedModel(14_300_000_000, "MoEvement Table 2"),
    "DeepSeek-MoE": PublishedModel(16_400_000_000, "MoEvement Table 2"),
    "DeepSeek-V3-671B": PublishedModel(671_000_000_000, "DeepSeek-V3 Technical Report, section 4.2"),
    "Mixtral-8x7B": PublishedModel(46_700_000_000, "Mistral AI's announcement of Mixtral 8x7B"),
    "Qwen3-30B-A3B": PublishedModel(30_500_000_000, "model card of Qwen3-30B-A3B"),
}


def preset(name: str) -> ModelShape:
    """The published model of that name, in upper or lower case.

    Raises UsageError, with the closest name and all known ones, for a name that is none of theirs.
    """
    by_folded = {known.casefold(): shape for known, shape in PRESETS.items()}
    found = by_folded.get(name.casefold())
    if found is None:
        likely = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.5)
        question = f" (did you mean {by_folded[likely[0]].name}?)" if likely else ""
        raise UsageError(f"model {name!r} is not known{question}; known models: {', '.join(PRESETS)}")
    return found
