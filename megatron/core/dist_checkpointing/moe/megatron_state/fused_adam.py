"""What Transformer Engine's `FusedAdam` needs to train with state of few bits, until its own releases have it.

Checked against 2.11.0 and 2.20.2. Changed are attributes of one optimizer, never of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .quantized import is_quantized

Rescale = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]


def guard_scales(fused: Any) -> None:
    """Let moments become zero that are too small for a scale; a second call does nothing.

    `FusedAdam` scales each tensor so that its largest value fills the format, and divides by that scale. The moments of
    an expert that no token has reached are zero: for fp8 the quotient is infinite, and zero times infinity makes the
    moments NaN, and in the next step the weights, while the loss is finite still. Without tokens for hundreds of
    iterations first moments decay below 1e-34, where it is infinite for fp16 too. Other values stay to the bit.
    """
    if "_apply_scale" in vars(fused):
        return
    rescale: Rescale = fused._apply_scale
    largest_of = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}

    def guarded(name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor) -> None:
        quantized = is_quantized(scaled)
        if not quantized and scaled.dtype is not torch.float16:
            rescale(name, unscaled, scaled, scale)
            return
        largest = largest_of[torch.uint8 if quantized else torch.float16]
        lowest, highest = torch.aminmax(unscaled)
        torch.div(torch.maximum(-lowest, highest), torch.full_like(scale, largest), out=scale)
        factor = scale.reciprocal()
        is_usable = torch.isfinite(factor) & (scale > 0)
        if quantized:
            scaled._quantizer.scale.copy_(torch.where(is_usable, factor, 1.0))
            scaled.copy_(unscaled)
        else:
            unscaled.mul_(torch.where(is_usable, factor, 0.0))
            scaled.copy_(unscaled)

    fused._apply_scale = guarded


def level_scales(optimizer: Any, weights: Sequence[Any]) -> None:
    """After each step: eight-bit weights have the scale they were cast with, on all ranks; a second call does nothing.

    `FusedAdam` writes `_scale_inv` of the shards that a rank steps, and only their bytes are gathered. The other
    data-parallel ranks would read them with the scale of the initialization for ever, and train visibly worse. All
    ranks know the scale: largest values are reduced over them.

    Args:
        optimizer: The chain of optimizers, whose `step_with_ready_grads` all ranks call in each step.
        weights: Float8Tensors whose masters `FusedAdam` keeps, of all ranks.
    """
    if not weights or "step_with_ready_grads" in vars(optimizer):
        return
    step: Callable[[], bool] = optimizer.step_with_ready_grads

    def leveled() -> bool:
        updated = step()
        for one in weights if updated else ():
            one._scale_inv.copy_(one._quantizer.scale.reciprocal().view(one._scale_inv.shape))
        return updated

    optimizer.step_with_ready_grads = leveled


def keep_masters_in_fp8(fused: Any) -> None:
    """Let masters be kept in fp8 (E4M3), each with a scale, as FP8-LM does; before any state is there.

    The class takes fp32 and fp16 only; what is behind that check takes eight bits for masters as it does for moments.
    """
    fused.master_weight_dtype = fused.name_to_dtype_map["master_param"] = torch.uint8


@torch.no_grad()
def reload_masters(fused: Any) -> None:
    """Make the masters those of the compute weights, which Megatron-Core leaves to `FusedAdam` and that to nobody."""
    for group in fused.param_groups:
        for parameter in group["params"]:
            if fused.state[parameter]["master_param"].dtype is torch.int16:
                fused.state[parameter]["master_param"].zero_()
            else:
                fused.set_scaled_state(parameter, "master_param", parameter.detach().float())
