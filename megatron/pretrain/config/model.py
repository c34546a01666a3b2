"""Flags that shape the model: transformer and mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.config import flag


@dataclass(frozen=True)
class ModelConfig:
    """Transformer hyper-parameters, with Megatron's names and defaults."""

    num_layers: int | None = flag(None, "number of transformer layers (required)", minimum=1)
    hidden_size: int | None = flag(None, "transformer hidden size (required)", minimum=1)
    num_attention_heads: int | None = flag(None, "number of attention heads (required)", minimum=1)
    ffn_hidden_size: int | None = flag(
        None, "hidden size of dense MLPs (default: 4 x hidden size, 8/3 with SwiGLU)", minimum=1
    )
    kv_channels: int | None = flag(None, "projection size per attention head (default: hidden size / heads)", minimum=1)
    group_query_attention: bool = flag(False, "use grouped-query attention")
    num_query_groups: int | None = flag(None, "number of query groups; needs --group-query-attention", minimum=1)
    max_position_embeddings: int | None = flag(None, "largest position (default: --seq-length)", minimum=1)
    position_embedding_type: str = flag(
        "learned_absolute", "position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(10000, "base of rotary embeddings")
    rotary_percent: float = flag(1.0, "share of each head that is rotated")
    normalization: str = flag("LayerNorm", "normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon of the normalization", minimum=0)
    swiglu: bool = flag(False, "gated linear units with SiLU instead of GeLU")
    squared_relu: bool = flag(False, "squared ReLU instead of GeLU")
    add_bias_linear: bool = flag(True, "no bias in linear layers", name="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "bias in the QKV projection only")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
    untie_embeddings_and_output_weights: bool = flag(False, "separate weights for embedding and output layer")
    make_vocab_size_divisible_by: int = flag(128, "pad the vocabulary to a multiple of this times TP", minimum=1)
    attention_dropout: float = flag(0.1, "dropout after the attention softmax", minimum=0)
    hidden_dropout: float = flag(0.1, "dropout of the hidden state", minimum=0)
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", minimum=0)
    transformer_impl: str | None = flag(
        None,
        "transformer implementation (default: transformer_engine where it is installed and on --device cuda)",
        choices=("local", "transformer_engine"),
    )
    multi_latent_attention: bool = flag(False, "multi-head latent attention (MLA), as in DeepSeek-V2 and V3")
    q_lora_rank: int | None = flag(None, "rank of queries, with --multi-latent-attention (default: full)", minimum=1)
    kv_lora_rank: int = flag(32, "rank of keys and values, likewise", minimum=1)
    qk_head_dim: int = flag(128, "size of a head of queries and keys without positions, likewise", minimum=1)
    qk_pos_emb_head_dim: int = flag(64, "size of the rotated part of a head, likewise", minimum=1)
    v_head_dim: int = flag(128, "size of a head of values, likewise", minimum=1)
    rope_type: str | None = flag(None, "rotary embedding, likewise (default: yarn)", choices=("rope", "yarn"))
    rotary_scaling_factor: float = flag(1.0, "stretch of positions, with --rope-type yarn", minimum=1)
    original_max_position_embeddings: int = flag(4096, "positions before the stretch, likewise", minimum=1)
    mscale: float = flag(1.0, "scale of rotated heads by the stretch, likewise", minimum=0)
    mscale_all_dim: float = flag(0.0, "scale of the attention's logits by the stretch, likewise", minimum=0)
    recompute_granularity: str | None = flag(None, "activation recomputation", choices=("full", "selective"))
    recompute_method: str | None = flag(
        None, "with full recomputation: how layers are grouped", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(None, "with full recomputation: layers per group or per stage", minimum=1)
    recompute_modules: tuple[str, ...] = flag((), "with selective recomputation: which modules")


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-Experts hyper-parameters, with Megatron's names and defaults."""

    num_experts: int | None = flag(None, "experts per MoE layer; without it the model is dense", minimum=1)
    moe_layer_freq: str = flag(
        "1", "every N-th layer is MoE, or a Python list expression of 0 and 1 such as ([0]*1+[1]*3)"
    )
    moe_ffn_hidden_size: int | None = flag(None, "hidden size of each expert (default: --ffn-hidden-size)", minimum=1)
    moe_shared_expert_intermediate_size: int | None = flag(None, "total hidden size of the shared experts", minimum=1)
    moe_shared_expert_overlap: bool = flag(False, "overlap the shared experts with the dispatcher (CUDA)")
    moe_router_topk: int = flag(2, "experts per token", minimum=1)
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "load balancing; several auxiliary losses may be combined, with as many --moe-aux-loss-coeff",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "coefficient of each auxiliary loss", minimum=0)
    moe_z_loss_coeff: float | None = flag(None, "coefficient of the router z-loss", minimum=0)
    moe_input_jitter_eps: float | None = flag(None, "multiplicative noise on the router input", minimum=0)
    moe_router_dtype: str | None = flag(None, "precision of the router", choices=("fp32", "fp64"))
    moe_router_score_function: str = flag("softmax", "score function of the router", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = flag(False, "softmax before the top-k selection")
    moe_router_num_groups: int | None = flag(None, "expert groups for group-limited routing", minimum=1)
    moe_router_group_topk: int | None = flag(None, "selected groups in group-limited routing", minimum=1)
    moe_router_topk_scaling_factor: float | None = flag(None, "factor on the scores of selected experts")
    moe_router_enable_expert_bias: bool = flag(False, "balance without auxiliary loss through a learned expert bias")
    moe_router_bias_update_rate: float = flag(1e-3, "update rate of the expert bias", minimum=0)
    moe_expert_capacity_factor: float | None = flag(
        None, "capacity factor of each expert; tokens above it are dropped", minimum=0
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "pad each expert's input to its capacity")
    freeze_experts: bool = flag(
        False, "train all but routed experts, which stay as they were loaded or initialized (MoC Table 4, FT-w.o.E)"
    )
    moe_token_drop_policy: str = flag("probs", "which tokens are dropped first", choices=("probs", "position"))
    moe_token_dispatcher_type: str = flag("allgather", "token dispatcher", choices=("allgather", "alltoall", "flex"))
    moe_grouped_gemm: bool = flag(False, "grouped experts of Transformer Engine instead of sequential ones")
    moe_use_legacy_grouped_gemm: bool = flag(False, "refused: the legacy one-tensor GroupedMLP has no per-expert state")
    moe_permute_fusion: bool = flag(False, "fused token permutation (Transformer Engine)")
    moe_per_layer_logging: bool = flag(False, "log auxiliary losses per layer")
