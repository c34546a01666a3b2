"""What tests change inside workers for the time of one job: poisoned states, slow disks."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import torch

NAN = float("nan")
LARGEST_FILE_BYTES = 3000


@contextlib.contextmanager
def poisoned_before_load() -> Iterator[None]:
    """Whatever loading does not restore is garbage: a fresh initialization might happen to be right."""
    import megatron.training
    from megatron.core.dist_checkpointing.moe.megatron_state.step_counts import allocate_step_counts
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
def left_out(function: str) -> Iterator[None]:
    """A function of this full name does nothing."""
    with mock.patch(function, return_value=None):
        yield


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
