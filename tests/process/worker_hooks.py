"""What tests change inside workers for the time of one job: poisoned states, restore steps left out, slow disks."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

NAN = float("nan")
LARGEST_FILE_BYTES = 3000


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
    from megatron.core.dist_checkpointing.moe.megatron_state.step_counts import torch_adams

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
def without_restoring(step: str) -> Iterator[None]:
    """Load everything except what `step` names."""
    from megatron.pretrain.checkpoint import load

    original = load.load_checkpoint

    def load_the_rest(state: Any) -> bool:
        fresh = _buffers(state, step)
        position = dict(vars(state.progress))
        with contextlib.ExitStack() as stack:
            for patch in _leaving_out(step, state):
                stack.enter_context(patch)
            found = original(state)
        # Core reads straight into the live tensors, so these are put back rather than left out.
        for buffer, value in fresh:
            buffer.copy_(value)
        if step in position:
            setattr(state.progress, step, position[step])
        return found

    with mock.patch.object(load, "load_checkpoint", load_the_rest):
        yield


def _leaving_out(step: str, state: Any) -> list[Any]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.pretrain.checkpoint import state as state_module

    def nothing(*_: Any, **__: Any) -> None:
        pass

    match step:
        case "optimizer":
            return [mock.patch.object(type(state.optimizer), "load_state_dict", nothing)]
        case "separate_steps":
            return [mock.patch.object(state_module, "separate_steps", nothing)]
        case "scheduler":
            return [mock.patch.object(type(state.scheduler), "load_state_dict", nothing)]
        case "rng":
            return [mock.patch.object(state_module, "_restore_rng", nothing)]
        case "rng tracker":
            return [mock.patch.object(CudaRNGStatesTracker, "set_states", nothing)]
        case "loss scale":
            members = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
            scalers = {type(member.grad_scaler) for member in members}
            return [mock.patch.object(kind, "load_state_dict", nothing) for kind in scalers]
    return []


def _buffers(state: Any, ending: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The buffers with such a name, and copies of their values."""
    named = [pair for chunk in state.chunks for pair in chunk.named_buffers()]
    return [(buffer, buffer.clone()) for name, buffer in named if name.endswith(ending)]


@contextlib.contextmanager
def full_disk(iteration: int, rank: int | None = None) -> Iterator[None]:
    """While `iteration` is saved, files cannot grow (on `rank`, or anywhere); what is forked then inherits that."""
    from megatron.pretrain.checkpoint.save import Saver

    original = Saver.save
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self: Saver) -> None:
        # Whatever is still being written belongs to an iteration of its own.
        self.wait()
        if self._state.progress.iteration == iteration and rank in (None, int(os.environ["RANK"])):
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, unlimited[1]))
        try:
            original(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with mock.patch.object(Saver, "save", save):
        yield


@contextlib.contextmanager
def writing_after_report(reports: str, iteration: int) -> Iterator[None]:
    """No shard is written before training has reported `iteration`."""
    from megatron.pretrain.checkpoint import writer

    original = writer._write_buckets

    def write_late(*arguments: Any) -> Any:
        deadline = time.monotonic() + 120.0
        while f'"iteration": {iteration},' not in Path(reports).read_text():
            if time.monotonic() > deadline:
                return f"training did not reach iteration {iteration} while this checkpoint was to be written"
            time.sleep(0.01)
        return original(*arguments)

    with mock.patch.object(writer, "_write_buckets", write_late):
        yield


@contextlib.contextmanager
def no_memory_to_stage(iteration: int, rank: int) -> Iterator[None]:
    """The save of `iteration` finds no memory for its shards on `rank`, after all ranks planned together."""
    from megatron.pretrain.checkpoint.writer import ShardWriter

    stage = ShardWriter._staged

    def staged(self: ShardWriter) -> list[Any]:
        if torch.distributed.get_rank() == rank and f"iter_{iteration:07d}" in str(self._writer.checkpoint_dir):
            raise MemoryError("cannot fork")
        return stage(self)

    with mock.patch.object(ShardWriter, "_staged", staged):
        yield


@contextlib.contextmanager
def no_access_to_folder(iteration: int, rank: int) -> Iterator[None]:
    """The folder of `iteration` cannot be written from `rank`, as with a bad mount on one node."""
    import tempfile

    temporary = tempfile.TemporaryFile

    def refused(*args: Any, dir: Any = None, **kwargs: Any) -> Any:
        if dir is not None and f"iter_{iteration:07d}" in str(dir) and torch.distributed.get_rank() == rank:
            raise PermissionError(13, "Permission denied", str(dir))
        return temporary(*args, dir=dir, **kwargs)

    with mock.patch.object(tempfile, "TemporaryFile", refused):
        yield


@contextlib.contextmanager
def stuck_writer(iteration: int, rank: int) -> Iterator[None]:
    """The background writer of `iteration` on `rank` never ends; waiting for it is cut to a second."""
    from megatron.pretrain.checkpoint import writer

    write = writer._write_buckets

    def stuck(buckets: list[Any], transforms: list[Any]) -> Any:
        if torch.distributed.get_rank() == rank and f"iter_{iteration:07d}" in str(buckets):
            time.sleep(3600)
        return write(buckets, transforms)

    with mock.patch.object(writer, "_write_buckets", stuck), mock.patch.object(writer, "WRITE_TIMEOUT_S", 3.0):
        yield
