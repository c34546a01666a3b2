"""What each rank may take of its node's memory: the same on all ranks, asked before anything is taken."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_world.model import FakeModel, spread
from simulated_world.rank import FakeCapturer
from simulated_world.world import World
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import CheckpointFailure
from megatron.core.dist_checkpointing.moe.ports import NoRoom
from megatron.core.dist_checkpointing.moe.snapshot.memory_limit import (
    UNBOUNDED,
    BufferAllocator,
    MemoryBound,
    NodeMemory,
    taken_bytes,
)
from megatron.core.dist_checkpointing.moe.storage.system import node_memory_bytes
from megatron.core.dist_checkpointing.moe.strategies import Job
from megatron.core.dist_checkpointing.moe.strategies.base import NO_BUFFERS
from megatron.core.dist_checkpointing.moe.strategies.memory_report import MemoryLimit
from megatron.core.dist_checkpointing.moe.strategies.sparse import Sparse
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Topology, expert

OPERATORS = (OperatorId(0, OperatorKind.NON_EXPERT), *(expert(0, index) for index in range(4)))


NO_LIMIT = MemoryBound()


class Ranks:
    """Rank 0 among others that all have what it has."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)


class Memory:
    """Takes segments of at most `most` bytes in all."""

    def __init__(self, most: int = UNBOUNDED) -> None:
        self.most, self.taken = most, [1]

    def resize(self, segment_bytes: Sequence[int]) -> None:
        if sum(segment_bytes) > self.most:
            raise NoRoom("the tmpfs is full")
        self.taken = list(segment_bytes)


def node(folder: Path, ranks: Sequence[int] = (0,), limit: str | None = None, held: int = 0, **more: Any) -> NodeMemory:
    parsed = None if limit is None else MemoryLimit.parse(limit)
    return NodeMemory(ranks, parsed, 1000, folder, lambda: held, **more)


def room(*nodes: NodeMemory) -> MemoryBound:
    """What ranks of these nodes, in their order, find: all of them the same."""
    first, *others = on_ranks(*(one.room for one in nodes))
    assert all(one == first for one in others)
    assert isinstance(first, MemoryBound), first
    return first


def test_ranks_of_a_node_share_what_the_flag_allows_it(tmp_path: Path) -> None:
    assert room(*[node(tmp_path, range(4), "80%")] * 4).nbytes == 200
    assert room(node(tmp_path)).why != "--moe-ckpt-memory-limit"


def test_a_folder_that_is_larger_than_the_memory_of_the_job_is_no_room(tmp_path: Path) -> None:
    found = room(*[node(tmp_path, range(4), counts_total=True)] * 4)
    assert found.nbytes == 250
    assert "the control group of this job, has no more" in found.shortage(251)


def test_the_tightest_node_decides_for_all(tmp_path: Path) -> None:
    apart = node(tmp_path, (0, 2), "800B"), node(tmp_path, (1, 3, 4), "600B")
    found = room(apart[0], apart[1], apart[0], apart[1], apart[1])
    assert (found.nbytes, found.ranks) == (200, 3)
    assert "0.0" not in found.shortage(201) and "--moe-ckpt-memory-limit" in found.shortage(201)
    assert found.shortage(200) == ""


def test_without_a_limit_the_ranks_of_the_first_node_are_counted(tmp_path: Path) -> None:
    ranks = [node(tmp_path, (0, 1), counts_free=False)] * 2 + [node(tmp_path, (2,), counts_free=False)]
    assert room(*ranks) == MemoryBound(ranks=2)


def test_what_the_folder_has_free_is_a_bound_beside_what_is_held_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found:
        f_bavail, f_frsize, f_blocks = 7, 10, 99

    monkeypatch.setattr("os.statvfs", lambda _: Found)
    found = room(node(tmp_path, (0, 1), "1GB", held=30), node(tmp_path, (0, 1), "1GB", held=100))
    assert found.nbytes == (70 + 30 + 100) // 2
    assert "enlarge the tmpfs" in found.why
    assert room(node(tmp_path, counts_free=False)).nbytes == UNBOUNDED


def test_a_control_group_bounds_the_memory_of_a_node(tmp_path: Path) -> None:
    own = tmp_path / "own"
    (tmp_path / "memory.max").write_text("4096\n")
    assert node_memory_bytes(tmp_path, own) == 4096
    (tmp_path / "memory.max").write_text("max\n")
    assert node_memory_bytes(tmp_path, own) == node_memory_bytes(tmp_path / "nothing", own) > 4096


