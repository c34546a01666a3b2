"""Casts to four bits: NVFP4, where 16 numbers share a scale of eight bits, and all of a tensor its largest value.

Two numbers (E2M1) lie in a byte. By columns a tensor is kept transposed. Weights have a scale for 16 by 16 numbers, so
that columns follow from rows; of activations and gradients both are cast from the values. Gradients are rounded by
random numbers of the device's generator. Rotations (Hadamard) are left out: in a product they cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.numbers import kept_side, tensor_in_blocks

__all__ = [
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_compute_global_scale",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_multi_tensor_fused_scale",
]

BLOCK = 16
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST, _LARGEST_SCALE = 6.0, 448.0


def empty(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """An NVFP4 tensor without values, in the light form where the quantizer is for internal use.

    Args:
        quantizer: Whether rows and columns are kept.
        shape: The shape of the tensor.
        dtype: The dtype that it stands for.
    """
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    rows, width = math.prod(shape[:-1]), shape[-1]
    contents: dict[str, Any] = {"fp4_dtype": quantizer.dtype, "quantizer": quantizer}
    sizes = {"rowwise": (*shape[:-1], width // 2), "columnwise": (width, rows // 2)}
    for axis, is_kept in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        scales = quantizer.get_scale_shape(shape, axis == "columnwise")
        contents[f"{axis}_data"] = torch.zeros(sizes[axis], dtype=torch.uint8) if is_kept else None
        contents[f"{axis}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8) if is_kept else None
        contents[f"amax_{axis}"] = torch.zeros(1) if is_kept else None
    return tensor_in_blocks(NVFP4Tensor, NVFP4TensorStorage, quantizer, shape, dtype, contents)


def cast(values: torch.Tensor, quantizer: Any, into: Any) -> None:
    """Write values by rows and by columns, as far as the tensor keeps them.

    Args:
        values: In single precision.
        quantizer: How scales are shared, and numbers rounded.
        into: An NVFP4 tensor.
    """
    rows = values.reshape(-1, values.shape[-1])
    amax = rows.abs().max().view(1) if rows.numel() else torch.zeros(1)
    if quantizer.with_amax_reduction:
        group = quantizer.amax_reduction_group
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    height = BLOCK if quantizer.with_2d_quantization else 1
    for axis, matrix in (("rowwise", rows), ("columnwise", rows.t())):
        data = getattr(into, f"_{axis}_data")
        if data is None or not rows.numel():
            continue
        getattr(into, f"_amax_{axis}").copy_(amax)
        scales = _scales(_largest(matrix, height), amax)
        _write_scales(getattr(into, f"_{axis}_scale_inv"), scales, height)
        codes = _codes(matrix, _of_elements(scales, matrix.shape, height), _whole(amax), quantizer.stochastic_rounding)
        data.view(matrix.shape[0], -1).copy_(_packed(codes))


def values(tensor: Any, by_columns: bool) -> torch.Tensor:
    """What the numbers stand for, in single precision.

    Args:
        tensor: An NVFP4 tensor.
        by_columns: Whether it is read by columns, as the product that reads it needs it.

    Raises:
        NotImplementedError: It does not keep that side.
    """
    data, scales = kept_side(tensor, by_columns)
    codes = _unpacked(data.flatten(0, -2))
    amax = tensor._amax_columnwise if by_columns else tensor._amax_rowwise
    found = _numbers(codes) * _of_elements(scales.view(torch.float8_e4m3fn).float(), codes.shape, 1) / _whole(amax)
    return found.t() if by_columns else found.reshape(*data.shape[:-1], codes.shape[1])


def nvfp4_multi_tensor_compute_partial_amax(
    masters: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor], whole: Sequence[torch.Tensor],
    heights: Sequence[int], widths: Sequence[int], starts: Sequence[int], _block: int,
) -> None:  # fmt: skip
    """The largest values of the blocks of weights, of the shards that a rank has.

    Args:
        masters: Flat shards of weights.
        amaxes: Of the blocks of each weight, written to.
        whole: Of each weight, written to.
        heights: Rows of each weight.
        widths: Columns of each weight.
        starts: Where each shard begins.
        _block: Not used.
    """
    for master, amax, one, height, width, start in zip(masters, amaxes, whole, heights, widths, starts, strict=True):
        amax.copy_(_largest(_placed(master.float(), height, width, start), BLOCK))
        one.copy_(amax.max())


def nvfp4_compute_global_scale(amaxes: torch.Tensor, scales: torch.Tensor) -> None:
    """What all numbers of a weight are multiplied with.

    Args:
        amaxes: The largest value of each weight.
        scales: Written to.
    """
    scales.copy_(_whole(amaxes))


def nvfp4_multi_tensor_fused_scale(
    amaxes: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor], kept: Sequence[torch.Tensor], _rows: object, _columns: object, _padded: object,
    _block: int,
) -> None:  # fmt: skip
    """The scales of blocks, and where weights keep them.

    Args:
        amaxes: The largest values of the blocks of each weight.
        whole: The largest value of each weight.
        scales: Of blocks, written to.
        written: Scales of the rows of blocks of each weight, written to.
        kept: The largest value of each weight, written to.
        _rows: Not used.
        _columns: Not used.
        _padded: Not used.
        _block: Not used.
    """
    for amax, one, scale, rows, place in zip(amaxes, whole, scales, written, kept, strict=True):
        scale.copy_(_scales(amax, one))
        _write_scales(rows, scale, BLOCK)
        place.copy_(one.view(place.shape))


def nvfp4_multi_tensor_2d_partial_cast(
    masters: Sequence[torch.Tensor], into: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor], heights: Sequence[int], widths: Sequence[int], starts: Sequence[int], _block: int,
) -> None:  # fmt: skip
    """Cast the shards that a rank has.

    Args:
        masters: Flat shards of weights.
        into: Their bytes, written to.
        scales: Of the blocks of each weight.
        whole: What all numbers of a weight are multiplied with.
        heights: Rows of each weight.
        widths: Columns of each weight.
        starts: Where each shard begins; two numbers are a byte, so they are even.
        _block: Not used.
    """
    every = zip(masters, into, scales, whole, heights, widths, starts, strict=True)
    for master, data, scale, one, height, width, start in every:
        matrix = _placed(master.float(), height, width, start)
        codes = _codes(matrix, _of_elements(scale, matrix.shape, BLOCK), one, False).view(-1)
        data.copy_(_packed(codes[start : start + master.numel()].view(1, -1)).view(data.shape))


def nvfp4_2d_multi_tensor_transpose(
    rows: Sequence[torch.Tensor], columns: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    of_columns: Sequence[torch.Tensor], heights: Sequence[int], widths: Sequence[int],
) -> None:  # fmt: skip
    """Weights by columns, from what they are by rows.

    Args:
        rows: The bytes of each weight.
        columns: Its bytes by columns, written to.
        scales: Its scales by rows.
        of_columns: Its scales by columns, written to.
        heights: Rows of each weight.
        widths: Columns of each weight.
    """
    for data, turned, scale, written, height, width in zip(
        rows, columns, scales, of_columns, heights, widths, strict=True
    ):
        turned.copy_(_packed(_unpacked(data.view(height, -1)).t()).view(turned.shape))
        blocks = scale.view(torch.float8_e4m3fn)[:height:BLOCK, : math.ceil(width / BLOCK)].float()
        _write_scales(written, blocks.t(), BLOCK)


def _whole(amax: torch.Tensor) -> torch.Tensor:
    return torch.where(amax > 0, _LARGEST * _LARGEST_SCALE / amax, torch.ones_like(amax))


def _placed(master: torch.Tensor, height: int, width: int, start: int) -> torch.Tensor:
    """A matrix with a flat shard at its place, else zeros."""
    flat = torch.zeros(height * width)
    flat[start : start + master.numel()] = master.view(-1)
    return flat.view(height, width)


def _largest(matrix: torch.Tensor, height: int) -> torch.Tensor:
    """The largest magnitudes of blocks of `height` rows."""
    rows, width = (math.ceil(size / of) for size, of in zip(matrix.shape, (height, BLOCK), strict=True))
    padding = (0, width * BLOCK - matrix.shape[1], 0, rows * height - matrix.shape[0])
    return torch.nn.functional.pad(matrix.abs(), padding).view(rows, height, width, BLOCK).amax((1, 3))


def _scales(amaxes: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Scales of blocks, rounded as they are kept."""
    exact = amaxes / _LARGEST * _whole(amax)
    return exact.clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn).float()


