"""Hooks for workers that train in the stock loop: what each iteration came to, and what is taken away from it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import hashlib
import inspect
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy
import torch


@contextlib.contextmanager
def documents(number: int) -> Iterator[None]:
    """Mock data have this number of them. Millions of sequences, as core's 100,000 have where these are short, take a
    third of a job to shuffle."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    with mock.patch.object(MockGPTLowLevelDataset, "size", number):
        yield


@contextlib.contextmanager
def recording(folder: str) -> Iterator[None]:
    """Append how each iteration came out to a file of this rank in the folder, and at the end a digest of the state.

    What `train_step` returns to the loop is recorded, on the way out of all that is wrapped around it.
    """
    import megatron.training
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
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
            # What the loop logs of this iteration, and then sets to zero.
            ahead = MTPLossLoggingHelper.tracker.get("loss_values", ())
            shown |= {f"mtp_{number} loss": float(loss).hex() for number, loss in enumerate(ahead, 1)}
            shown_norm = None if norm is None else float(norm).hex()
            if losses or not outcome[3]:  # else the loop is left, without a step
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

    with documents(2000), mock.patch.object(megatron.training, "pretrain", pretrain):
        yield


@contextlib.contextmanager
def unprotected() -> Iterator[None]:
    """The stock loop as it is: nothing of ours is wrapped around it."""
    from megatron.core.dist_checkpointing.moe import stock

    def unwrapped(pretrain: Any, _: object = None, connect: Callable[[], object] = lambda: None, **__: object) -> Any:
        connect()
        return pretrain

    with stock.shipped_helpers(), mock.patch.object(stock, "protected", unwrapped):
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

    use_cpu()
    start_process_group("gloo", Launch.from_environment(), datetime.timedelta(minutes=10))
    try:
        yield
    finally:
        shut_down()


@contextlib.contextmanager
def without_seam(name: str) -> Iterator[None]:
    """The hook of one seam does nothing but continue."""
    from megatron.core.dist_checkpointing.moe.stock.hooks import Hooks
    from megatron.core.dist_checkpointing.moe.stock.seams import Call

    original = Hooks.by_name
    with mock.patch.object(Hooks, "by_name", lambda self: {**original(self), name: Call.go_on}):
        yield


@contextlib.contextmanager
def under_a_launcher(folder: str) -> Iterator[None]:
    """A launcher of ours has started this process, and reads in `folder` how it ends."""
    with mock.patch.dict(os.environ, {"MOE_CKPT_LAUNCH_VERDICT": f"{folder}/verdict"}):
        yield


@contextlib.contextmanager
def as_version(version: str) -> Iterator[None]:
    """Megatron-Core says that it is another release."""
    from megatron.core.dist_checkpointing.moe import stock
    from megatron.core.dist_checkpointing.moe.versions import FoundVersion

    with mock.patch.object(stock, "found_versions", return_value={"megatron-core": FoundVersion(version)}):
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
def forked_writer() -> Iterator[None]:
    """Save beside training where `--async-save` says so, in a fork of each rank, one save after another.

    Megatron-LM takes that flag back without `--use-persistent-ckpt-worker`, whose processes need a GPU: tensors on the
    CPU are shared with them, and change while they write.
    """
    from megatron.training import arguments, async_utils, checkpointing

    original, schedule = arguments.validate_args, checkpointing.schedule_async_save

    @functools.wraps(original)
    def validate_args(args: Any, *given: Any, **named: Any) -> Any:
        asked = args.async_save
        args = original(args, *given, **named)
        args.async_save = asked
        return args

    def schedule_behind_others(request: Any) -> None:
        async_utils.maybe_finalize_async_save(blocking=True)
        schedule(request)

    with (
        mock.patch.object(arguments, "validate_args", validate_args),
        mock.patch.object(checkpointing, "schedule_async_save", schedule_behind_others),
    ):
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


@contextlib.contextmanager
def written_late(folder: str, iteration: int) -> Iterator[None]:
    """No shard of `iteration` is written before the one behind it was recorded in the folder (see `recording`)."""
    from megatron.core.dist_checkpointing.moe.dense_saves import saving

    original, record = saving.summed, Path(folder) / f"rank-{os.environ['RANK']}.jsonl"

    def summed(request: Any, staging: Path, secret: str | None) -> Any:
        if f"iter_{iteration:07d}" in staging.name:
            late = functools.partial(_once_recorded, record, iteration + 1, request.async_fn)
            request = request._replace(async_fn=late)
        return original(request, staging, secret)

    with mock.patch.object(saving, "summed", summed):
        yield


