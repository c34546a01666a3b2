"""Writes the shards of one checkpoint, in the foreground or in a forked process beside training."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import queue
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe.core_versions.checkpoints import async_options, no_results_queue
from megatron.core.dist_checkpointing.moe.errors import format_error
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.pretrain.agreement import on_rank_zero, raise_on_all_ranks
from megatron.pretrain.processes import live_and_die_with_parent, starting_helpers
from moe_ckpt.dense.integrity import FileSum, Sums
from moe_ckpt.dense.items import Extent, ItemSums, sums_of_file

WRITE_TIMEOUT_S = 3600.0


class ShardWriter:
    """The shards of this rank, planned and staged in host memory, on their way to storage.

    Sequence: `run` or `start`; `is_done` until it is true on every rank; then `finish`. Core's own
    runner forks a process per file and a manager process, blocks for ever when one of them is killed, and lets a
    failed metadata write strand all other ranks; this one reports each of those as an error on every rank.
    """

    def __init__(self, writer: FileSystemWriterAsync, metadata: Any) -> None:
        self._writer = writer
        self._metadata = metadata
        self._process: Any = None
        self._connection: multiprocessing.connection.Connection | None = None
        self._outcome: Any = None
        self._deadline_s = time.monotonic() + WRITE_TIMEOUT_S

    def run(self) -> None:
        """Write now, in this process; `finish` raises on all ranks what fails."""
        try:
            self._outcome = _write_buckets(self._staged(), self._transforms())
        except Exception as error:
            self._outcome = format_error(error)

    def start(self) -> None:
        """Write in a forked process, which holds the memory as it is at this moment; failures as in `run`."""
        context = multiprocessing.get_context("fork")
        try:
            self._connection, remote = context.Pipe(duplex=False)
            process = context.Process(
                target=_write_and_send, args=(self._staged(), self._transforms(), remote), daemon=True
            )
            with starting_helpers():
                process.start()
            remote.close()
            self._process = process
        except Exception as error:
            self._outcome = format_error(error)

    def is_done(self) -> bool:
        """Whether this rank has nothing left to write, or gave up after WRITE_TIMEOUT_S."""
        if self._process is None or self._received():
            return True
        if time.monotonic() > self._deadline_s:
            self._process.kill()
            self._outcome = f"writing the checkpoint took longer than {WRITE_TIMEOUT_S:.0f} s"
        return self._outcome is not None

    def abandon(self) -> None:
        """Write no more."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def finish(self) -> tuple[Sums, ItemSums]:
        """Write the index of the checkpoint, once `is_done` on every rank; a collective over all ranks.

        Returns the sums of the files that all ranks wrote, and of the items in them, on rank 0; elsewhere none.
        Raises RankFailure on every rank if any rank failed to write, OSError if rank 0 could not write the index.
        """
        if self._process is not None:
            self._process.join()
        failed = isinstance(self._outcome, str)
        raise_on_all_ranks(self._outcome if failed else None)
        written: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._outcome, written if dist.get_rank() == 0 else None, dst=0)
        on_rank_zero(lambda: self._writer.finish(self._metadata, [results for results, _ in written]))
        found = {name: sums for _, files in filter(None, written) for name, sums in files.items()}
        return {name: whole for name, (whole, _) in found.items()}, {name: items for name, (_, items) in found.items()}

    def _staged(self) -> list[Any]:
        buckets: list[Any] = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets or [])
        return buckets

    def _transforms(self) -> list[Any]:
        return [self._writer.transforms] if hasattr(self._writer, "transforms") else []

    def _received(self) -> bool:
        if self._outcome is None and self._connection is not None and self._connection.poll():
            try:
                self._outcome = self._connection.recv()
            except (EOFError, OSError):
                self._outcome = "the process that writes the checkpoint ended without a result"
        return self._outcome is not None


class DenseSaveStrategy(TorchDistSaveShardedStrategy):
    """Core's `torch_dist` strategy that hands out a ShardWriter instead of running the write itself."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.writer: ShardWriter | None = None

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, plan: tuple[Any, ...], *options: Any
    ) -> AsyncRequest:
        _, metadata, _ = plan
        self.writer = ShardWriter(writer, metadata)
        return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])


def plan_shards(sharded_state_dict: dict[str, Any], folder: Path, *, fully_parallel_group: Any | None) -> ShardWriter:
    """Decide which rank writes which bytes and stage this rank's; a collective over all ranks.

    With `fully_parallel_group` replicas in that process group share the writing evenly.
    """
    strategy = DenseSaveStrategy()
    save: Any = strategy
    if fully_parallel_group is not None:
        save = FullyParallelSaveStrategyWrapper(strategy, fully_parallel_group)
    with no_results_queue():
        save.async_save(sharded_state_dict, folder, **async_options(save.async_save))
    assert strategy.writer is not None
    return strategy.writer


def _write_buckets(buckets: list[Any], transforms: list[Any]) -> Any:
    """Write result of every item and the sums of every file, or the reason of the first failure as text."""
    results: list[Any] = []
    sums: dict[str, tuple[FileSum, dict[Extent, str]]] = {}
    for bucket in buckets:
        answers: queue.Queue[Any] = queue.Queue()
        counter: queue.Queue[int] = queue.Queue()
        counter.put(0)
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, answers, counter, use_fsync=True)
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            return format_error(answer)
        results.extend(answer)
        path, name, _ = bucket
        try:
            extents = [(one.storage_data.offset, one.storage_data.length) for one in answer]
            sums[name] = sums_of_file(Path(path), extents)
        except OSError as error:
            return format_error(error)
    return results, sums


def _write_and_send(buckets: list[Any], transforms: list[Any], remote: multiprocessing.connection.Connection) -> None:
    gc.disable()  # a collection here could free what the trainer owns on its device
    live_and_die_with_parent()
    # Threads do not survive a fork: a parallel kernel would wait for workers that do not exist.
    torch.set_num_threads(1)
    remote.send(_write_buckets(buckets, transforms))
    remote.close()
