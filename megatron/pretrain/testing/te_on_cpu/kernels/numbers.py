"""Number formats of Transformer Engine as torch has them."""

from __future__ import annotations

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