def _write_scales(into: torch.Tensor, scales: torch.Tensor, height: int) -> None:
    rows = scales.to(torch.float8_e4m3fn).view(torch.uint8).repeat_interleave(height, 0)[: into.shape[0]]
    into.zero_()
    into[: rows.shape[0], : rows.shape[1]].copy_(rows)


def _of_elements(scales: torch.Tensor, shape: Sequence[int], height: int) -> torch.Tensor:
    return scales.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def _codes(matrix: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, by_chance: bool) -> torch.Tensor:
    """Numbers of four bits: the nearest, or one of both neighbors by chance."""
    scaled = torch.where(scales > 0, matrix * whole / scales, torch.zeros_like(matrix)).clamp(-_LARGEST, _LARGEST)
    numbers, magnitude = torch.tensor(_NUMBERS), scaled.abs().contiguous()
    below = torch.bucketize(magnitude, numbers, right=True).sub(1).clamp(max=len(_NUMBERS) - 2)
    share = (magnitude - numbers[below]) / (numbers[below + 1] - numbers[below])
    # Else ties to even.
    is_above = share > torch.rand(share.shape) if by_chance else (share > 0.5) | ((share == 0.5) & (below % 2 == 1))
    return (below + is_above).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])[codes.long()]


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _unpacked(data: torch.Tensor) -> torch.Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(1)
