"""Adam over lists of tensors, for weights, masters and moments of every dtype that `FusedAdam` hands to its kernels.

All of them compute in single precision. Where there are masters, the weights are the cast of the result *before* it is
rounded to the dtype in which `FusedAdam` keeps the master afterwards: so masters of less than 32 bits do not determine
the weights. Moments of fp16 and fp8 never come here: `FusedAdam` gives their product with the scale, in single
precision, and divides again afterwards. Those of bf16 do where both are (from Transformer Engine 2.20 on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.pretrain.testing.te_on_cpu.kernels.numbers import to_eight_bits

__all__ = ["multi_tensor_adam", "multi_tensor_adam_fp8", "multi_tensor_adam_param_remainder"]

Lists = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Step:
    """One step of Adam, with its numbers in single precision, as the kernel takes them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int
    mode: int  # 0: weight decay is part of the gradient, 1: of the update (AdamW)
    bias_correction: int
    weight_decay: float

    def __post_init__(self) -> None:
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
            object.__setattr__(self, name, float(np.float32(getattr(self, name))))

    def apply(
        self, gradient: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> torch.Tensor:
        """The new weights, in single precision.

        Args:
            gradient: The gradient, in any dtype.
            weights: The weights before, which stay as they are.
            first: The first moments, updated in place.
            second: The second moments, updated in place.
        """
        gradient, weights = gradient.float(), weights.float()
        corrected = [1 - beta**self.step if self.bias_correction else 1.0 for beta in (self.beta1, self.beta2)]
        if self.mode == 0:
            gradient = gradient + self.weight_decay * weights
        averages = [moment.float() for moment in (first, second)]  # themselves where they are in single precision
        averages[0].mul_(self.beta1).add_((1 - self.beta1) * gradient)
        averages[1].mul_(self.beta2).add_((1 - self.beta2) * gradient * gradient)
        update = (averages[0] / corrected[0]) / ((averages[1] / corrected[1]).sqrt() + self.eps)
        for moment, computed in zip((first, second), averages, strict=True):
            if moment is not computed:
                moment.copy_(computed)
        if self.mode == 1:
            update += self.weight_decay * weights
        return weights - self.lr * update


def multi_tensor_adam(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Step each of the weights.

    With master weights those are stepped, and the weights are their cast.

    Args:
        chunk_size: Not used.
        overflow: Not used.
        lists: Gradients, weights, first and second moments, and where given master weights.
        lr: The learning rate.
        beta1: The decay of first moments.
        beta2: The decay of second moments.
        eps: Added to the root of second moments.
        step: The number of this step, from 1.
        mode: 0: weight decay is part of the gradient; 1: of the update (AdamW).
        bias_correction: Whether moments are corrected for having begun with zeros.
        weight_decay: The factor of weight decay.
    """
    adam = Step(lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    for gradient, weights, first, second, *masters in zip(*lists, strict=True):
        computed = adam.apply(gradient, masters[0] if masters else weights, first, second)
        for kept in (weights, *masters):
            kept.copy_(computed)


def multi_tensor_adam_param_remainder(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, over bf16 weights and the lower 16 bits of fp32 masters, of which they are the upper.

    Weights are rounded up where the remainder, an int16, is negative. So its sign tells that one has to be taken off
    again, and nothing of the master is lost.
    """
    adam = Step(lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    for gradient, weights, first, second, remainder in zip(*lists, strict=True):
        if weights.dtype is not torch.bfloat16 or remainder.dtype is not torch.int16:
            raise RuntimeError(f"remainders of {remainder.dtype} for weights of {weights.dtype}: int16, bf16 expected")
        upper, lower = weights.view(torch.int16).int(), remainder.int()
        master = ((upper - (lower < 0).int()) << 16 | lower & 0xFFFF).view(torch.float32)
        bits = adam.apply(gradient, master, first, second).view(torch.int32)
        remainder.copy_(bits.to(torch.int16))  # the lower half: integers wrap around
        weights.view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())


def multi_tensor_adam_fp8(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float, format: int,
) -> None:  # fmt: skip
    """As `multi_tensor_adam`, over fp8 weights, given as uint8, with their scale, largest value, and inverse scale.

    Masters are fp32. Weights are the cast of their product with the scale, and what is too large for the format becomes
    its largest number. The largest value counts those before the cast, on top of what was noted before.
    """
    adam = Step(lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    for gradient, weights, first, second, master, scale, amax, inverse in zip(*lists, strict=True):
        if master.dtype is not torch.float32:
            raise RuntimeError(f"masters of {master.dtype} for weights of eight bits: float32 expected")
        master.copy_(adam.apply(gradient, master, first, second))
        weights.copy_(to_eight_bits(master * scale, format))
        if master.numel():
            amax.copy_(torch.maximum(amax, master.abs().max()))
        inverse.copy_(scale.reciprocal())
