"""Scales of eight-bit tensors over lists of them, and the rows that make matrices fit for eight-bit products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.numbers import LARGEST, scale_for

__all__ = [
    "fused_amax_and_scale_update_after_reduction",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "is_non_tn_fp8_gemm_supported",
    "multi_tensor_compute_scale_and_scale_inv",
]

_LARGEST_FLOAT = torch.finfo(torch.float32).max


def multi_tensor_compute_scale_and_scale_inv(
    _chunk_size: int, _overflow: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], largest: float,
    power_of_two: bool, epsilon: float,
) -> None:  # fmt: skip
    """Current scaling: scales and their reciprocals from the largest values.

    Args:
        _chunk_size: Not used.
        _overflow: Not used.
        lists: Largest values, scales, and their reciprocals, written to.
        largest: The largest number of the format.
        power_of_two: Whether scales are rounded down to one.
        epsilon: The least value that counts as the largest.
    """
    for amax, scale, reciprocal in zip(*lists, strict=True):
        scale.copy_(scale_for(amax, largest, power_of_two, epsilon))
        reciprocal.copy_(scale.reciprocal())


def fused_amax_and_scale_update_after_reduction(
    reduced: torch.Tensor, histories: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], algorithm: str,
    dtype: int, margin: float,
) -> None:  # fmt: skip
    """Delayed scaling: the newest row of each history is what all ranks found; scales follow, histories move on.

    Args:
        reduced: The newest rows one behind the other.
        histories: Largest values, a row for each iteration, (length, tensors).
        scales: The scales of the tensors of each history.
        algorithm: `most_recent`, or the largest of the history.
        dtype: The format, as a number of Transformer Engine.
        margin: Powers of two that scales stay below.
    """
    rows = torch.split(reduced, [history.shape[1] for history in histories])
    for row, history, scale in zip(rows, histories, scales, strict=True):
        history[0].copy_(row)
        amax = history[0] if algorithm == "most_recent" else history.amax(0)
        computed = LARGEST[int(dtype)] / amax / 2**margin
        computed = torch.where((amax > 0) & torch.isfinite(amax), computed, scale)
        scale.copy_(torch.where(torch.isinf(computed), torch.full_like(computed, _LARGEST_FLOAT), computed))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


def fused_multi_row_padding(
    source: torch.Tensor, target: torch.Tensor, rows: Sequence[int], padded: Sequence[int]
) -> None:
    """Copy the rows of each expert to where each has more of them: the rest are zeros.

    Args:
        source: The rows of all experts.
        target: Where they go.
        rows: The number of rows of each expert.
        padded: The number of rows that each has in `target`.
    """
    target.zero_()
    _copy_rows(source, target, rows, padded)


def fused_multi_row_unpadding(
    source: torch.Tensor, target: torch.Tensor, rows: Sequence[int], unpadded: Sequence[int]
) -> None:
    """Leave out what `fused_multi_row_padding` has put in.

    Args:
        source: What has been padded.
        target: Where the rows go.
        rows: The number of rows that each expert has in `source`.
        unpadded: The number that each has in `target`.
    """
    _copy_rows(source, target, rows, unpadded)


def is_non_tn_fp8_gemm_supported(*_device: object) -> bool:
    """Whether eight-bit products take operands in any order: not those of Hopper, which need the transpose."""
    return False


def _copy_rows(source: torch.Tensor, target: torch.Tensor, rows: Sequence[int], others: Sequence[int]) -> None:
    for taken, put in zip(torch.split(source, list(rows)), torch.split(target, list(others)), strict=True):
        common = min(len(taken), len(put))
        put[:common].copy_(taken[:common])
