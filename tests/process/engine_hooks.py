"""What tests of Transformer Engine do inside workers: examine the live state of its layers and its optimizer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import operator_hooks
import torch


@contextlib.contextmanager
def examined(folder: str) -> Iterator[None]:
    """Instead of training to the end: the examination of `operator_hooks`, and what only a fused Adam has."""
    from megatron.pretrain.loop import Trainer

    def run(self: Trainer) -> None:
        facts = operator_hooks._examine(self)
        tensors = state_of(self)
        members = self._state.optimizer.chained_optimizers
        inner = members[-1].optimizer
        some = inner.param_groups[0]["params"][0]
        with mock.patch.dict(inner._scales, {some: {"exp_avg": torch.ones(1)}}):
            facts["verdicts"]["a scale beside the state"] = operator_hooks._verdict(self._state, tensors)
        with operator_hooks._changed(vars(inner), "inner", torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])):
            facts["verdicts"]["an optimizer inside"] = operator_hooks._verdict(self._state, tensors)
        facts["optimizers"] = [f"{type(one.optimizer).__module__}.{type(one.optimizer).__name__}" for one in members]
        facts["tables"] = [
            name for name, value in vars(inner).items() if name not in ("state", "param_groups") and value
        ]
        facts["modules"] = sorted({type(module).__name__ for chunk in self._state.chunks for module in chunk.modules()})
        facts["steps"] = _steps_over_a_restore(self)
        (Path(folder) / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))

    with mock.patch.object(Trainer, "run", run):
        yield


def state_of(trainer: Any) -> Any:
    """All state of this rank."""
    from megatron.core.dist_checkpointing.moe.megatron_state.megatron import read_topology, state_tensors

    return state_tensors(trainer._state.chunks, trainer._state.optimizer, read_topology(8))


def _steps_over_a_restore(trainer: Any) -> dict[str, list[int]]:
    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState, NoLoopState
    from megatron.pretrain.batches import training_iterators

    state = trainer._state
    trainer_state = LiveTrainerState(state.optimizer, state.scheduler, NoLoopState())
    groups = [group for member in state.optimizer.chained_optimizers for group in member.optimizer.param_groups]

    def steps() -> list[int]:
        return [group["step"] for group in groups]

    found = {"at the snapshot": steps()}
    scalars, tensors = trainer_state.scalars(), trainer_state.tensors()
    trainer.iterate(training_iterators(state.config, trainer._datasets, state.progress))
    found["trained on"] = steps()
    trainer_state.restore(scalars, tensors)
    found["restored"] = steps()
    return found
