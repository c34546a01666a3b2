"""Adam's state before its first step, with torch's own lazy allocation as the measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_optimizer_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.pretrain.testing import cpu_device

DTYPES = (torch.float32, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cpu_device.installed():
        yield


def optimizer_of(kind: type[torch.optim.Optimizer], **options: Any) -> FP32Optimizer:
    draw = torch.Generator().manual_seed(2)
    parameters = [torch.nn.Parameter(torch.randn(3, 2, generator=draw)) for _ in range(2)]
    adam = kind(parameters, lr=0.1, weight_decay=0.2, **options)  # type: ignore[call-arg]
    return FP32Optimizer(adam, OptimizerConfig(), lambda optimizer, config=None: None)


def described(optimizer: FP32Optimizer) -> list[dict[str, tuple[Any, ...]]]:
    return [
        {name: (value.dtype, value.device, value.shape, value.tolist()) for name, value in sorted(state.items())}
        for state in optimizer.optimizer.state.values()
    ]


def step(optimizer: FP32Optimizer, gradient: float) -> None:
    for parameter in optimizer.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}], ids=str)
def test_allocated_state_is_what_the_first_step_would_have_allocated(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    lazy, eager = optimizer_of(kind, **options), optimizer_of(kind, **options)
    allocate_optimizer_state(eager)
    for gradient in (0.5, -0.25):
        step(lazy, gradient)
        step(eager, gradient)
        assert described(eager) == described(lazy)


def test_what_exists_already_stays() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    step(optimizer, 1.0)
    before = described(optimizer)
    allocate_optimizer_state(optimizer)
    assert described(optimizer) == before


def test_a_step_count_that_parameters_share_becomes_one_for_each() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    step(optimizer, 1.0)
    first, second = optimizer.optimizer.state.values()
    second["step"] = first["step"]
    allocate_optimizer_state(optimizer)
    step(optimizer, 1.0)
    assert [float(state["step"]) for state in (first, second)] == [2.0, 2.0]


class PrecisionAware(torch.optim.Optimizer):
    """Keeps state as Transformer Engine's `FusedAdam` does, whose method takes two arguments from 2.1 on."""

    store_param_remainders = True

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        self.state[parameter] = {"remainders": store_param_remainders}

    def _apply_scale(self, name: str, unscaled: torch.Tensor, scaled: torch.Tensor, scale: torch.Tensor) -> None:
        scaled.copy_(unscaled)


def test_a_precision_aware_optimizer_allocates_as_in_its_own_first_step() -> None:
    wide, narrow, trained = (torch.nn.Parameter(torch.ones(2).to(dtype)) for dtype in DTYPES)
    inner = PrecisionAware([wide, narrow, trained])
    inner.state[trained] = {"exp_avg": torch.ones(2)}
    # Megatron-Core passes one argument, which is a TypeError.
    core = FP32Optimizer(inner, OptimizerConfig(), lambda optimizer, config: optimizer.initialize_state(wide))
    core.config.use_precision_aware_optimizer = True
    allocate_optimizer_state(core)
    assert inner.state[wide] == {"remainders": False}
    assert inner.state[narrow] == {"remainders": True}
    assert "exp_avg" in inner.state[trained]
