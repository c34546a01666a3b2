"""Casts to eight bits with a scale for each block of 128 numbers, or of 128 times 128: blockwise FP8.

A tensor has bytes and fp32 scales by rows and by columns; what lies by columns is transposed. Scales are reciprocals of
what numbers were multiplied with, in matrices that are padded with zeros: of squares as the matrix lies, of stretches
with the stretch first. Weights are cast in squares, where both sides have the same bytes; inputs and gradients in
stretches of each side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.numbers import (
    LARGEST,
    kept_side,
    scale_for,
    tensor_in_blocks,
    to_eight_bits,
    torch_dtype,
)

__all__ = ["fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast"]

BLOCK = 128


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A blockwise tensor without values, in the light form where the quantizer is for internal use.

    Args:
        quantizer: The format, and whether rows and columns are kept.
        shape: The shape of the tensor.
        dtype: The dtype that it stands for.
    """
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    in_squares = quantizer.block_scaling_dim == 2
    contents: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": in_squares}
    for axis, is_kept in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        by_columns = axis == "columnwise"
        sizes, scales = _transposed(shape) if by_columns else list(shape), quantizer.get_scale_shape(shape, by_columns)
        contents[f"{axis}_data"] = torch.empty(sizes, dtype=torch.uint8) if is_kept else None
        contents[f"{axis}_scale_inv"] = torch.zeros(scales) if is_kept else None
    return tensor_in_blocks(Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage, quantizer, shape, dtype, contents)


def cast(values: torch.Tensor, quantizer: Any, into: Any) -> None:
    """Write values by rows and by columns, as far as the tensor keeps them.

    Args:
        values: In single precision.
        quantizer: The format.
        into: A blockwise tensor.
    """
    rows = values.reshape(-1, values.shape[-1])
    if into._rowwise_data is not None:
        _cast_rows(rows, quantizer, into._rowwise_data, into._rowwise_scale_inv)
    if into._columnwise_data is not None:
        _cast_rows(rows.t(), quantizer, into._columnwise_data, into._columnwise_scale_inv)


def values(tensor: Any, by_columns: bool) -> torch.Tensor:
    """What the bytes stand for, in single precision.

    Args:
        tensor: A blockwise tensor.
        by_columns: Whether it is read by columns, as the product that reads it needs it.

    Raises:
        NotImplementedError: It does not keep that side.
    """
    data, scales = kept_side(tensor, by_columns)
    rows = data.reshape(data.shape[0], -1) if by_columns else data.reshape(-1, data.shape[-1])
    scales = scales if tensor._is_2D_scaled else scales.t()
    numbers = rows.view(torch_dtype(tensor._fp8_dtype)).float()
    numbers = numbers * _of_elements(scales, rows.shape, in_squares=tensor._is_2D_scaled)
    return numbers.t().reshape(*data.shape[1:], data.shape[0]) if by_columns else numbers.reshape(data.shape)


def fp8_block_scaling_compute_partial_amax(
    shard: torch.Tensor, amax: torch.Tensor, height: int, width: int, start: int, _block: int
) -> None:
    """The largest magnitudes of squares of a weight, as far as a shard of its master weights has them.

    Args:
        shard: Elements of the flat weight.
        amax: Written to, a number for each square.
        height: Rows of the weight.
        width: Columns of the weight.
        start: The element of the weight at which the shard begins.
        _block: Not used.
    """
    flat = torch.zeros(height * width)
    flat[start : start + shard.numel()] = shard.detach().float()
    found = _largest(flat.view(height, width), in_squares=True)
    amax[: found.shape[0], : found.shape[1]].copy_(found)


def fp8_block_scaling_partial_cast(
    shard: torch.Tensor, into: torch.Tensor, scale: torch.Tensor, height: int, width: int, start: int, _block: int,
    dtype: int,
) -> None:  # fmt: skip
    """Cast a shard of master weights to bytes of the weight.

    Args:
        shard: Elements of the flat weight.
        into: The bytes of these elements.
        scale: What the numbers of each square are multiplied with.
        height: Rows of the weight.
        width: Columns of the weight.
        start: The element of the weight at which the shard begins.
        _block: Not used.
        dtype: The format, as a number of Transformer Engine.
    """
    scales = _of_elements(scale, (height, width), in_squares=True).reshape(-1)[start : start + shard.numel()]
    into.copy_(to_eight_bits(shard.detach().float() * scales, dtype))


def _cast_rows(rows: torch.Tensor, quantizer: Any, into: torch.Tensor, scales: torch.Tensor) -> None:
    scales.zero_()
    if not rows.numel():  # an expert without tokens
        return
    in_squares = quantizer.block_scaling_dim == 2
    amax = _largest(rows, in_squares=in_squares)
    scale = scale_for(amax, LARGEST[int(quantizer.dtype)], quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    written = scale.reciprocal() if in_squares else scale.reciprocal().t()
    scales[: written.shape[0], : written.shape[1]].copy_(written)
    scaled = rows * _of_elements(scale, rows.shape, in_squares=in_squares)
    into.copy_(to_eight_bits(scaled, quantizer.dtype).reshape(into.shape))


def _largest(rows: torch.Tensor, *, in_squares: bool) -> torch.Tensor:
    """Of each block; a row of blocks for each row, or for 128 of them."""
    (count, width), high = rows.shape, BLOCK if in_squares else 1
    down, across = math.ceil(count / high), math.ceil(width / BLOCK)
    padded = torch.nn.functional.pad(rows, (0, across * BLOCK - width, 0, down * high - count))
    return padded.reshape(down, high, across, BLOCK).abs().amax((1, 3))


def _of_elements(of_blocks: torch.Tensor, shape: Sequence[int], *, in_squares: bool) -> torch.Tensor:
    """The number of each element's block, of what `_largest` has or more."""
    count, width = shape
    of_rows = of_blocks.repeat_interleave(BLOCK, 0) if in_squares else of_blocks
    return of_rows.repeat_interleave(BLOCK, 1)[:count, :width]


def _transposed(shape: Sequence[int]) -> list[int]:
    return [shape[-1], *shape[:-1]] if len(shape) else []
