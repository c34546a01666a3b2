"""What the numbers of a tensor look like: extremes, mean, spread, and how many are no numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

_BLOCK = 1 << 22
"""Elements that are looked at together, so that a tensor takes little more memory than its own."""


@dataclass(frozen=True)
class Statistics:
    """Of the finite elements of a tensor, in double precision; None where there are none.

    std: standard deviation of the elements themselves (divided by their number). non_finite: infinities and NaN.
    Complex numbers count as their two parts.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    non_finite: int


def statistics(tensors: Iterable[torch.Tensor]) -> Statistics:
    """Look at every element of these tensors of any one dtype and any shapes, on the CPU."""
    count, mean, squares, non_finite = 0, 0.0, 0.0, 0
    minimum, maximum = math.inf, -math.inf
    for block in (block for tensor in tensors for block in _blocks(tensor)):
        finite = block[block.isfinite()]
        non_finite += block.numel() - finite.numel()
        if not finite.numel():
            continue
        # Means and squared deviations of two sets give those of their union (Chan, Golub, LeVeque 1979).
        own, block_mean = finite.numel(), finite.mean().item()
        apart = block_mean - mean
        squares += (finite - block_mean).square_().sum().item() + apart * apart * count * own / (count + own)
        mean += apart * own / (count + own)
        count += own
        minimum, maximum = min(minimum, finite.min().item()), max(maximum, finite.max().item())
    if not count:
        return Statistics(None, None, None, None, non_finite)
    return Statistics(minimum, maximum, mean, math.sqrt(squares / count), non_finite)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        yield flat[start : start + _BLOCK].to(torch.float64)
