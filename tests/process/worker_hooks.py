"""What tests change inside workers for the time of one job: poisoned states, steps left out."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch

NAN = float("nan")


@contextlib.contextmanager
def poisoned_before_load() -> Iterator[None]:
    """Whatever loading does not restore is garbage: a fresh initialization might happen to be right."""
    import megatron.training
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import allocate_step_counts
    from megatron.training import training

    pretrain = megatron.training.pretrain

    @functools.wraps(pretrain)
    def poisoned(*arguments: Any, **options: Any) -> Any:
        # By now the loop has its hooks, which it refuses once this function is replaced.
        load = training.load_checkpoint

        def poison_and_load(chunks: Any, optimizer: Any, *more: Any, **named: Any) -> Any:
            allocate_step_counts(optimizer)
            poison(SimpleNamespace(chunks=chunks, optimizer=optimizer, progress=SimpleNamespace()))
            return load(chunks, optimizer, *more, **named)

        with mock.patch.object(training, "load_checkpoint", poison_and_load):
            return pretrain(*arguments, **options)

    with mock.patch.object(megatron.training, "pretrain", poisoned):
        yield


def poison(state: Any) -> None:
    """Fill weights, master weights, moments, buffers and scalars with values that no training makes."""
    from megatron.core import tensor_parallel
    from megatron.core.dist_checkpointing.moe.megatron_state.optimizer_state import torch_adams

    with torch.no_grad():
        for chunk in state.chunks:
            for module in chunk.modules():
                transient = module._non_persistent_buffers_set
                kept = [
                    buffer for name, buffer in module._buffers.items() if name not in transient and buffer is not None
                ]
                for tensor in [*(p for p in module._parameters.values() if p is not None), *kept]:
                    tensor.data.fill_(NAN)
        for inner in torch_adams(state.optimizer):
            for group in inner.param_groups:
                group.update(lr=77.0, weight_decay=77.0)
                for parameter in group["params"]:
                    parameter.data.fill_(NAN)
                    for name, tensor in inner.state[parameter].items():
                        tensor.fill_(77.0 if name == "step" else NAN)
        for member in getattr(state.optimizer, "chained_optimizers", [state.optimizer]):
            if getattr(member, "grad_scaler", None) is not None:
                member.grad_scaler._scale.fill_(3.0)
    state.progress.iteration = state.progress.consumed_train_samples = state.progress.consumed_valid_samples = 5
    random.seed(77)
    numpy.random.seed(77)
    torch.manual_seed(77)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: torch.get_rng_state() for name in tracker.get_states()})


@contextlib.contextmanager
def left_out(function: str) -> Iterator[None]:
    """A function of this full name does nothing."""
    with mock.patch(function, return_value=None):
        yield
