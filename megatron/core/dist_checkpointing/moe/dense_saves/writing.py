"""A save of Megatron-Core as a request: what is written, summed up where it is written, and what follows once all ranks
have written.

Core hands out a save as an `AsyncRequest`: a function that writes the shards of this rank, in this process or in
another one, and functions that finish the checkpoint when all ranks have written. Core runs the same request in place
where saves are not asynchronous (`execute_sync`, checked: 0.17.1 to 0.19.2). What fails there on one rank alone would
leave the others in a collective: here each step ends with one that tells all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from moe_ckpt.dense.integrity import FileSum, decode, encode, file_sum
from moe_ckpt.dense.names import SUMS_BYTES

from ..core_versions.training import replaced
from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error, ranks_named
from ..storage.manifest import is_keyed, use_secret
from ..storage.small_files import read_secret, read_small
from ..storage.system import write_atomically

log = logging.getLogger(__name__)

# Outcomes that all ranks share: what fails on one rank is raised on all of them, with the same words.


class RankFailure(Exception):
    """Something failed on at least one rank; the text names the ranks and the first reason."""


def on_rank_zero[T](action: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)) -> T:
    """Run `action` on rank 0 and return its value on every rank.

    If it raises an exception that is expected, every rank raises an equal one: the same type and arguments.

    Args:
        action: The function to run.
        errors: The types of exceptions that are expected.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except errors as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def raise_on_all_ranks(problem: str | None) -> None:
    """Raise RankFailure on every rank if `problem` is given on any; a collective over all ranks."""
    if text := problem_of_all(problem):
        raise RankFailure(text)


def problem_of_all(problem: str | None) -> str:
    """The problem of the first rank that has one, with the numbers of those that have; empty where there is none.

    A collective over all ranks, in which mostly one number is reduced. The same on all of them.
    """
    if all_done(problem is None):
        return ""
    has = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=torch.cuda.current_device())
    has[dist.get_rank()] = problem is not None
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    failed: list[int] = has.nonzero().flatten().tolist()
    text = [problem]
    dist.broadcast_object_list(text, src=failed[0])
    return f"{text[0]} (on {ranks_named(failed)})"


def all_done(is_done: bool) -> bool:
    """Whether `is_done` holds on every rank; a short collective over all ranks.

    Asked again and again while work continues beside it, so that no collective waits as long as the slowest rank takes.
    """
    unfinished = torch.tensor([int(not is_done)], device=torch.cuda.current_device())
    dist.all_reduce(unfinished, op=dist.ReduceOp.MAX)
    return not unfinished.item()


POLL_INTERVAL_S, SAY_EVERY_S = 0.05, 60.0


def await_everywhere(work: Future[Any] | None, doing: str) -> None:
    """Wait until the work of every rank has ended; a collective over all ranks.

    A rank may take longer than a collective may last, as for one huge file, so this has no limit: whoever is not done
    says so every minute.

    Args:
        work: Of this rank, if it has any.
        doing: What it is, for the log.
    """
    begun_s = said_s = time.monotonic()
    while not all_done(work is None or work.done()):
        wait([work] if work is not None else [], POLL_INTERVAL_S)
        if work is not None and not work.done() and time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            took_s = said_s - begun_s  # an error, as other ranks than 0 log nothing less
            log.error("rank %d: still %s after %.0f s; the others wait for it", dist.get_rank(), doing, took_s)


type Step = Callable[[], None]

_SUMS = ".moe_ckpt_sums_{rank}"
_SHARD = re.compile(r".*__(\d+)_\d+\.distcp")


def summed(request: Any, folder: Path, secret: str | None) -> Any:
    """The request, whose writing also sums up what it has written to the folder; where it runs, beside training too.

    Args:
        request: What core wants to have written.
        folder: The folder that it is written to.
        secret: Path of the job's secret, if that is not in the environment.
    """
    if request.async_fn is None:  # nothing to write on this rank
        return request
    write = functools.partial(_write_and_sum, request.async_fn, str(folder), dist.get_rank(), secret)
    stage = request.preload_fn and functools.partial(_stage, request.preload_fn)
    return request._replace(async_fn=write, preload_fn=stage)


@dataclass(frozen=True)
class _NotStaged:
    """In place of shards that could not be brought to host memory; reason: why."""

    reason: str


def _stage(preload: Callable[[], Any]) -> Any:
    """The shards in host memory. A rank that has no room for them says so where it would write, as the others wait."""
    try:
        return preload()
    except (OSError, MemoryError, RuntimeError) as error:
        return _NotStaged(_reason(error))


