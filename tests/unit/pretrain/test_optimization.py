"""Adam inside the distributed optimizer: saved and loaded by core, every parameter keeps a step count of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.moe.megatron_state.step_counts import (
    loading_step_counts,
    separate_steps,
    torch_adams,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.pretrain import cpu_device, optimization
from megatron.pretrain.config import parse_config
from megatron.pretrain.optimization import build_optimizer

MODEL = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
FORMATS = ["dp_reshardable", "fully_reshardable"]


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with cpu_device.installed():
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class TwoLinears(MegatronModule):
    def __init__(self) -> None:
        super().__init__(MODEL)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden))


class Training:
    """Two linear layers, and the optimizer that the driver builds over them."""

    def __init__(self, *flags: str) -> None:
        config = parse_config(["--device", "cpu", "--distributed-backend", "gloo", "--lr", "0.1", *flags])
        distributed = config.parallel.use_distributed_optimizer
        torch.manual_seed(1)
        model = TwoLinears().bfloat16() if config.optimizer.bf16 else TwoLinears()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self.model = DistributedDataParallel(MODEL, ddp, model)
        self.optimizer = build_optimizer(config, [self.model])
        (self.adam,) = torch_adams(self.optimizer)

    def step(self, seed: int) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        self.model(hidden.to(next(self.model.parameters()).dtype)).square().mean().backward()
        self.model.finish_grad_sync()
        assert self.optimizer.step()[0]

    def sharded(self, layout: str | None, is_loading: bool = False) -> dict[str, Any]:
        metadata = {"chained_optim_avoid_prefix": True}
        if layout is not None:
            metadata["distrib_optim_sharding_type"] = layout
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    def save(self, directory: Path, layout: str | None) -> None:
        directory.mkdir()
        dist_checkpointing.save(self.sharded(layout), str(directory))

    def load(self, directory: Path, layout: str | None) -> None:
        self.load_by_core(directory, layout)
        separate_steps(self.optimizer)

    @torch.no_grad()
    def load_by_core(self, directory: Path, layout: str | None) -> None:
        loaded = dist_checkpointing.load(self.sharded(layout, is_loading=True), str(directory))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def masters(self) -> list[torch.Tensor]:
        return [parameter for group in self.adam.param_groups for parameter in group["params"]]

    def steps(self) -> list[torch.Tensor]:
        return [self.adam.state[parameter]["step"] for parameter in self.masters()]

    def tensors(self) -> list[torch.Tensor]:
        """Compute weights, master weights and the whole state of Adam."""
        state = [value for master in self.masters() for _, value in sorted(self.adam.state[master].items())]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *self.masters(), *state)]


def new_training(*flags: str) -> Training:
    training = Training("--use-distributed-optimizer", *flags)
    members = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
    assert all(isinstance(member, DistributedOptimizer) for member in members)
    return training


def same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


def test_the_state_of_adam_exists_before_the_first_step() -> None:
    training = new_training()
    for parameter in training.masters():
        state = training.adam.state[parameter]
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        assert not any(state[name].any() for name in state)


def test_adam_steps_from_the_allocated_state_as_from_its_own() -> None:
    training, untouched = new_training(), new_training()
    untouched.adam.state.clear()
    for seed in range(2):
        training.step(seed)
        untouched.step(seed)
    assert same(training.tensors(), untouched.tensors())


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("taken", [0, 3], ids=["saved before the first step", "saved after three steps"])
def test_after_a_load_every_parameter_has_its_own_step_count(tmp_path: Path, layout: str, taken: int) -> None:
    training = new_training()
    for seed in range(taken):
        training.step(seed)
    training.save(tmp_path / "checkpoint", layout)
    resumed = new_training()
    resumed.load(tmp_path / "checkpoint", layout)
    steps = resumed.steps()
    assert len({step.data_ptr() for step in steps}) == len(steps) == 4
    assert [float(step) for step in steps] == [taken] * 4


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fresh", [True, False], ids=["into a fresh optimizer", "into one that stepped on"])
def test_a_loaded_optimizer_steps_on_bit_for_bit(tmp_path: Path, layout: str, precision: str, fresh: bool) -> None:
    flags = ["--bf16"] if precision == "bf16" else []
    training = new_training(*flags)
    for seed in range(3):
        training.step(seed)
    training.save(tmp_path / "checkpoint", layout)
    training.step(3)
    training.step(4)
    undisturbed = training.tensors()

    resumed = new_training(*flags) if fresh else training
    resumed.load(tmp_path / "checkpoint", layout)
    resumed.step(3)
    resumed.step(4)
    assert same(resumed.tensors(), undisturbed)


@pytest.mark.parametrize("layout", FORMATS)
def test_an_optimizer_as_core_builds_it_steps_on_bit_for_bit_from_what_was_loaded_in_the_block(
    tmp_path: Path, layout: str
) -> None:
    training = new_training()
    for seed in range(3):
        training.step(seed)
    training.save(tmp_path / "checkpoint", layout)
    training.step(3)
    training.step(4)

    with patch.object(optimization, "allocate_adam"), patch.object(optimization, "set_steps_aside_in_loads"):
        resumed = new_training()
    assert not resumed.adam.state
    with loading_step_counts(resumed.optimizer):
        resumed.load_by_core(tmp_path / "checkpoint", layout)
    resumed.step(3)
    resumed.step(4)
    assert same(resumed.tensors(), training.tensors())


@pytest.mark.parametrize("layout", FORMATS)
def test_a_load_that_was_given_up_does_not_stand_in_the_way_of_the_next(tmp_path: Path, layout: str) -> None:
    training = new_training()
    training.step(0)
    training.save(tmp_path / "checkpoint", layout)
    resumed = new_training()
    resumed.sharded(layout, is_loading=True)
    resumed.load(tmp_path / "checkpoint", layout)
    assert same(resumed.tensors(), training.tensors())


@pytest.mark.parametrize("layout", FORMATS)
def test_a_resumed_run_saves_the_steps_it_has_taken_since(tmp_path: Path, layout: str) -> None:
    training = new_training()
    training.step(0)
    training.save(tmp_path / "first", layout)
    resumed = new_training()
    resumed.load(tmp_path / "first", layout)
    resumed.step(1)
    resumed.save(tmp_path / "second", layout)
    again = new_training()
    again.load(tmp_path / "second", layout)
    assert [float(step) for step in again.steps()] == [2.0] * 4


@pytest.mark.parametrize("flags", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.parametrize("taken", [0, 3], ids=["saved before the first step", "saved after three steps"])
def test_an_optimizer_that_is_not_distributed_steps_on_bit_for_bit(
    tmp_path: Path, flags: list[str], taken: int
) -> None:
    training = Training(*flags)
    for seed in range(taken):
        training.step(seed)
    training.save(tmp_path / "checkpoint", None)
    training.step(3)
    training.step(4)

    resumed = Training(*flags)
    resumed.load(tmp_path / "checkpoint", None)
    resumed.step(3)
    resumed.step(4)
    assert same(resumed.tensors(), training.tensors())
