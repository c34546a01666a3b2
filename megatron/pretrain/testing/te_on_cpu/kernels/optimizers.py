"""Operations over lists of tensors: scaling, norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor"]

Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_scale(chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write each tensor of the first list, scaled, to that of the second.

    Args:
        chunk_size: Not used.
        overflow: Set to 1 where a value is not finite.
        lists: The tensors, and where they go.
        scale: The factor.
    """
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
    """The norm over all tensors.

    Args:
        chunk_size: Not used.
        overflow: Not used.
        lists: The tensors, in the first list.
        per_tensor: Whether the norm of each is given too.
    """
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)
