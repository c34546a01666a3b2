"""Casts to eight bits with a scale for each block: MXFP8, where 32 numbers of a row or a column share a power of two.

A tensor has bytes and scales by rows (`_rowwise_data`, `_rowwise_scale_inv`) and by columns, each cast from the values
themselves: neither follows from the other. Scales are biased exponents (E8M0), in matrices whose sizes are rounded up
to what a GPU's layout takes; beyond the blocks they stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.numbers import LARGEST, kept_side, tensor_in_blocks, torch_dtype

BLOCK = 32
_BIAS = 127


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """An MXFP8 tensor without values, in the light form where the quantizer is for internal use.

    Args:
        quantizer: The format, and whether rows and columns are kept.
        shape: The shape of the tensor.
        dtype: The dtype that it stands for.
    """
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    if getattr(quantizer, "with_2d_quantization", False):
        raise NotImplementedError("MXFP8 in squares has no stand-in for the CPU: leave enable_2d_quantization out")
    contents: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    for axis, is_kept in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        scales = quantizer.get_scale_shape(shape, axis == "columnwise")
        contents[f"{axis}_data"] = torch.empty(list(shape), dtype=torch.uint8) if is_kept else None
        contents[f"{axis}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8) if is_kept else None
    return tensor_in_blocks(MXFP8Tensor, MXFP8TensorStorage, quantizer, shape, dtype, contents)


def cast(values: torch.Tensor, quantizer: Any, into: Any) -> None:
    """Write values by rows and by columns, as far as the tensor keeps them.

    Args:
        values: In single precision.
        quantizer: The format.
        into: An MXFP8 tensor.
    """
    rows = values.reshape(-1, values.shape[-1])
    if into._rowwise_data is not None:
        _cast_rows(rows, quantizer.dtype, into._rowwise_data.view(rows.shape), into._rowwise_scale_inv)
    if into._columnwise_data is not None:
        columns = into._columnwise_data.view(rows.shape).t()
        _cast_rows(rows.t(), quantizer.dtype, columns, into._columnwise_scale_inv.t())


def values(tensor: Any, by_columns: bool) -> torch.Tensor:
    """What the bytes stand for, in single precision.

    Args:
        tensor: An MXFP8 tensor.
        by_columns: Whether it is read by columns, as the product that reads it needs it.

    Raises:
        NotImplementedError: It does not keep that side.
    """
    data, scales = kept_side(tensor, by_columns)
    numbers = data.view(torch_dtype(tensor._fp8_dtype)).float().reshape(-1, data.shape[-1])
    if by_columns:
        return (numbers.t() * _of_elements(scales.t(), numbers.t().shape)).t().reshape(data.shape)
    return (numbers * _of_elements(scales, numbers.shape)).reshape(data.shape)


def _cast_rows(rows: torch.Tensor, dtype: int, into: torch.Tensor, scales: torch.Tensor) -> None:
    (count, width), largest = rows.shape, LARGEST[int(dtype)]
    scales.zero_()
    if not rows.numel():  # an expert without tokens
        return
    blocks = math.ceil(width / BLOCK)
    padded = torch.nn.functional.pad(rows, (0, blocks * BLOCK - width)).view(count, blocks, BLOCK)
    scales[:count, :blocks].copy_(_exponents(padded.abs().amax(2) / largest))
    # Not divided by the scale: the least is no normal number, which threads of torch may take for zero.
    scaled = (rows * _of_elements(scales, rows.shape, -1)).clamp(-largest, largest)
    into.copy_(scaled.to(torch_dtype(dtype)).view(torch.uint8))


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not below, as biased exponents."""
    bits = largest.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & ((1 << 23) - 1)
    # Below the smallest normal number there is one more power, with the exponent 0.
    above = torch.where(exponent == 0, mantissa > 1 << 22, mantissa > 0)
    return (exponent + above).clamp(max=254).to(torch.uint8)


def _of_elements(scales: torch.Tensor, shape: Sequence[int], sign: int = 1) -> torch.Tensor:
    """The scale of each element of a matrix whose rows are cut into blocks, or with -1 its reciprocal."""
    count, width = shape
    powers = torch.pow(2.0, sign * (scales[:count, : math.ceil(width / BLOCK)].double() - _BIAS))
    return powers.float().repeat_interleave(BLOCK, 1)[:, :width]
