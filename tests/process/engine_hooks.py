"""What tests of Transformer Engine do inside workers: examine the live state of its layers and its optimizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from operator_hooks import changed, examine, verdict_on


@contextlib.contextmanager
def examined(folder: str) -> Iterator[None]:
    """Instead of training to the end: the examination of `operator_hooks`, and what only a fused Adam has."""
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_optimizer_state
    from megatron.pretrain.loop import Trainer

    def run(self: Trainer) -> None:
        allocate_optimizer_state(self._state.optimizer)
        facts = examine(self._state, self._datasets, self.iterate)
        tensors = tensors_of(self._state)
        members = self._state.optimizer.chained_optimizers
        inner = members[-1].optimizer
        some = inner.param_groups[0]["params"][0]
        with mock.patch.dict(vars(inner)["_scales"], {some: {"exp_avg": torch.ones(1)}}):
            facts["verdicts"]["a scale beside the state"] = verdict_on(self._state, tensors)
        with changed(vars(inner), "inner", torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])):
            facts["verdicts"]["an optimizer inside"] = verdict_on(self._state, tensors)
        facts["optimizers"] = [f"{type(one.optimizer).__module__}.{type(one.optimizer).__name__}" for one in members]
        facts["tables"] = [
            name for name, value in vars(inner).items() if name not in ("state", "param_groups") and value
        ]
        facts["modules"] = sorted({type(module).__name__ for chunk in self._state.chunks for module in chunk.modules()})
        layers = [module for chunk in self._state.chunks for module in chunk.modules()]
        facts["fused"] = [one.fuse_wgrad_accumulation for one in layers if hasattr(one, "fuse_wgrad_accumulation")]
        facts["steps"] = _steps_over_a_restore(self._state, self._datasets, self.iterate)
        facts["buffers"] = _buffers_after_frozen_passes(self._state, self._datasets, self.iterate)
        (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))

    with mock.patch.object(Trainer, "run", run):
        yield


def tensors_of(state: Any) -> Any:
    """All state of this rank."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    return state_tensors(state.chunks, state.optimizer, read_topology(8))


def _steps_over_a_restore(state: Any, datasets: Any, iterate: Callable[[Any], Any]) -> dict[str, list[int]]:
    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState, NoLoopState
    from megatron.pretrain.batches import training_iterators

    trainer_state = LiveTrainerState(state.optimizer, state.scheduler, NoLoopState())
    groups = [group for member in state.optimizer.chained_optimizers for group in member.optimizer.param_groups]

    def steps() -> list[int]:
        return [group["step"] for group in groups if group["params"]]  # an empty one counts nothing

    found = {"at the snapshot": steps()}
    scalars, tensors = trainer_state.scalars(), trainer_state.tensors()
    iterate(training_iterators(state.config, datasets, state.progress))
    found["trained on"] = steps()
    trainer_state.restore(scalars, tensors)
    found["restored"] = steps()
    return found


def _buffers_after_frozen_passes(state: Any, datasets: Any, iterate: Callable[[Any], Any]) -> dict[str, bool]:
    """Whether weights of grouped layers have their gradient buffers after passes in which all of these are frozen."""
    from megatron.core.dist_checkpointing.moe.replay.patches import overlap_off, weights_frozen
    from megatron.pretrain.batches import training_iterators

    modules = [module for chunk in state.chunks for module in chunk.modules() if "Grouped" in type(module).__name__]
    named = {
        f"{type(module).__name__} {at}, {name}": parameter
        for at, module in enumerate(modules)
        for name, parameter in module.named_parameters(recurse=False)
    }
    buffers = {name: parameter.main_grad.data_ptr() for name, parameter in named.items()}
    frozen = {parameter for module in modules for parameter in module.parameters(recurse=False)}
    with overlap_off(state.chunks), weights_frozen(state.chunks, frozen):
        iterate(training_iterators(state.config, datasets, state.progress))
    return {
        name: parameter.main_grad is not None and parameter.main_grad.data_ptr() == buffers[name]
        for name, parameter in named.items()
    }


@contextlib.contextmanager
def configured_as_on_gpus() -> Iterator[None]:
    """The model is built from the configuration that it has on GPUs, but for two kernels that only a GPU has."""
    from megatron.core.transformer.enums import AttnBackend
    from megatron.pretrain import assemble

    build = assemble.build_transformer_config

    def as_on_gpus(config: Any) -> Any:
        made = build(replace(config, parallel=replace(config.parallel, device="cuda")))
        return replace(made, attention_backend=AttnBackend.unfused, apply_rope_fusion=False)

    with mock.patch.object(assemble, "build_transformer_config", as_on_gpus):
        yield
