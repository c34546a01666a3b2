"""Operations over lists of tensors: Adam, scaling, norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor"]

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

    def apply(self, gradient: torch.Tensor, weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Update weights and moments, all in single precision."""
        corrected = [1 - beta**self.step if self.bias_correction else 1.0 for beta in (self.beta1, self.beta2)]
        if self.mode == 0:
            gradient = gradient + self.weight_decay * weights
        first.mul_(self.beta1).add_((1 - self.beta1) * gradient)
        second.mul_(self.beta2).add_((1 - self.beta2) * gradient * gradient)
        update = (first / corrected[0]) / ((second / corrected[1]).sqrt() + self.eps)
        if self.mode == 1:
            update += self.weight_decay * weights
        weights.sub_(self.lr * update)


def multi_tensor_adam(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, lr: float, beta1: float, beta2: float, eps: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Step each of the weights: gradients, weights, first and second moments, and where given master weights.

    With master weights those are stepped, and the weights are their cast.
    """
    adam = Step(lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    for gradient, weights, first, second, *masters in zip(*lists, strict=True):
        stepped = masters[0] if masters else weights
        wide = [tensor.float() for tensor in (stepped, first, second)]  # itself where it is in single precision
        adam.apply(gradient.float(), *wide)
        for kept, computed in zip((stepped, first, second), wide, strict=True):
            if kept is not computed:
                kept.copy_(computed)
        if masters:
            weights.copy_(wide[0])


def multi_tensor_scale(chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write each tensor of the first list, times `scale`, to that of the second; notes what is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            overflow.fill_(1)
        target.copy_(source if scale == 1.0 else source.float() * scale)


def multi_tensor_scale_tensor(chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: torch.Tensor) -> None:
    """As `multi_tensor_scale`, by a number that is on the device."""
    multi_tensor_scale(chunk_size, overflow, lists, scale.item())


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm over all tensors, and if asked for that of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)
