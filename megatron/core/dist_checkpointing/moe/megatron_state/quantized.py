"""Tensors of few bits and the scales beside them: what of both is stored, and under which field.

Exact is only what is stored as it lies in memory: the payload, and the scale as its own record. A value that goes
through single precision and back gets another scale in its last bit.

    a value                                            records
    tensor of any dtype without a scale                FIELD
    tensor with a scale kept elsewhere                 FIELD (as it is), FIELD_scale
    Float8Tensor of Transformer Engine                 FIELD (uint8, `_data`), FIELD_scale (fp32, `_scale_inv`)

Checked against Transformer Engine 2.11.0 and 2.20.2. What follows from the payload is not stored: `_transpose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_SCALE = "_scale"


def is_quantized(value: Any) -> bool:
    """Whether this is a Float8Tensor: its own storage is empty, payload and scale are attributes."""
    return hasattr(value, "_scale_inv") and hasattr(value, "_data")


def raw_fields(field: str, value: Any, scale: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of the records of a value, each with the flat view into live storage that it is copied from and into.

    Args:
        field: The name of the value: `compute`, `master`, `exp_avg`, ...
        value: Any shape and dtype; a Float8Tensor stands for its payload and its scale.
        scale: Of one element, for a value that is no Float8Tensor and whose scale is kept elsewhere.
    """
    yield field, raw(value)
    if is_quantized(value):
        scale = value._scale_inv
    if scale is not None:
        yield field + _SCALE, scale.detach().view(-1)


def raw(value: Any) -> torch.Tensor:
    """The payload of a value, flat: of a Float8Tensor its bytes, else the tensor itself."""
    payload: torch.Tensor = value._data if is_quantized(value) else value
    return payload.detach().view(-1)


def is_scale(field: str) -> bool:
    """Whether the record of this field is a scale, as long as one element whatever it is the scale of."""
    return field.endswith(_SCALE)
