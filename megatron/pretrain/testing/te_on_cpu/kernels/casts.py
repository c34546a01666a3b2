"""Casts to and from eight bits: Float8 tensors with one scale each, under delayed and under current scaling.

A Float8 tensor has bytes (`_data`, E4M3 or E5M2), the reciprocal of the scale that they were multiplied with
(`_scale_inv`), and on GPUs of the kind that `cpu_device.engine` plays the transpose of the bytes (`_transpose`), from
which backward passes read. Delayed scaling takes the scale that it finds and notes the largest value; current scaling
takes the scale from the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.pretrain.testing.te_on_cpu.kernels import blockwise, four_bits, mxfp8
from megatron.pretrain.testing.te_on_cpu.kernels.numbers import LARGEST, scale_for, to_eight_bits, torch_dtype

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "quantize",
    "split_quantize",
]

_BLOCKS: dict[str, Any] = {
    "MXFP8Quantizer": mxfp8, "NVFP4Quantizer": four_bits, "Float8BlockQuantizer": blockwise,
}  # fmt: skip
"""By quantizers that take a scale for each block: the module that casts for them."""


def quantize(source: torch.Tensor, quantizer: Any, into: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`source` in the format of the quantizer.

    Args:
        source: The values.
        quantizer: The format and the scaling.
        into: Where they go; None: a new tensor.
        noop: Of one element: if it is set, `into` stays as it is.

    Raises:
        NotImplementedError: The quantizer is of another kind than delayed and current scaling, MXFP8, NVFP4 and
            blockwise.
    """
    if into is not None and noop is not None and bool(noop):
        return into
    values = values_of(source.detach())
    if into is None:
        into = create_empty_quantized_tensor(quantizer, list(values.shape), source.dtype)
    if (blocks := _BLOCKS.get(type(quantizer).__name__)) is not None:
        blocks.cast(values, quantizer, into)
        return into
    scale = _scale(values, quantizer)
    payload = to_eight_bits(values * scale, quantizer.dtype)
    if into._data is not None:
        into._data.copy_(payload.view(into._data.shape))
    if into._transpose is not None:
        fp8_transpose(payload, quantizer.dtype, out=into._transpose)
        into._transpose_invalid = False
    into._scale_inv.copy_(scale.reciprocal().view(into._scale_inv.shape))
    return into


def split_quantize(
    source: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Any], *, disable_bulk_allocation: bool = False
) -> list[Any]:
    """Rows of a matrix, in the format of several quantizers.

    Args:
        source: The matrix.
        splits: The number of rows of each quantizer.
        quantizers: The formats.
        disable_bulk_allocation: Not used.
    """
    parts = torch.split(source, [int(rows) for rows in splits])
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def bgrad_quantize(gradient: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """The gradient of a bias, which is the sum over rows, and the gradient in eight bits.

    Args:
        gradient: The gradient of the outputs; its last dimension is that of the bias.
        quantizer: The format and the scaling.
    """
    of_bias = gradient.float().reshape(-1, gradient.shape[-1]).sum(0).to(gradient.dtype)
    return of_bias, quantize(gradient, quantizer)


def dequantize(tensor: Any, dtype: int | torch.dtype) -> torch.Tensor:
    """The values of a Float8 tensor.

    Args:
        tensor: A Float8 tensor.
        dtype: The dtype of the result, of torch or as a number of Transformer Engine.
    """
    return values_of(tensor).to(torch_dtype(dtype))


def fp8_transpose(data: torch.Tensor, _dtype: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes with the last dimension first.

    Args:
        data: The bytes.
        _dtype: Not used.
        out: Where they go; None: a new tensor.
    """
    moved = data.movedim(-1, 0).contiguous()
    return moved if out is None else out.copy_(moved.view(out.shape))


def compute_amax(source: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of a tensor.

    Args:
        source: The tensor.
        amax: Of one element, written to.
    """
    amax.copy_(_largest(source.detach().float()).view(amax.shape))


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: object = None, pin_memory: bool = False
) -> Any:
    """A Float8 tensor without values, in the light form where the quantizer is for internal use.

    Args:
        quantizer: The format, and whether rows and columns are kept.
        shape: The shape of the tensor.
        dtype: The dtype that it stands for.
        device: Not used.
        pin_memory: Not used.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    refuse_other_quantizers(quantizer)
    if (blocks := _BLOCKS.get(type(quantizer).__name__)) is not None:
        return blocks.empty(quantizer, shape, dtype)
    rows = torch.empty(list(shape), dtype=torch.uint8) if quantizer.rowwise_usage else None
    transposed = [shape[-1], *shape[:-1]] if len(shape) else []
    columns = torch.empty(transposed, dtype=torch.uint8) if quantizer.columnwise_usage else None
    contents = {
        "data": rows,
        "data_transpose": columns,
        "fp8_scale_inv": torch.empty(1),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**contents)
    return Float8Tensor(shape=list(shape), dtype=dtype, requires_grad=False, **contents)


def values_of(tensor: Any, by_columns: bool | None = None) -> torch.Tensor:
    """In single precision, whatever a tensor is kept in.

    Args:
        tensor: Of any dtype, or with a scale, or with a scale for each block.
        by_columns: Which of both that has scales for blocks is read; None: rows where they are kept.
    """
    if hasattr(tensor, "_rowwise_scale_inv"):
        blocks = four_bits if hasattr(tensor, "_fp4_dtype") else mxfp8
        blocks = blockwise if hasattr(tensor, "_is_2D_scaled") else blocks
        return blocks.values(tensor, tensor._rowwise_data is None if by_columns is None else by_columns)
    if not hasattr(tensor, "_scale_inv"):
        return tensor.float()
    if not hasattr(tensor, "_fp8_dtype") or not hasattr(tensor, "_transpose"):
        raise NotImplementedError(f"{type(tensor).__name__} has no stand-in for the CPU: use another --fp8-recipe")
    rows = tensor._data if tensor._data is not None else tensor._transpose.movedim(0, -1)
    return rows.contiguous().view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv


def refuse_other_quantizers(quantizer: Any) -> None:
    """Raises NotImplementedError for quantizers of other formats than one scale per tensor or for known blocks."""
    if type(quantizer).__name__ not in ("Float8Quantizer", "Float8CurrentScalingQuantizer", *_BLOCKS):
        raise NotImplementedError(
            f"{type(quantizer).__name__} has no stand-in for the CPU: use --fp8-recipe delayed, tensorwise, mxfp8 or"
            " blockwise"
        )


def _scale(values: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """What `values` are multiplied with; of one element."""
    refuse_other_quantizers(quantizer)
    amax = _largest(values)
    if type(quantizer).__name__ == "Float8Quantizer":
        if quantizer.amax.numel():
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view(quantizer.amax.shape)))
        delayed: torch.Tensor = quantizer.scale.view(1).clone()
        return delayed
    kept = getattr(quantizer, "amax", None)  # up to Transformer Engine 2.11
    if kept is not None and quantizer.use_existing_amax:
        amax = kept.clone().view(1)
    if quantizer.with_amax_reduction:
        group = quantizer.amax_reduction_group
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    scale = scale_for(amax, LARGEST[int(quantizer.dtype)], quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    if kept is not None:
        kept.copy_(amax.view(kept.shape))
        quantizer.scale.copy_(scale.view(quantizer.scale.shape))
    return scale


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.abs().max().view(1) if math.prod(values.shape) else torch.zeros(1)
