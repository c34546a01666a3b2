"""Layer norm and RMS norm: rows of a matrix, statistics kept for the backward pass."""

from __future__ import annotations

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.casts import quantize
from megatron.pretrain.testing.te_on_cpu.kernels.numbers import torch_dtype

__all__ = ["layernorm_bwd", "layernorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd"]

type Output = torch.Tensor | None


def layernorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: Output, quantizer: object,
    dtype: int | torch.dtype, _sm_margin: int, zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalized rows, their means and the reciprocals of their standard deviations.

    Args:
        x: Rows of a matrix.
        weight: The gain of each column.
        bias: Added to each column.
        eps: Added to variances.
        out: Where normalized rows go; None: a new tensor.
        quantizer: The format of the output; None: that of `dtype`.
        dtype: The dtype of the output.
        _sm_margin: Not used.
        zero_centered: Whether 1 is added to the gain.
    """
    rows = x.float()
    mean = rows.mean(-1)
    rsigma = (rows.var(-1, unbiased=False) + eps).rsqrt()
    normalized = (rows - mean[:, None]) * rsigma[:, None] * _gain(weight, zero_centered) + bias.float()
    return _written(normalized, out, quantizer, dtype), mean, rsigma


def layernorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor,
    _sm_margin: int, zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of input, weight and bias.

    Args:
        dy: The gradient of the output.
        x: The input, rows of a matrix.
        mean: The mean of each row.
        rsigma: The reciprocal of the standard deviation of each row.
        weight: The gain of each column.
        _sm_margin: Not used.
        zero_centered: Whether 1 is added to the gain.
    """
    gradient = dy.float()
    normalized = (x.float() - mean[:, None]) * rsigma[:, None]
    scaled = gradient * _gain(weight, zero_centered)
    along = normalized * (scaled * normalized).mean(-1, keepdim=True)
    dx = rsigma[:, None] * (scaled - scaled.mean(-1, keepdim=True) - along)
    return dx.to(x.dtype), (gradient * normalized).sum(0).to(weight.dtype), gradient.sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: Output, quantizer: object, dtype: int | torch.dtype,
    _sm_margin: int, zero_centered: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    """Rows over their root mean square, and the reciprocals of those.

    Args:
        x: Rows of a matrix.
        weight: The gain of each column.
        eps: Added to mean squares.
        out: Where normalized rows go; None: a new tensor.
        quantizer: The format of the output; None: that of `dtype`.
        dtype: The dtype of the output.
        _sm_margin: Not used.
        zero_centered: Whether 1 is added to the gain.
    """
    rows = x.float()
    rsigma = (rows.square().mean(-1) + eps).rsqrt()
    return _written(rows * rsigma[:, None] * _gain(weight, zero_centered), out, quantizer, dtype), None, rsigma


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, weight: torch.Tensor, _sm_margin: int, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and weight.

    Args:
        dy: The gradient of the output.
        x: The input, rows of a matrix.
        rsigma: The reciprocal of the root mean square of each row.
        weight: The gain of each column.
        _sm_margin: Not used.
        zero_centered: Whether 1 is added to the gain.
    """
    gradient = dy.float()
    normalized = x.float() * rsigma[:, None]
    scaled = gradient * _gain(weight, zero_centered)
    dx = rsigma[:, None] * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    return dx.to(x.dtype), (gradient * normalized).sum(0).to(weight.dtype)


def _gain(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _written(values: torch.Tensor, out: Output, quantizer: object, dtype: int | torch.dtype) -> torch.Tensor:
    narrow = values.to(torch_dtype(dtype))
    if quantizer is not None:
        # Under delayed scaling the kernel casts what it has computed, under current scaling what it has written first.
        written: torch.Tensor = quantize(values if _is_delayed(quantizer) else narrow, quantizer, out)
        return written
    return narrow if out is None else out.copy_(narrow)


def _is_delayed(quantizer: object) -> bool:
    return type(quantizer).__name__ == "Float8Quantizer"
