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
