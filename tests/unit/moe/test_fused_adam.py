"""What `FusedAdam` lacks with state of few bits: values too small for a scale become zero, others stay to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import guard_scales, reload_masters

HALF, EIGHT = torch.finfo(torch.float16).max / 2, 448.0


class Float8:
    """As a Float8Tensor of Transformer Engine: bytes, and one over the scale that they were multiplied with."""

    def __init__(self, numel: int) -> None:
        self._data, self._scale_inv = torch.zeros(numel, dtype=torch.uint8), torch.ones(1)
        self._quantizer = SimpleNamespace(scale=torch.ones(1))
        self.dtype = torch.float32

    def copy_(self, values: torch.Tensor) -> None:
        scale = self._quantizer.scale
        self._data.copy_((values * scale).clamp(-EIGHT, EIGHT).to(torch.float8_e4m3fn).view(torch.uint8))
        self._scale_inv.copy_(1 / scale)

    def take(self, scale: torch.Tensor) -> None:
        self._quantizer.scale.copy_(scale)

    def values(self) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv


class Fused:
    """Rescales as `FusedAdam` of 2.11 and 2.20 does."""

    def __init__(self) -> None:
        self.state: dict[Any, dict[str, Any]] = {}
        self.param_groups: list[dict[str, Any]] = [{"params": []}]

    def _apply_scale(self, name: str, unscaled: torch.Tensor, scaled: Any, scale: torch.Tensor) -> None:
        if scaled.dtype is torch.bfloat16:
            scaled.copy_(unscaled)
            return
        torch.div(unscaled.abs().max(), EIGHT if isinstance(scaled, Float8) else HALF, out=scale)
        if isinstance(scaled, Float8):
            scaled.take(1 / scale)
            scaled.copy_(unscaled)
        else:
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
            scaled.copy_(unscaled)

    def rescaled(self, values: torch.Tensor, kind: str) -> torch.Tensor:
        scale = torch.ones(1)
        scaled: Any = (
            Float8(values.numel()) if kind == "fp8" else torch.zeros(values.numel(), dtype=getattr(torch, kind))
        )
        self._apply_scale("exp_avg", values.clone(), scaled, scale)
        if isinstance(scaled, Float8):
            return scaled.values()
        return scaled.float() * (scale if kind == "float16" else 1)


def guarded() -> Fused:
    fused = Fused()
    guard_scales(fused)
    guard_scales(fused)
    return fused


TINY = {"zeros": torch.zeros(4), "hardly anything": torch.tensor([0.0, 1e-38, -2e-39, 0.0])}


@pytest.fixture(autouse=True)
def denormals() -> None:
    torch.set_flush_denormal(False)  # as on GPUs


@pytest.mark.parametrize("kind", ["fp8", "float16"])
@pytest.mark.parametrize("values", TINY)
def test_what_is_too_small_for_a_scale_becomes_zero(kind: str, values: str) -> None:
    assert torch.equal(guarded().rescaled(TINY[values], kind), torch.zeros(4))


@pytest.mark.parametrize(
    ("kind", "values"), [("fp8", "zeros"), ("fp8", "hardly anything"), ("float16", "hardly anything")]
)
def test_without_the_guard_it_does_not_stay_finite(kind: str, values: str) -> None:
    assert not torch.isfinite(Fused().rescaled(TINY[values], kind)).all()


@pytest.mark.parametrize("kind", ["fp8", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_other_values_come_out_as_without_the_guard(kind: str, size: float) -> None:
    values = torch.randn(257, generator=torch.Generator().manual_seed(1)) * size
    assert torch.equal(guarded().rescaled(values, kind), Fused().rescaled(values, kind))


def test_masters_of_loaded_weights_are_these_whatever_they_are_kept_in() -> None:
    fused, said = Fused(), []
    fused.set_scaled_state = lambda *given: said.append(given)  # type: ignore[attr-defined]
    remainders, rounded = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    fused.param_groups[0]["params"] = [remainders, rounded]
    fused.state[remainders] = {"master_param": torch.full((2,), 7, dtype=torch.int16)}
    fused.state[rounded] = {"master_param": torch.zeros(2, dtype=torch.float16)}
    reload_masters(fused)
    assert not fused.state[remainders]["master_param"].any()
    ((parameter, name, values),) = said
    assert (parameter is rounded, name, values.dtype) == (True, "master_param", torch.float32)
