"""Builds the GPT-MoE of a rank from Megatron-Core's own modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import layers, set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.derived import moe_layer_pattern, virtual_pipeline_size
from megatron.pretrain.errors import InvalidInput

_SAME_NAME_MODEL = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups normalization "
    "add_bias_linear add_qkv_bias qk_layernorm attention_dropout hidden_dropout init_method_std transformer_impl "
    "recompute_granularity recompute_method recompute_num_layers"
).split()
_SAME_NAME_MOE = (
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_router_topk "
    "moe_z_loss_coeff moe_input_jitter_eps moe_router_dtype moe_router_score_function moe_router_pre_softmax "
    "moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias "
    "moe_router_bias_update_rate moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
    "moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion moe_per_layer_logging"
).split()
_SAME_NAME_LATENT = (
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor "
    "original_max_position_embeddings mscale mscale_all_dim rotary_percent rotary_base"
).split()
_SAME_NAME_PARALLEL = (
    "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size"
).split()
_SAME_NAME_FP8 = (
    "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
).split()


class LocalNorm:
    """`WrappedTorchNorm` that also serves sequence parallelism.

    Core's wrapper refuses sequence parallelism because torch's norms do not mark their parameters; marked as
    `sequence_parallel` their gradients are reduced over the tensor-parallel group in `finalize_model_grads`.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        unpartitioned = dataclasses.replace(config, sequence_parallel=False, tensor_model_parallel_size=1)
        norm = WrappedTorchNorm(unpartitioned, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def build_transformer_config(config: PretrainConfig) -> TransformerConfig:
    """Megatron-Core's configuration for these flags; raises InvalidInput where core refuses the combination."""
    values = _copied(config.model, _SAME_NAME_MODEL) | _copied(config.parallel, _SAME_NAME_PARALLEL)
    values |= _activation(config) | _precision(config) | _execution(config)
    if config.moe.num_experts is not None:
        values |= _copied(config.moe, _SAME_NAME_MOE) | _routing(config)
    kind = TransformerConfig
    if config.model.multi_latent_attention:
        kind = MLATransformerConfig
        values |= _copied(config.model, _SAME_NAME_LATENT) | {"rope_type": config.model.rope_type or "yarn"}
    try:
        return kind(**values)
    except (ValueError, AssertionError) as error:
        raise InvalidInput(f"Megatron-Core refuses this model: {error}") from error


def build_model(
    config: PretrainConfig, transformer: TransformerConfig, vocab_size: int
) -> list[DistributedDataParallel]:
    """The model chunks of this rank, one per virtual pipeline stage, wrapped for data parallelism.

    `vocab_size` is the padded vocabulary. Gradients are reduced, finalized and synchronized through the hooks of
    `transformer`, which the pipeline schedules call.
    """
    stages = virtual_pipeline_size(config)
    chunks = [_build_chunk(config, transformer, vocab_size, stage) for stage in (range(stages) if stages else [None])]
    if config.moe.freeze_experts:
        _freeze_experts(chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.cuda(torch.cuda.current_device())
    if transformer.fp16 or transformer.bf16:
        chunks = [Float16Module(transformer, chunk) for chunk in chunks]
    wrapped = [
        DistributedDataParallel(transformer, _ddp_config(config), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if config.training.data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    _install_hooks(config, transformer, wrapped)
    return wrapped


def _freeze_experts(chunks: list[GPTModel]) -> None:
    """Before gradients and the optimizer's state are laid out, which is done for what is trained."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.experts.requires_grad_(False)


def _build_chunk(
    config: PretrainConfig, transformer: TransformerConfig, vocab_size: int, stage: int | None
) -> GPTModel:
    from megatron.core import parallel_state

    flags, on_engine = config.model, config.model.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(transformer, on_engine, normalization=flags.normalization, vp_stage=stage)
    model = GPTModel(
        transformer,
        spec if on_engine else with_local_norms(spec),
        vocab_size=vocab_size,
        max_sequence_length=flags.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        share_embeddings_and_output_weights=not flags.untie_embeddings_and_output_weights,
        position_embedding_type=flags.position_embedding_type,
        rotary_percent=flags.rotary_percent,
        rotary_base=flags.rotary_base,
        vp_stage=stage,
    )
    if on_engine and config.optimizer.gradient_accumulation_fusion:
        _fuse_weight_gradients(model)
    return model


def _fuse_weight_gradients(model: torch.nn.Module) -> None:
    """Let the layers of Transformer Engine add to the gradient buffers themselves.

    Megatron-Core has one setting for them and for its own layers, which need Apex for it and fail without.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def with_local_norms(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """A block spec with every norm of core replaced by `LocalNorm`."""

    def swapped(node: Any) -> Any:
        if node is WrappedTorchNorm:
            return LocalNorm
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            changes = {field.name: swapped(getattr(node, field.name)) for field in dataclasses.fields(node)}
            return dataclasses.replace(node, **changes)
        return [swapped(item) for item in node] if isinstance(node, list) else node

    return swapped(block)


def _install_hooks(
    config: PretrainConfig, transformer: TransformerConfig, chunks: list[DistributedDataParallel]
) -> None:
    transformer.finalize_model_grads_func = finalize_model_grads
    if config.parallel.overlap_grad_reduce:
        transformer.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            transformer.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if config.parallel.overlap_param_gather and len(chunks) > 1:
        transformer.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])


def _one_or_all(hooks: list[Any]) -> Any:
    return hooks[0] if len(hooks) == 1 else hooks


def _ddp_config(config: PretrainConfig) -> DistributedDataParallelConfig:
    layout, optimizer = config.parallel, config.optimizer
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=optimizer.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        fp8_param_gather=config.fp8.fp8_param_gather,
        check_for_nan_in_grad=config.training.check_for_nan_in_loss_and_grad,
    )


def _copied(flags: Any, names: list[str]) -> dict[str, Any]:
    return {name: getattr(flags, name) for name in names}


def _activation(config: PretrainConfig) -> dict[str, Any]:
    model = config.model
    values: dict[str, Any] = {"layernorm_epsilon": model.norm_epsilon}
    if model.swiglu:
        values |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        if model.ffn_hidden_size is None and model.hidden_size is not None:
            # Megatron's width for gated units: 8/3 of the hidden size, rounded to a multiple of 64.
            values["ffn_hidden_size"] = int((4 * model.hidden_size * 2 / 3) / 64) * 64
    elif model.squared_relu:
        from megatron.core.activations import squared_relu

        values["activation_func"] = squared_relu
    if model.recompute_modules:
        values["recompute_modules"] = list(model.recompute_modules)
    return values


def _precision(config: PretrainConfig) -> dict[str, Any]:
    dtype = compute_dtype(config)
    return {
        "fp16": config.optimizer.fp16,
        "bf16": config.optimizer.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "calculate_per_token_loss": config.training.calculate_per_token_loss,
        **_eight_bits(config),
    }


def _eight_bits(config: PretrainConfig) -> dict[str, Any]:
    flags = config.fp8
    if flags.fp8_format is None:
        return {}
    return _copied(flags, _SAME_NAME_FP8) | {"fp8": flags.fp8_format, "fp8_param": flags.fp8_param_gather}


def compute_dtype(config: PretrainConfig) -> torch.dtype:
    """The precision of compute weights and activations."""
    if config.optimizer.fp16:
        return torch.float16
    return torch.bfloat16 if config.optimizer.bf16 else torch.float32


def _execution(config: PretrainConfig) -> dict[str, Any]:
    """Kernels and communication: fused only where the device has the kernels."""
    layout, on_cuda = config.parallel, config.parallel.device == "cuda"
    on_engine = config.model.transformer_impl == "transformer_engine"
    grouped = config.moe.num_experts is not None and config.moe.moe_grouped_gemm
    interleaved = virtual_pipeline_size(config) is not None
    overlap = interleaved and layout.overlap_p2p_comm and on_cuda
    return {
        "virtual_pipeline_model_parallel_size": virtual_pipeline_size(config),
        "overlap_p2p_comm": overlap,
        # gloo has no batched point-to-point calls; overlapped communication excludes them as well.
        "batch_p2p_comm": on_cuda and not overlap,
        # Else core waits for the whole device after each send, copies of snapshots included: a way around an error of
        # batched sends in old releases of torch.
        "batch_p2p_sync": False,
        "deallocate_pipeline_outputs": True,
        "deterministic_mode": config.training.deterministic_mode,
        # Of Megatron-Core's own layers, by a kernel of Apex; those of Transformer Engine have their own.
        "gradient_accumulation_fusion": config.optimizer.gradient_accumulation_fusion
        and layers._grad_accum_fusion_available,
        # Grouped experts add their biases themselves, and refuse to leave them to a fused addition.
        "bias_dropout_fusion": on_cuda and not (grouped and config.model.add_bias_linear),
        "bias_activation_fusion": on_cuda and _has_fused_activation(config),
        "masked_softmax_fusion": False,
        "persist_layer_norm": on_engine,
        "apply_rope_fusion": on_engine and on_cuda,
        # Transformer Engine's attention by torch's operators, the only one of its three that needs no kernels.
        **({"attention_backend": AttnBackend.unfused} if on_engine and not on_cuda else {}),
    }


def _has_fused_activation(config: PretrainConfig) -> bool:
    """Whether core has one kernel for bias and activation, as Megatron-LM asks for by default.

    SwiGLU, also weighted by the router's probabilities; GELU with a bias, and not in experts.
    """
    model = config.model
    dense_gelu = model.add_bias_linear and config.moe.num_experts is None and not model.squared_relu
    return model.swiglu or dense_gelu


def _routing(config: PretrainConfig) -> dict[str, Any]:
    moe = config.moe
    kinds, coefficients = list(moe.moe_router_load_balancing_type), list(moe.moe_aux_loss_coeff)
    single = len(kinds) == 1
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": moe_layer_pattern(moe.moe_layer_freq),
        "moe_router_load_balancing_type": kinds[0] if single else kinds,
        "moe_aux_loss_coeff": coefficients[0] if single else coefficients,
    }
