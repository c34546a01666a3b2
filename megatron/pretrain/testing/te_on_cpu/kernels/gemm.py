"""Matrix products. As cuBLAS has them: the operands of a row-major product are exchanged.

`transposed_a, transposed_b` of a linear layer: (True, False) y = x w^T, (False, False) dx = dy w, (False, True)
dw = dy^T x; `a` is the weight, or with (False, True) the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.pretrain.testing.te_on_cpu.kernels.casts import quantize, values_of
from megatron.pretrain.testing.te_on_cpu.kernels.numbers import torch_dtype

__all__ = ["generic_gemm", "te_general_grouped_gemm"]

type MaybeTensor = torch.Tensor | None


def generic_gemm(
    a: torch.Tensor, transposed_a: bool, b: torch.Tensor, transposed_b: bool, out: MaybeTensor, quantizer: object,
    dtype: int | None, bias: MaybeTensor, _bias_dtype: int, gelu: bool, gelu_input: MaybeTensor, grad: bool,
    _workspace: object, _workspace_size: int, accumulate: bool, _split_accumulator: bool, **options: Any,
) -> tuple[torch.Tensor, MaybeTensor, MaybeTensor, MaybeTensor]:  # fmt: skip
    """The product, with the bias added in a forward pass; in a backward pass, and given a bias, its gradient too.

    Operands may be Float8 tensors.

    Args:
        a: The right operand, as cuBLAS exchanges them.
        transposed_a: Whether it is transposed.
        b: The left operand.
        transposed_b: Whether it is transposed.
        out: Where the product goes; None: a new tensor.
        quantizer: The format of the output; None: that of `dtype`.
        dtype: The dtype of a new output, as a number of Transformer Engine; None: bf16.
        bias: The bias, or None.
        _bias_dtype: Not used.
        gelu: Whether a GELU follows, which is refused.
        gelu_input: Handed back.
        grad: Whether this is a backward pass.
        _workspace: Not used.
        _workspace_size: Not used.
        accumulate: Whether the product is added to `out`.
        _split_accumulator: Not used.
        **options: Of these `extra_output` is handed back, and `comm_overlap` refused.
    """
    if gelu or options.get("comm_overlap") is not None:
        raise NotImplementedError("products with a GELU or communication in them have no stand-in for the CPU")
    product = _product(a, transposed_a, b, transposed_b)
    bias_gradient = _rows(values_of(b)).sum(0).to(bias.dtype) if grad and bias is not None else None
    if bias is not None and not grad:
        product = product + bias.float()
    if quantizer is not None:
        out = quantize(product, quantizer, out)
    elif out is None:
        out = product.to(torch.bfloat16 if dtype is None else torch_dtype(dtype))
    else:
        _write(out, product, accumulate)
    return out, bias_gradient, gelu_input, options.get("extra_output")


def te_general_grouped_gemm(
    a: Sequence[torch.Tensor], transposed_a: bool, b: Sequence[torch.Tensor], transposed_b: bool,
    out: Sequence[torch.Tensor], dtype: int, splits: Sequence[int], bias: Sequence[torch.Tensor], _bias_dtype: int,
    single_output: bool, gelu_input: object, grad: bool, _workspaces: object, _workspace_size: int, accumulate: bool,
    _split_accumulator: bool, _sm_count: int,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """One product for each pair.

    Args:
        a: The right operands, as cuBLAS exchanges them.
        transposed_a: Whether they are transposed.
        b: The left operands.
        transposed_b: Whether they are transposed.
        out: Where the products go.
        dtype: Not used.
        splits: The rows of each product in a single output.
        bias: The biases; with `grad` their gradients are written to them.
        _bias_dtype: Not used.
        single_output: Whether `out` is one matrix with all rows.
        gelu_input: Not used.
        grad: Whether this is a backward pass.
        _workspaces: Not used.
        _workspace_size: Not used.
        accumulate: Whether products are added to `out`.
        _split_accumulator: Not used.
        _sm_count: Not used.
    """
    outputs = torch.split(out[0], [int(rows) for rows in splits]) if single_output else out
    for each, (left, right, written) in enumerate(zip(a, b, outputs, strict=True)):
        added = bias[each] if bias and bias[each].numel() else None
        if grad and added is not None:
            added.copy_(_rows(values_of(right)).sum(0))
        product = _product(left, transposed_a, right, transposed_b)
        _write(written, product if grad or added is None else product + added.float(), accumulate)
    return bias


def _product(a: torch.Tensor, transposed_a: bool, b: torch.Tensor, transposed_b: bool) -> torch.Tensor:
    """In single precision, whatever the operands are; leading dimensions of `b` stay."""
    inputs = values_of(b, transposed_b)  # along the dimension that is summed over
    left, right = _rows(values_of(a, not transposed_a)), _rows(inputs)
    if transposed_b:
        return right.t() @ left
    product = right @ (left.t() if transposed_a else left)
    return product.reshape(*inputs.shape[:-1], product.shape[-1])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@torch.no_grad()  # delayed gradients of weights are computed outside of backward passes, and kernels know no autograd
def _write(out: torch.Tensor, product: torch.Tensor, accumulate: bool) -> None:
    product = product.reshape(out.shape)
    out.copy_(out.float() + product if accumulate else product)
