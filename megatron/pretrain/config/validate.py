"""Judges a command line before anything starts: refuses contradictions with the reason, fills defaults in."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from megatron.pretrain.config import PretrainConfig, checks
from megatron.pretrain.config.derived import (
    Environment,
    data_parallel_size,
    moe_layer_pattern,
    virtual_pipeline_size,
)
from megatron.pretrain.errors import InvalidInput


def resolve(config: PretrainConfig, environment: Environment) -> PretrainConfig:
    """The configuration with every default filled in.

    Raises InvalidInput naming the first contradiction, the values in it and what to change.
    """
    for check in checks.BEFORE_DEFAULTS:
        _refuse_first(check(config, environment))
    resolved = _with_defaults(config, environment)
    for check in checks.AFTER_DEFAULTS:
        _refuse_first(check(resolved, environment))
    return dataclasses.replace(resolved, flat=_flattened(resolved, environment))


def _refuse_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise InvalidInput(problem)


def _with_defaults(config: PretrainConfig, environment: Environment) -> PretrainConfig:
    model, training, optimizer, layout = config.model, config.training, config.optimizer, config.parallel
    on_engine = layout.device == "cuda" and environment.has_engine_for("cuda")
    implementation = model.transformer_impl or ("transformer_engine" if on_engine else "local")
    assert training.micro_batch_size is not None
    samples_per_microbatch = training.micro_batch_size * data_parallel_size(config, environment)
    if optimizer.lr_warmup_fraction is not None:
        decay_iters = optimizer.lr_decay_iters or training.train_iters or 0
        optimizer = dataclasses.replace(optimizer, lr_warmup_iters=int(optimizer.lr_warmup_fraction * decay_iters))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            max_position_embeddings=model.max_position_embeddings or training.seq_length,
            transformer_impl=implementation,
        ),
        training=dataclasses.replace(
            training,
            global_batch_size=training.global_batch_size or samples_per_microbatch,
            # With dynamic loss scaling an overflow is expected: the optimizer skips the step.
            check_for_nan_in_loss_and_grad=training.check_for_nan_in_loss_and_grad
            and not (optimizer.fp16 and optimizer.loss_scale is None),
        ),
        optimizer=dataclasses.replace(
            optimizer,
            lr_decay_iters=optimizer.lr_decay_iters or training.train_iters,
            accumulate_allreduce_grads_in_fp32=optimizer.accumulate_allreduce_grads_in_fp32
            or (optimizer.bf16 and optimizer.main_grads_dtype == "fp32"),
            gradient_accumulation_fusion=optimizer.gradient_accumulation_fusion
            and (layout.device == "cuda" or implementation == "transformer_engine"),
        ),
        parallel=dataclasses.replace(
            layout,
            sequence_parallel=layout.sequence_parallel and layout.tensor_model_parallel_size > 1,
            distributed_backend=layout.distributed_backend or ("nccl" if layout.device == "cuda" else "gloo"),
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size,
        ),
    )


def _flattened(config: PretrainConfig, environment: Environment) -> argparse.Namespace:
    """The resolved values under Megatron's argument names, with what Megatron derives from them."""
    values = dict(vars(config.flat))
    for group in (
        *(config.model, config.moe, config.parallel, config.optimizer, config.fp8),
        *(config.training, config.checkpoint),
    ):
        values |= dataclasses.asdict(group)
    checkpoint, training = config.checkpoint, config.training
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        # Megatron writes a single one without a list around it.
        values[name] = values[name][0] if len(values[name]) == 1 else list(values[name])
    values |= {
        "moe_layer_freq": moe_layer_pattern(config.moe.moe_layer_freq),
        "world_size": environment.world_size,
        "fp8": config.fp8.fp8_format,
        "data_parallel_size": data_parallel_size(config, environment),
        "virtual_pipeline_model_parallel_size": virtual_pipeline_size(config),
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,  # the older spelling of the position embedding "rope"
        "rotary_interleaved": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "use_dist_ckpt": True,
        "no_save_optim": not checkpoint.save_optim,
        "no_save_rng": not checkpoint.save_rng,
        "encoder_seq_length": training.seq_length,
        "consumed_train_samples": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return argparse.Namespace(**values)
