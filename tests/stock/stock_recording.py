"""Hooks for workers that train in the stock loop: what each iteration came to, and what is taken away from it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import hashlib
import json
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch


@contextlib.contextmanager
def recording(folder: str) -> Iterator[None]:
    """Append how each iteration came out to a file of this rank in the folder, and at the end a digest of the state.

    What `train_step` returns to the loop is recorded, on the way out of all that is wrapped around it.
    """
    import megatron.training
    from megatron.training import training

    original = megatron.training.pretrain

    @functools.wraps(original)
    def pretrain(*arguments: Any, **options: Any) -> Any:
        step, last = training.train_step, {}

        @functools.wraps(step)
        def train_step(*given: Any, **named: Any) -> Any:
            outcome = step(*given, **named)
            losses, skipped, _, _, _, norm, *_ = outcome
            last["objects"] = given[2:5]
            iteration = training.get_args().curr_iteration + 1
            shown = {name: float(loss).hex() for name, loss in losses.items()}
            shown_norm = None if norm is None else float(norm).hex()
            write({"iteration": iteration, "losses": shown, "grad_norm": shown_norm, "skipped": bool(skipped)})
            return outcome

        with mock.patch.object(training, "train_step", train_step):
            try:
                return original(*arguments, **options)
            finally:
                if "objects" in last:
                    write({"digest": digest(training.get_args(), *last["objects"])})

    path = Path(folder) / f"rank-{os.environ['RANK']}.jsonl"

    def write(line: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    with mock.patch.object(megatron.training, "pretrain", pretrain):
        yield


@contextlib.contextmanager
def unprotected() -> Iterator[None]:
    """The stock loop as it is: nothing of ours is wrapped around it."""
    from megatron.core.dist_checkpointing.moe import stock

    with stock.shipped_helpers(), mock.patch.object(stock, "protected", lambda pretrain, *_, **__: pretrain):
        yield


@contextlib.contextmanager
def counting_objects(path: str) -> Iterator[None]:
    """Write how many objects the collector looks through when Megatron-LM's `pretrain` is called."""
    import megatron.training

    original = megatron.training.pretrain

    @functools.wraps(original)
    def pretrain(*arguments: Any, **options: Any) -> Any:
        Path(path).write_text(str(len(gc.get_objects())))
        return original(*arguments, **options)

    with mock.patch.object(megatron.training, "pretrain", pretrain):
        yield


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let a script that knows nothing of CPUs train on one, as the driver does with `--device cpu`."""
    from megatron.pretrain.initialize import Launch, shut_down, start_process_group, use_cpu

    use_cpu(stock_loop=True)
    start_process_group("gloo", Launch.from_environment(), datetime.timedelta(minutes=10))
    try:
        yield
    finally:
        shut_down()


@contextlib.contextmanager
def without_seam(name: str) -> Iterator[None]:
    """The hook of one seam does nothing but go on."""
    from megatron.core.dist_checkpointing.moe.stock.hooks import Hooks
    from megatron.core.dist_checkpointing.moe.stock.seams import Call

    original = Hooks.by_name
    with mock.patch.object(Hooks, "by_name", lambda self: {**original(self), name: Call.go_on}):
        yield


@contextlib.contextmanager
def as_version(version: str) -> Iterator[None]:
    """Megatron-Core says that it is another release."""
    from megatron.core.dist_checkpointing.moe import stock

    with mock.patch.object(stock, "version", return_value=version):
        yield


@contextlib.contextmanager
def wrapped_by_another(name: str) -> Iterator[None]:
    """Somebody else was there first."""
    from megatron.training import training

    def traced(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options)

    original = getattr(training, name)
    with mock.patch.object(training, name, traced):
        yield


@contextlib.contextmanager
def killed_while_it_saves(iteration: int) -> Iterator[None]:
    """The process is killed when all shards of `iteration` are written, and before the checkpoint is finished."""
    from megatron.core.dist_checkpointing.moe.dense_saves import saving

    original = saving.take_sums

    def killed(folder: Path, ranks: int) -> Any:
        if f"iter_{iteration:07d}" in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(folder, ranks)

    with mock.patch.object(saving, "take_sums", killed):
        yield


@contextlib.contextmanager
def full_disk(iteration: int, rank: int) -> Iterator[None]:
    """While the shards of `iteration` are written, files of `rank` cannot grow; where they are written as well."""
    from megatron.core.dist_checkpointing.moe.dense_saves import saving

    original = saving.summed

    def summed(request: Any, folder: Path, secret: str | None) -> Any:
        if f"iter_{iteration:07d}" in folder.name and int(os.environ["RANK"]) == rank:
            request = request._replace(async_fn=functools.partial(_with_small_files, request.async_fn))
        return original(request, folder, secret)

    with mock.patch.object(saving, "summed", summed):
        yield


def _with_small_files(write: Any, *given: Any) -> Any:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        return write(*given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def digest(args: Any, model: Any, optimizer: Any, scheduler: Any) -> str:
    """Of all that training goes on from: weights, buffers, optimizer state, schedule, counts, random states."""
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import quantization_tensors
    from megatron.core.dist_checkpointing.moe.megatron_state.quantized import is_quantized, raw_fields

    found = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if is_quantized(value):
            for field, part in raw_fields(name, value):
                add(field, part)
            return
        if torch.is_tensor(value):
            flat = value.detach().cpu().reshape(-1).contiguous()
            value = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        found.update(name.encode() + (value if isinstance(value, bytes) else repr(value).encode()))

    for number, chunk in enumerate(model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            add(f"{number}.{name}", tensor)
    for name, tensor in quantization_tensors(model).items():
        add(name, tensor)
    for member in optimizer.chained_optimizers:
        for group in member.optimizer.param_groups if member.optimizer is not None else ():
            add("group", sorted((key, value) for key, value in group.items() if isinstance(value, int | float)))
            for parameter in group["params"]:
                add("main", parameter)
                for key, value in sorted(member.optimizer.state[parameter].items()):
                    add(key, value)
                scales = vars(member.optimizer).get("_scales", {}).get(parameter, {})
                for key, scale in sorted(scales.items()):
                    if member.optimizer.state[parameter][key].dtype is torch.float16:  # others are never read
                        add(f"scale of {key}", scale)
    add("schedule", scheduler.num_steps)
    add("samples", (args.consumed_train_samples, args.consumed_valid_samples))
    add("random", (random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()))
    return found.hexdigest()