def _once_recorded(record: Path, iteration: int, write: Any, *given: Any) -> Any:
    deadline_s = time.monotonic() + 120.0
    while f'"iteration": {iteration},' not in record.read_text():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"training did not reach iteration {iteration} while this checkpoint was to be written")
        time.sleep(0.01)
    return write(*given)


@contextlib.contextmanager
def no_memory_to_stage(iteration: int, rank: int) -> Iterator[None]:
    """The save of `iteration` finds no memory for its shards on `rank`, after all ranks planned together."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.preload_tensors

    def preload_tensors(buckets: Any, *given: Any) -> Any:
        if int(os.environ["RANK"]) == rank and f"iter_{iteration:07d}" in str(buckets[0][0]):
            raise MemoryError("cannot allocate memory")
        return original(buckets, *given)

    with mock.patch.object(FileSystemWriterAsync, "preload_tensors", staticmethod(preload_tensors)):
        yield


@contextlib.contextmanager
def no_access_to_folder(iteration: int, rank: int) -> Iterator[None]:
    """The folder of `iteration` cannot be written from `rank`, as with a bad mount on one node."""
    temporary = tempfile.TemporaryFile

    def refused(*given: Any, dir: Any = None, **named: Any) -> Any:
        if dir is not None and f"iter_{iteration:07d}" in str(dir) and int(os.environ["RANK"]) == rank:
            raise PermissionError(13, "Permission denied", str(dir))
        return temporary(*given, dir=dir, **named)

    with mock.patch.object(tempfile, "TemporaryFile", refused):
        yield


def digest(args: Any, model: Any, optimizer: Any, scheduler: Any) -> str:
    """Of all that training continues from: weights, buffers, optimizer state, schedule, counts, random states."""
    from megatron.core.dist_checkpointing.moe.megatron_state.quantization import (
        is_quantized,
        quantization_tensors,
        raw_fields,
    )

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
    members = list(optimizer.chained_optimizers)
    while members:
        member = members.pop(0)
        if hasattr(member, "chained_optimizers"):  # core's layer-wise optimizer lies in a chain and is one
            members = [*member.chained_optimizers, *members]
            continue
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


@contextlib.contextmanager
def traced(folder: str) -> Iterator[None]:
    """Write which functions of the engine this process enters, and through which of them the first copy is begun."""
    from megatron.core.dist_checkpointing.moe import manager
    from megatron.core.dist_checkpointing.moe.snapshot.capturer import LiveCapturer
    from megatron.training import training

    engine, loop = f"{Path(manager.__file__).parent}/", training.__file__
    entered, frames = set[CodeType](), list[str]()

    def enter(code: CodeType, _offset: int) -> Any:
        if code.co_filename.startswith(engine):
            entered.add(code)
            if code is LiveCapturer.begin.__code__:
                frame: FrameType | None = inspect.currentframe()
                frame = frame and frame.f_back  # that of the function itself
                while frame is not None and frame.f_code.co_filename != loop:
                    frames.append(f"{frame.f_code.co_filename.removeprefix(engine)}:{frame.f_code.co_name}")
                    frame = frame.f_back
        return sys.monitoring.DISABLE  # once for each function

    tool, starts = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(tool, "moe-ckpt-trace")
    sys.monitoring.register_callback(tool, starts, enter)
    sys.monitoring.set_events(tool, starts)
    try:
        yield
    finally:
        functions = [
            (code.co_filename.removeprefix(engine), code.co_firstlineno, *_length(code))
            for code in entered
            # No bodies of modules and classes, nor what runs at import for `def name[T]`.
            if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<generic parameters")
        ]
        path = Path(folder) / f"{os.environ['RANK']}-{os.getpid()}.json"
        path.write_text(json.dumps({"functions": functions, "frames": frames}))


def _length(code: CodeType) -> tuple[int, int]:
    """Lines of a function, and how many of them are its docstring."""
    # CPython puts a docstring first among the constants of a function; a lambda has none.
    first = code.co_consts[0] if code.co_consts and not code.co_name.startswith("<") else None
    said = first.count("\n") + 1 if isinstance(first, str) else 0
    return max(line or 0 for *_, line in code.co_lines()) - code.co_firstlineno + 1, said
