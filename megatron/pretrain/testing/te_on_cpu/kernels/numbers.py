"""Number formats of Transformer Engine as torch has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_FORMATS = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}

LARGEST = {7: 448.0, 8: 57344.0}
"""The largest number of a format of eight bits."""


def torch_dtype(format: int | torch.dtype) -> torch.dtype:
    """The dtype of a number in the compiled code's enumeration; one of torch's own stays."""
    return format if isinstance(format, torch.dtype) else _FORMATS[int(format)]


def to_eight_bits(values: torch.Tensor, dtype: int) -> torch.Tensor:
    """The bytes of the nearest numbers of the format; larger ones become the largest, NaN stays.

    Args:
        values: The numbers, already scaled.
        dtype: The format, as a number of Transformer Engine.
    """
    largest = LARGEST[int(dtype)]
    return values.clamp(-largest, largest).to(torch_dtype(dtype)).view(torch.uint8)


def scale_for(amax: torch.Tensor, largest: float, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """The scale of current scaling: the largest value of the tensor becomes the largest of the format.

    Args:
        amax: The largest magnitude of the tensor, of one element.
        largest: The largest number of the format.
        power_of_two: Whether the scale is rounded down to one.
        epsilon: The least value that counts as the largest.
    """
    amax = amax.clamp(min=epsilon)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(amax), largest / amax)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, torch.finfo(torch.float32).max), scale)
    if power_of_two:  # the exponent alone
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return scale


def kept_side(tensor: Any, by_columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes and the scales of one side of a tensor with a scale for each block.

    Args:
        tensor: Of Transformer Engine.
        by_columns: Which side.

    Raises:
        NotImplementedError: It does not keep that side.
    """
    axis = "columnwise" if by_columns else "rowwise"
    data = getattr(tensor, f"_{axis}_data")
    if data is None:
        raise NotImplementedError(f"a product reads {type(tensor).__name__} as it is not kept, by columns={by_columns}")
    return data, getattr(tensor, f"_{axis}_scale_inv")


def tensor_in_blocks(
    kind: Any, light: Any, quantizer: Any, shape: Sequence[int], dtype: torch.dtype, contents: Mapping[str, Any]
) -> Any:
    """A tensor of numbers that share a scale by blocks, in the light form where the quantizer is for internal use.

    Args:
        kind: The class of the tensor.
        light: That of the light form.
        quantizer: Whose tensor it is.
        shape: The shape of the tensor.
        dtype: The dtype that it stands for.
        contents: Numbers and scales, by the names that both classes take.
    """
    if "with_gemm_swizzled_scales" in inspect.signature(light.__new__).parameters:
        contents = {**contents, "with_gemm_swizzled_scales": False}  # products here take scales as they are
    if quantizer.internal:
        return light(fake_dtype=dtype, **contents)
    return kind(shape=list(shape), dtype=dtype, requires_grad=False, **contents)
