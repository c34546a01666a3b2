"""The state of optimizers before their first step: it has to exist before it can be enumerated or restored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.core.optimizer import MegatronOptimizer

from .fused_adam import guard_scales, level_scales
from .operators import Shard
from .quantized import is_quantized

MASTER_OF_FUSED = "master_param"
"""What `FusedAdam` calls master weights that it keeps itself, among the state of a shard of compute weights."""


class SteppedTensor(NamedTuple):
    """A tensor that an inner optimizer steps: what it is the master weights of, and the dtype of its gradient."""

    shard: Shard
    main: torch.Tensor
    gradient_dtype: torch.dtype

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the optimizer reads: `decoupled_grad` where its dtype need not be that of the parameter."""
        decoupled: torch.Tensor | None = getattr(self.main, "decoupled_grad", None)
        return self.main.grad if decoupled is None else decoupled


def holds_masters(member: MegatronOptimizer) -> bool:
    """Whether the inner optimizer keeps master weights itself, and steps shards of compute weights."""
    return bool(getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def scale_of(inner: Any, main: torch.Tensor, field: str) -> torch.Tensor | None:
    """By what `FusedAdam` multiplies a field of the state of `main` whenever it reads it: fp32 of one element.

    It writes a scale down for every field that is not fp32, but reads those of fp16 only: a Float8Tensor has its own.
    """
    if inner.state[main][field].dtype is not torch.float16:
        return None
    scale: torch.Tensor | None = getattr(inner, "_scales", {}).get(main, {}).get(field)
    return scale


def optimizer_members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a chain is made of, without the stubs of ranks that train nothing."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in members if not member.is_stub_optimizer]


@torch.no_grad()
def allocate_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Allocate moments and step counts that do not exist yet, as the first step would; nothing else changes.

    Core's own allocations do not serve torch's Adam: `init_state_fn` leaves out the step count, and
    `_init_optimizer_states_with_dummy_values` takes a step, which counts and decays weights. For the fused Adams of
    Apex and Transformer Engine, which count steps in their groups, `init_state_fn` is right, but where the latter
    keeps master weights too: there core passes fewer arguments than Transformer Engine from 2.1 on takes.

    Takes what `state_tensors` takes: optimizers alone or chained, distributed or not.
    """
    for member in optimizer_members(optimizer):
        if isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW):
            allocate_adam(member.optimizer)
        elif member.config.use_precision_aware_optimizer:
            _allocate_precision_aware(member.optimizer)
        elif member.init_state_fn is not None:
            member.init_state_fn(member.optimizer, member.config)
    level_scales(optimizer, [weights for member in optimizer_members(optimizer) for weights in _left_to_fused(member)])


def _left_to_fused(member: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Weights of eight bits, of all data-parallel ranks, that `FusedAdam` casts in its step."""
    if not holds_masters(member):
        return []
    return [weights for buffer in member.buffers for weights in buffer.params if is_quantized(weights)]


def allocate_adam(adam: torch.optim.Optimizer) -> None:
    """As `allocate_optimizer_state`, for one of torch's."""
    counted: set[int] = set()
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if "step" not in state:
                state["step"] = step_count(parameter, group)
            elif state["step"].data_ptr() in counted:
                # After core loaded a state, all parameters share one tensor, which each of them would count up.
                state["step"] = state["step"].clone()
            counted.add(state["step"].data_ptr())
            moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
            for name in moments:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _allocate_precision_aware(fused: Any) -> None:
    """As the first step of Transformer Engine's `FusedAdam` does it, and guarded from then on."""
    guard_scales(fused)
    for group in fused.param_groups:
        for parameter in group["params"]:
            if not fused.state[parameter]:
                remainders = fused.store_param_remainders and parameter.dtype is torch.bfloat16
                fused.initialize_state(parameter, remainders)


def step_count(parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Adam compares dtype and device of the count with what its kernels want."""
    on_device = group["capturable"] or group["fused"]
    wide = torch.get_default_dtype() is torch.float64 and not group["fused"]
    dtype = torch.float64 if wide else torch.float32
    return torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
