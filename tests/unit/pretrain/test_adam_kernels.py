"""Adam over weights, masters and moments of few bits: computed as over fp32, rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pretrain.testing.te_on_cpu.kernels import adam

HYPER = (0.05, 0.9, 0.95, 1e-8)
E4M3, E5M2 = 7, 8


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stepped(
    kernel: Callable[..., None], step: int, *tensors: torch.Tensor, mode: int = 1, more: tuple[int, ...] = ()
) -> None:
    kernel(0, torch.zeros(1), [[tensor] for tensor in tensors], *HYPER, step, mode, 1, 0.1, *more)


def joined(weights: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The master that a weight and its remainder are the halves of."""
    upper = weights.view(torch.int16).int() - (remainder < 0).int()
    return (upper << 16 | remainder.int() & 0xFFFF).view(torch.float32)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0, 1]), st.floats(1e-6, 1e3))
def test_weights_and_remainders_are_a_master_of_32_bits(seed: int, mode: int, scale: float) -> None:
    weights = drawn(64, seed=seed, dtype=torch.bfloat16) * scale
    remainder, master, cast = torch.zeros(64, dtype=torch.int16), weights.float(), weights.clone()
    moments, expected = [torch.zeros(64) for _ in range(2)], [torch.zeros(64) for _ in range(2)]
    for step in (1, 2, 3):
        gradient = drawn(64, seed=seed + step)
        stepped(adam.multi_tensor_adam_param_remainder, step, gradient, weights, *moments, remainder, mode=mode)
        stepped(adam.multi_tensor_adam, step, gradient, cast, *expected, master, mode=mode)
        assert torch.equal(joined(weights, remainder), master)
    # Half a step up is rounded away from zero here, and to even by a cast.
    ulps = (weights.view(torch.int16).int() - cast.view(torch.int16).int()).abs()
    assert torch.equal(ulps.bool(), ulps.bool() & ((master.view(torch.int32) & 0xFFFF) == 0x8000))


def test_remainders_of_other_weights_than_bf16_are_refused() -> None:
    tensors = [torch.zeros(2) for _ in range(4)]
    with pytest.raises(RuntimeError, match=r"int16 for weights of torch.float32"):
        stepped(adam.multi_tensor_adam_param_remainder, 1, *tensors, torch.zeros(2, dtype=torch.int16))


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16])
def test_weights_are_the_cast_of_the_result_before_the_master_is_rounded(weights: torch.dtype) -> None:
    model, master = drawn(512, dtype=weights), drawn(512)
    stepped(adam.multi_tensor_adam, 1, drawn(512, seed=1), model, torch.zeros(512), torch.zeros(512), master)
    assert torch.equal(model, master.to(weights))
    kept = (master / 1.3).half().float() * 1.3  # as an fp16 master with a scale is kept until the next step
    assert not torch.equal(model, kept.to(weights))


def test_moments_of_bf16_are_computed_in_single_precision_and_rounded_once() -> None:
    narrow, wide = [torch.zeros(64, dtype=torch.bfloat16) for _ in range(2)], [torch.zeros(64) for _ in range(2)]
    models = [drawn(64, dtype=torch.bfloat16) for _ in range(2)]
    masters = [model.float() for model in models]
    for step in (1, 2):
        for moment, rounded in zip(wide, narrow, strict=True):
            moment.copy_(rounded)
        for model, moments, master in zip(models, (narrow, wide), masters, strict=True):
            stepped(adam.multi_tensor_adam, step, drawn(64, seed=step), model, *moments, master)
        for moment, rounded in zip(wide, narrow, strict=True):
            assert torch.equal(moment.bfloat16(), rounded)
    assert torch.equal(*masters)


@pytest.mark.parametrize(("format", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_weights_of_eight_bits_are_the_cast_of_the_scaled_master(format: int, dtype: torch.dtype) -> None:
    master, model = drawn(64), torch.zeros(64, dtype=torch.uint8)
    scale, amax, inverse = torch.tensor([300.0]), torch.tensor([0.5]), torch.zeros(1)
    of_both = (torch.zeros(64), torch.zeros(64), master, scale, amax, inverse)
    stepped(adam.multi_tensor_adam_fp8, 1, drawn(64, seed=1), model, *of_both, more=(format,))
    largest = torch.finfo(dtype).max
    assert torch.equal(model.view(dtype).float(), (master * 300).clamp(-largest, largest).to(dtype).float())
    assert amax == master.abs().max()
    assert inverse == 1 / scale
    amax.fill_(1e3)
    stepped(adam.multi_tensor_adam_fp8, 2, drawn(64, seed=1), model, *of_both, more=(format,))
    assert amax == 1e3


def test_masters_of_weights_of_eight_bits_are_fp32() -> None:
    tensors = [torch.zeros(2) for _ in range(4)]
    tensors[3] = tensors[3].half()
    with pytest.raises(RuntimeError, match=r"masters of torch\.float16"):
        stepped(adam.multi_tensor_adam_fp8, 1, torch.zeros(2), *tensors, *(torch.ones(1),) * 3, more=(E4M3,))