@pytest.mark.parametrize(
    ("line", "root", "file"),
    [
        ("0::/job/step", "", "memory.max"),
        ("7:cpu,cpuacct:/other\n5:hugetlb,memory:/job/step", "memory", "memory.limit_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize("group", ["job/step", "job", ""])
def test_the_least_limit_of_a_group_and_of_those_around_it_counts(
    tmp_path: Path, line: str, root: str, file: str, group: str
) -> None:
    own, mounted = tmp_path / "own", tmp_path / "groups"
    own.write_text(f"{line}\n")
    for folder in ("", "job", "job/step"):
        (mounted / root / folder).mkdir(parents=True, exist_ok=True)
        limit = "8192" if folder == group else "9223372036854771712"  # as version 1 says that there is none
        (mounted / root / folder / file).write_text(f"{limit}\n")
    assert node_memory_bytes(mounted, own) == 8192


def test_a_container_that_sees_only_its_own_group_finds_its_limit(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("8192\n")
    (tmp_path / "own").write_text("5:memory:/docker/0123456789abcdef\n")
    assert node_memory_bytes(tmp_path, tmp_path / "own") == 8192


def test_a_group_may_have_any_name_that_a_folder_may_have(tmp_path: Path) -> None:
    group = tmp_path / os.fsdecode(b"job-\xff")
    group.mkdir()
    (group / "memory.max").write_text("8192\n")
    (tmp_path / "own").write_bytes(b"0::/job-\xff\n")
    assert node_memory_bytes(tmp_path, tmp_path / "own") == 8192


@pytest.fixture
def capturer() -> FakeCapturer:
    world = World(0)
    return FakeCapturer(FakeModel(world, 0, spread(OPERATORS, 0, 1, numel=512)), world)


def sparse() -> Sparse:
    config = MoECheckpointConfig(strategy="sparse", window="2")
    return Sparse(Job(config, OPERATORS, Topology(2, pp=2, ranks_per_node=2), 64, 100))


def fitted(
    capturer: FakeCapturer, strategy: Sparse, room: MemoryBound = NO_LIMIT, memory: Memory | None = None, **options: Any
) -> tuple[Memory, tuple[Any, bool]]:
    memory, logs = memory or Memory(), options.pop("log_bytes", 0)
    ranks = options.pop("ranks", None) or Ranks(rank=options.pop("rank", 0))
    taker = BufferAllocator(memory, capturer, ranks, (), room=lambda: room, standby_bytes=lambda n: n * logs, **options)  # type: ignore[arg-type]
    return memory, taker.fit(strategy, NO_BUFFERS)


def test_what_fits_is_taken_as_it_was_asked_for(capturer: FakeCapturer) -> None:
    strategy = sparse()
    wanted = strategy.buffer_specs()
    memory, done = fitted(capturer, strategy)
    assert done == (wanted, False)
    assert len(memory.taken) == 6


def test_less_is_asked_for_until_it_fits_and_each_step_is_one_line(
    capturer: FakeCapturer, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = fitted(capturer, sparse())
    needed = taken_bytes(whole.taken)
    for logs, lines in ((100 * 6, 0), (100 * 6 - 1, 1), (100 * 2, 2), (0, 3), (-1, 4)):
        caplog.clear()
        strategy = sparse()
        memory, _ = fitted(capturer, strategy, MemoryBound(needed + logs, 2, "the reason"), log_bytes=100)
        assert len(caplog.messages) == lines, caplog.messages
        assert taken_bytes(memory.taken) + 100 * strategy.logged <= needed + logs
        assert all("the reason" in line for line in caplog.messages)
    assert "at once" in caplog.messages[-1]
    assert len(memory.taken) == 3


def test_ranks_with_and_without_room_for_logs_give_up_alike(capturer: FakeCapturer) -> None:
    """Each answer is followed by collectives of its own."""
    whole, _ = fitted(capturer, sparse())
    room, answers = MemoryBound(taken_bytes(whole.taken)), list[tuple[int, ...]]()
    ranks = SimpleNamespace(rank=0, least=lambda values: answers.append(tuple(values)) or tuple(values))
    assert fitted(capturer, sparse(), room, log_bytes=100, ranks=ranks)[1][1]
    of_others = iter(answers)
    other = SimpleNamespace(rank=0, least=lambda values: tuple(map(min, values, next(of_others))))
    assert fitted(capturer, sparse(), room, ranks=other)[1][1]
    assert not list(of_others)


def test_memory_that_refuses_all_the_same_leads_to_less_too(capturer: FakeCapturer) -> None:
    whole, _ = fitted(capturer, sparse())
    memory, (specs, gave_up) = fitted(capturer, sparse(), memory=Memory(sum(whole.taken) - 1))
    assert gave_up and len(memory.taken) == 3
    assert specs[0].own == 3


def test_where_nothing_fits_training_continues_without_snapshots(
    capturer: FakeCapturer, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = sparse()
    fitted(capturer, strategy, MemoryBound(10, 2, "the reason"))
    assert strategy.gave_up
    assert "training is not protected" in caplog.messages[-1]


def test_only_the_first_rank_speaks(capturer: FakeCapturer, caplog: pytest.LogCaptureFixture) -> None:
    fitted(capturer, sparse(), MemoryBound(10, 2, "the reason"), rank=1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_strict_training_ends_where_it_would_have_to_give_something_up(capturer: FakeCapturer) -> None:
    with pytest.raises(CheckpointFailure, match=r"the reason; training ends because of --moe-ckpt-strict"):
        fitted(capturer, sparse(), MemoryBound(10, 2, "the reason"), strict=True)
