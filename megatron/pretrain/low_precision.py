"""The precision-aware optimizer: masters and moments in the dtypes that flags name, kept by Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.fused_adam import keep_masters_in_fp8
from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import (
    allocate_optimizer_state,
    optimizer_members,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.pretrain.config.training import OptimizerFlags

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
