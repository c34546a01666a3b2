"""Builds the optimizer and its learning rate and weight decay schedules."""

from __future__ import annotations

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.model import compute_dtype

_SAME_NAME = (
    "optimizer lr min_lr weight_decay fp16 bf16 loss_scale initial_loss_scale min_loss_scale loss_scale_window "
    "hysteresis adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad"
).split()


def build_optimizer(config: PretrainConfig, chunks: list[torch.nn.Module]) -> MegatronOptimizer:
    """Megatron-Core's optimizer over all model chunks: distributed, mixed precision or plain fp32 as the flags say."""
    optimizer = OptimizerConfig(
        **{name: getattr(config.optimizer, name) for name in _SAME_NAME},
        params_dtype=compute_dtype(config),
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    built = get_megatron_optimizer(
        optimizer,
        chunks,
        config_overrides=get_standard_config_overrides(optimizer),
        use_gloo_process_groups=config.parallel.distributed_backend == "nccl",
    )
    for inner in torch_optimizers(built):
        _allocate_state(inner)
    return built


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of torch inside Megatron's; none where fused ones of Apex or Transformer Engine serve."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(member, "optimizer", None) for member in members]
    return [found for found in inner if isinstance(found, torch.optim.Adam | torch.optim.AdamW)]


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step count again after core loaded a state.

    Core 0.16.1 hands one tensor to all parameters, and torch's Adam counts it up once for each of them: the bias
    correction would be wrong ever after.
    """
    for inner in torch_optimizers(optimizer):
        for state in inner.state.values():
            state["step"] = state["step"].clone()


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate Adam's state as its first step would: core cannot save or load what does not exist yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


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
