"""What tests of Transformer Engine do inside workers: examine the live state of its layers and its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from operator_hooks import changed, examine, verdict_on
from stock_trainer import Trainer, instead_of_training


@contextlib.contextmanager
def examined(folder: str) -> Iterator[None]:
    """Instead of training to the end: the examination of `operator_hooks`, and what only a fused Adam has."""
    with instead_of_training(_facts, folder):
        yield


def _facts(trainer: Trainer) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_optimizer_state

    allocate_optimizer_state(trainer.optimizer)
    facts = examine(trainer)
    tensors = tensors_of(trainer)
    members = trainer.optimizer.chained_optimizers
    inner = members[-1].optimizer
    some = inner.param_groups[0]["params"][0]
    with mock.patch.dict(vars(inner)["_scales"], {some: {"exp_avg": torch.ones(1)}}):
        facts["verdicts"]["a scale beside the state"] = verdict_on(trainer, tensors)
    with changed(vars(inner), "inner", torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])):
        facts["verdicts"]["an optimizer inside"] = verdict_on(trainer, tensors)
    facts["optimizers"] = [f"{type(one.optimizer).__module__}.{type(one.optimizer).__name__}" for one in members]
    facts["tables"] = [name for name, value in vars(inner).items() if name not in ("state", "param_groups") and value]
    facts["modules"] = sorted({type(module).__name__ for chunk in trainer.chunks for module in chunk.modules()})
    layers = [module for chunk in trainer.chunks for module in chunk.modules()]
    facts["fused"] = [one.fuse_wgrad_accumulation for one in layers if hasattr(one, "fuse_wgrad_accumulation")]
    facts["steps"] = _steps_over_a_restore(trainer)
    facts["buffers"] = _buffers_after_frozen_passes(trainer)
    return facts


def tensors_of(state: Any) -> Any:
    """All state of this rank."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    return state_tensors(state.chunks, state.optimizer, read_topology(8))


def _steps_over_a_restore(trainer: Trainer) -> dict[str, list[int]]:
    groups = [group for member in trainer.optimizer.chained_optimizers for group in member.optimizer.param_groups]

    def steps() -> list[int]:
        return [group["step"] for group in groups if group["params"]]  # an empty one counts nothing

    found = {"at the snapshot": steps()}
    scalars, tensors = trainer.state.scalars(), trainer.state.tensors()
    trainer.iterate()
    found["trained on"] = steps()
    trainer.state.restore(scalars, tensors)
    found["restored"] = steps()
    return found


def _buffers_after_frozen_passes(trainer: Trainer) -> dict[str, bool]:
    """Whether weights of grouped layers have their gradient buffers after passes in which all of these are frozen."""
    from megatron.core.dist_checkpointing.moe.replay.patches import overlap_off, weights_frozen

    modules = [module for chunk in trainer.chunks for module in chunk.modules() if "Grouped" in type(module).__name__]
    named = {
        f"{type(module).__name__} {at}, {name}": parameter
        for at, module in enumerate(modules)
        for name, parameter in module.named_parameters(recurse=False)
    }
    buffers = {name: parameter.main_grad.data_ptr() for name, parameter in named.items()}
    frozen = {parameter for module in modules for parameter in module.parameters(recurse=False)}
    with overlap_off(trainer.chunks, trainer.optimizer), weights_frozen(trainer.chunks, frozen):
        trainer.iterate()
    return {
        name: parameter.main_grad is not None and parameter.main_grad.data_ptr() == buffers[name]
        for name, parameter in named.items()
    }