def _write_and_sum(
    write: Callable[..., Any], folder: str, rank: int, secret: str | None, *given: Any, **options: Any
) -> Any:
    """Leave what the files of this rank are beside them. Files of which that is not known are read once more later."""
    for missing in (part for part in given if isinstance(part, _NotStaged)):
        given[-1].put(RuntimeError(f"rank {rank} could not stage its shards: {missing.reason}"))  # core's results
        return None
    with _reasons_kept():
        result = write(*given, **options)
    with contextlib.suppress(OSError, MoECheckpointError):
        if not is_keyed():  # as in a process that was spawned to write
            use_secret(read_secret(secret))
        shards = ((path, _SHARD.fullmatch(path.name)) for path in Path(folder).iterdir())
        own = [path for path, match in shards if match is not None and int(match[1]) == rank]
        write_atomically(Path(folder, _SUMS.format(rank=rank)), encode({path.name: file_sum(path) for path in own}))
    return result


@contextlib.contextmanager
def _reasons_kept() -> Iterator[None]:
    """Core's report of a shard that cannot be written has the class of what its writer returns, but the text of what
    that raises. Torch's stream hides the error of the file behind one of its own."""
    write_shard = FileSystemWriterAsync.write_preloaded_data

    def raising(*given: Any, **options: Any) -> Any:
        output = write_shard(*given, **options)
        error = output[1] if output is not None else None  # None in one of several threads
        if isinstance(error, Exception):
            while error.__context__ is not None and not isinstance(error, OSError):
                error = error.__context__
            raise error
        return output

    with replaced(FileSystemWriterAsync, write_preloaded_data=staticmethod(raising)):
        yield


def take_sums(folder: Path, ranks: int) -> dict[str, FileSum]:
    """What ranks have said that their files are, by name; removed from the folder.

    Args:
        folder: The folder of the checkpoint.
        ranks: The number of ranks that wrote to it.
    """
    sums: dict[str, FileSum] = {}
    for path in (folder / _SUMS.format(rank=rank) for rank in range(ranks)):
        with contextlib.suppress(OSError, UnreadableCheckpoint):
            sums |= decode(read_small(path, SUMS_BYTES), str(path))
        with contextlib.suppress(OSError):
            path.unlink()
    return sums


def write_now(request: Any, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Write the shards of this rank in this process; a collective.

    Args:
        request: What core wants to have written.
        around: Makes a block around what waits for no other rank.

    Raises:
        RankFailure: On all ranks, if any could not write.
    """
    with around():
        problem = _problem(request._replace(finalize_fns=[]).execute_sync)
    raise_on_all_ranks(problem)


def finish(step: Step) -> None:
    """Run one of the functions that finish a save; a collective.

    Raises:
        RankFailure: On all ranks, if it failed on any.
    """
    raise_on_all_ranks(_problem(step))


def _problem(work: Step) -> str | None:
    """What goes wrong with this on this rank, if anything does; no rank is left in a barrier for another."""
    problems: list[str] = []
    try:
        with _nobody_waits(problems):
            work()
    # Core asserts on what its writer threads left behind where one of several failed.
    except (OSError, MemoryError, RuntimeError, AssertionError, UnreadableCheckpoint, CheckpointException) as error:
        problems.append(_reason(error))
    return problems[0] if problems else None


@contextlib.contextmanager
def _nobody_waits(problems: list[str]) -> Iterator[None]:
    """Core waits here for rank 0, which writes the index and the format file: who fails there is waited for in vain.

    What ends a block of code is an agreement of all ranks, so barriers before it are not needed.
    """
    write_index = FileSystemWriter.finish

    def write_index_or_note(writer: Any, *given: Any) -> None:
        try:
            write_index(writer, *given)
        except OSError as error:
            problems.append(_reason(error))

    with (
        replaced(dist, barrier=lambda *unused, **options: None),
        replaced(FileSystemWriter, finish=write_index_or_note),
    ):
        yield


def _reason(error: BaseException) -> str:
    """One line; of those that torch gathers from all ranks, the first inside."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (format_error(error).splitlines() or [type(error).__name__])[0]


class Finishing(list[Step]):
    """What finishes a save, to be called once by all ranks in this order, when they have written.

    The first functions are of core, collectives: where one has failed on any rank, those that follow do nothing. What
    is appended is of Megatron-LM and differs from rank to rank: the tracker, and what is told of a success.

    Args:
        together: Of core.
        given_up: Gets why the checkpoint is given up, on all ranks.
    """

    def __init__(self, together: list[Step], given_up: Callable[[str], None]) -> None:
        super().__init__(functools.partial(self._together, step) for step in together)
        self._given_up, self._has_failed = given_up, False

    def append(self, step: Step) -> None:
        """Add what Megatron-LM does after a success."""
        super().append(functools.partial(self._alone, step))

    def _together(self, step: Step) -> None:
        if not self._has_failed:
            try:
                finish(step)
            except RankFailure as failure:
                self._has_failed = True
                self._given_up(str(failure))

    def _alone(self, step: Step) -> None:
        if not self._has_failed:
            step()
