"""What tests change inside workers for the time of one job: poisoned states, restore steps left out, slow disks."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy
import torch

NAN = float("nan")


@contextlib.contextmanager
def poisoned_before_load() -> Iterator[None]:
    """Whatever loading does not restore is garbage: a fresh initialization might happen to be right."""
    from megatron.pretrain.checkpoint import load

    original = load.load_checkpoint

    def poison_and_load(state: Any) -> bool:
        poison(state)
        return original(state)

    with mock.patch.object(load, "load_checkpoint", poison_and_load):
        yield


def poison(state: Any) -> None:
    """Fill weights, master weights, moments, buffers and scalars with values that no training makes."""
    from megatron.core import tensor_parallel
    from megatron.pretrain.optimization import torch_optimizers

    with torch.no_grad():
        for chunk in state.chunks:
            for module in chunk.modules():
                transient = module._non_persistent_buffers_set
                kept = [
                    buffer for name, buffer in module._buffers.items() if name not in transient and buffer is not None
                ]
                for tensor in [*(p for p in module._parameters.values() if p is not None), *kept]:
                    tensor.data.fill_(NAN)
        for inner in torch_optimizers(state.optimizer):
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
def without_restoring(step: str) -> Iterator[None]:
    """Load everything except what `step` names."""
    from megatron.pretrain.checkpoint import load

    original = load.apply_state_dict

    def apply(state: Any, loaded: dict[str, Any], parts: Any) -> None:
        kept = {name: dict(vars(state.progress))[name] for name in ("consumed_train_samples", "consumed_valid_samples")}
        with contextlib.ExitStack() as stack:
            for patch in _leaving_out(step, state, loaded):
                stack.enter_context(patch)
            original(state, loaded, parts)
        if step in kept:
            setattr(state.progress, step, kept[step])

    with mock.patch.object(load, "apply_state_dict", apply):
        yield


def _leaving_out(step: str, state: Any, loaded: dict[str, Any]) -> list[Any]:
    from megatron.core.optimizer import distrib_optimizer
    from megatron.pretrain.checkpoint import state as state_module

    def nothing(*_: Any, **__: Any) -> None:
        pass

    inner = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    match step:
        case "optimizer":
            return [mock.patch.object(type(state.optimizer), "load_state_dict", nothing)]
        case "separate_steps":
            return [mock.patch.object(state_module, "separate_steps", nothing)]
        case "all steps":
            # The CPU mapping repairs the steps of the distributed optimizer as well.
            own = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states
            original = getattr(own, "__wrapped__", own)
            return [
                mock.patch.object(state_module, "separate_steps", nothing),
                mock.patch.object(
                    distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", original
                ),
            ]
        case "scheduler":
            return [mock.patch.object(type(state.scheduler), "load_state_dict", nothing)]
        case "rng":
            return [mock.patch.object(state_module, "_restore_rng", nothing)]
        case "rng tracker":
            from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

            return [mock.patch.object(CudaRNGStatesTracker, "set_states", nothing)]
        case "loss scale":
            scalers = {type(member.grad_scaler) for member in inner}
            return [mock.patch.object(kind, "load_state_dict", nothing) for kind in scalers]
        case "expert bias":
            _keep_buffers(state, loaded, "expert_bias")
    return []


def _keep_buffers(state: Any, loaded: dict[str, Any], ending: str) -> None:
    from megatron.core.utils import unwrap_model

    kept = 0
    for index, chunk in enumerate(unwrap_model(state.chunks)):
        weights = loaded["model" if len(state.chunks) == 1 else f"model{index}"]
        for name, value in chunk.state_dict().items():
            if name.endswith(ending):
                weights[name] = value.clone()
                kept += 1
    assert kept, f"the model has no buffer {ending}"


@contextlib.contextmanager
def slow_writing(seconds: float) -> Iterator[None]:
    """Wait before any shard is written, in whichever process writes it."""
    from megatron.pretrain.checkpoint import writer

    original = writer._write_buckets

    def write_late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments)

    with mock.patch.object(writer, "_write_buckets", write_late):
        yield


@contextlib.contextmanager
def full_disk(iterations: frozenset[int], largest_file_bytes: int, rank: int | None = None) -> Iterator[None]:
    """While the checkpoints of `iterations` are saved, files cannot grow beyond `largest_file_bytes` (on `rank`)."""
    from megatron.pretrain.checkpoint.save import Saver

    original = Saver.save
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self: Saver) -> None:
        # Whatever is still being written belongs to an iteration of its own.
        self.wait()
        hit = self._state.progress.iteration in iterations and rank in (None, int(os.environ["RANK"]))
        limit = largest_file_bytes if hit else unlimited[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        original(self)
        if not self._state.config.checkpoint.async_save:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with mock.patch.object(Saver, "save", save):
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
