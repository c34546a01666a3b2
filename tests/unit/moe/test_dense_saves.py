"""Saves of Megatron-Core as requests: who sums up what, and what follows when a step fails."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stock_stand_in import one_rank
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron.core.dist_checkpointing.moe.dense_saves.writing import Finishing, RankFailure, finish, summed, take_sums
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from moe_ckpt.dense.integrity import file_sum


class Request(NamedTuple):
    """As core's."""

    async_fn: Callable[..., Any] | None
    preload_fn: Callable[[], Any] | None = None


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_writer_sums_up_its_own_files_and_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "__1_0.distcp").write_bytes(b"of rank 1")
    (tmp_path / "__10_0.distcp").write_bytes(b"of rank 10")
    request = summed(Request(lambda: (tmp_path / "__0_0.distcp").write_bytes(b"of rank 0")), tmp_path, None)
    assert request.async_fn() == 9
    own = file_sum(tmp_path / "__0_0.distcp")
    assert take_sums(tmp_path, 2) == {"__0_0.distcp": own}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__0_0.distcp", "__10_0.distcp", "__1_0.distcp"]


def test_a_rank_that_writes_nothing_sums_up_nothing(tmp_path: Path) -> None:
    assert summed(Request(None), tmp_path, None) == Request(None)
    assert take_sums(tmp_path, 1) == {}


def test_a_rank_without_memory_for_its_shards_says_so_among_the_results_and_writes_nothing(tmp_path: Path) -> None:
    results: queue.Queue[Exception] = queue.Queue()
    request = summed(Request(full, mock.Mock(side_effect=MemoryError("no memory"))), tmp_path, None)
    assert request.async_fn is not None and request.preload_fn is not None
    request.async_fn(0, request.preload_fn(), results)
    assert str(results.get_nowait()) == "rank 0 could not stage its shards: MemoryError: no memory"
    assert not list(tmp_path.iterdir())


def test_what_a_file_system_says_of_a_shard_is_among_the_results(tmp_path: Path) -> None:
    results: queue.Queue[Exception] = queue.Queue()
    shard = WriteItem(MetadataIndex("weight"), WriteItemType.SHARD, tensor_data=None)
    bucket = (Path("/dev/full"), "__0_0.distcp", ([], [(shard, torch.zeros(1 << 20))]))
    write = partial(FileSystemWriterAsync.write_preloaded_data_multithread, [_StorageWriterTransforms()], False)
    summed(Request(write), tmp_path, None).async_fn(0, [bucket], results)
    assert "No space left on device" in str(results.get_nowait())


def test_sums_that_are_torn_are_not_believed(tmp_path: Path) -> None:
    summed(Request(lambda: (tmp_path / "__0_0.distcp").write_bytes(b"some")), tmp_path, None).async_fn()
    (left,) = tmp_path.glob(".*")
    left.write_bytes(left.read_bytes()[:-5])
    assert take_sums(tmp_path, 1) == {}
    assert not left.exists()


def test_after_a_failure_nothing_more_is_done_and_no_success_is_told() -> None:
    done: list[str] = []
    finishing = Finishing([lambda: done.append("index"), full, lambda: done.append("rename")], done.append)
    finishing.append(lambda: done.append("tracker"))
    for step in finishing:
        step()
    assert done == ["index", "OSError: [Errno 28] No space left on device (on rank 0)"]


def test_what_core_asserts_of_writer_threads_that_failed_leaves_no_rank_alone() -> None:
    def as_core_does() -> None:
        assert isinstance("what a thread left behind", list), "of several writer threads one failed"

    with pytest.raises(RankFailure, match=r"of several writer threads one failed \(on rank 0\)"):
        finish(as_core_does)


def test_without_a_failure_all_steps_are_done_in_order() -> None:
    done: list[str] = []
    finishing = Finishing([lambda: done.append("index"), lambda: done.append("rename")], done.append)
    finishing.append(lambda: done.append("tracker"))
    for step in finishing:
        step()
    assert done == ["index", "rename", "tracker"]


def test_an_index_that_cannot_be_written_is_told_behind_what_other_ranks_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FileSystemWriter, "finish", full)
    monkeypatch.setattr(dist, "barrier", full)
    reached: list[str] = []

    def as_core_does() -> None:
        FileSystemWriter.finish(object(), None, None)
        reached.append("broadcast")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"No space left on device \(on rank 0\)"):
        finish(as_core_does)
    assert reached == ["broadcast"]
