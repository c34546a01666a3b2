"""Builds the optimizer and its learning rate and weight decay schedules."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.fused_adam import keep_masters_in_fp8
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import (
    allocate_adam,
    allocate_optimizer_state,
    optimizer_members,
)
from megatron.core.dist_checkpointing.moe.megatron_state.step_counts import set_steps_aside_in_loads, torch_adams
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.config.training import OptimizerFlags
from megatron.pretrain.model import compute_dtype

_SAME_NAME = (
    "optimizer lr min_lr weight_decay fp16 bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window "
    "hysteresis adam_beta1 adam_beta2 adam_eps clip_grad"
).split()


def build_optimizer(config: PretrainConfig, chunks: list[torch.nn.Module]) -> MegatronOptimizer:
    """Megatron-Core's optimizer over all model chunks: distributed, mixed precision or plain fp32 as the flags say."""
    optimizer = OptimizerConfig(
        **{name: getattr(config.optimizer, name) for name in _SAME_NAME},
        **precision_options(config.optimizer),
        params_dtype=compute_dtype(config),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        fp8_recipe=config.fp8.fp8_recipe if config.fp8.fp8_format else None,
    )
    built = get_megatron_optimizer(
        optimizer,
        chunks,
        config_overrides=get_standard_config_overrides(optimizer),
        use_gloo_process_groups=config.parallel.distributed_backend == "nccl",
    )
    if config.optimizer.use_precision_aware_optimizer:
        make_low_precision(built, config.optimizer)
    for adam in torch_adams(built):
        allocate_adam(adam)
    set_steps_aside_in_loads(built)
    return built


_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def precision_options(flags: OptimizerFlags) -> dict[str, Any]:
    """What core's `OptimizerConfig` takes of these flags."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    options: dict[str, Any] = {name: _DTYPES[getattr(flags, name)] for name in names}
    if flags.fp8_main_params:
        options["main_params_dtype"] = torch.float16  # the nearest that it takes: `make_low_precision` changes it
    return options | {"use_precision_aware_optimizer": flags.use_precision_aware_optimizer}


def make_low_precision(optimizer: MegatronOptimizer, flags: OptimizerFlags) -> None:
    """Allocate the state of a precision-aware optimizer that was just built, in the dtypes of these flags."""
    if flags.fp8_main_params:
        for member in optimizer_members(optimizer):
            keep_masters_in_fp8(member.optimizer)
    allocate_optimizer_state(optimizer)


class LossScale:
    """By what losses are multiplied; only where that changes is the device asked for it, and waited for."""

    def __init__(self, config: PretrainConfig, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._changes = bool(config.optimizer.fp16) and config.optimizer.loss_scale is None
        self._constant: float | None = None

    def now(self) -> float:
        """The scale of the next iteration."""
        if self._constant is not None:
            return self._constant
        scale = float(self._optimizer.get_loss_scale().item())
        if not self._changes:
            self._constant = scale
        return scale


def build_scheduler(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedules, counted in samples as in Megatron."""
    flags, training = config.optimizer, config.training
    samples = training.global_batch_size or 1

    def in_samples(iterations: int | None) -> int | None:
        return None if iterations is None else iterations * samples

    constant = flags.weight_decay_incr_style == "constant"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,
        min_lr=flags.min_lr,
        lr_warmup_steps=in_samples(flags.lr_warmup_iters),
        lr_decay_steps=max(1, in_samples(flags.lr_decay_iters) or 0),
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.weight_decay if constant else flags.start_weight_decay,
        end_wd=flags.weight_decay if constant else flags.end_weight_decay,
        wd_incr_steps=max(1, in_samples(training.train_iters) or 0),
        wd_incr_style=flags.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=flags.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=flags.override_opt_param_scheduler,
        wsd_decay_steps=in_samples(flags.lr_wsd_decay_iters),
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
    )
