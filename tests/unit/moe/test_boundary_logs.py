"""Boundary logs of one rank through many iterations: real memory, a real lane, real copies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import BoundaryRecorder
from megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs import BoundaryLogs, LogPlan, LogPorts
from megatron.core.dist_checkpointing.moe.policy.lineage import Identity
from megatron.core.dist_checkpointing.moe.ports import Layout, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import ThreadEngine
from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import (
    LOG,
    PARKED,
    Direction,
    StepJournal,
    Topology,
    boundary_key,
    received_key,
)

TOPOLOGY = Topology(4, pp=2)
SHAPE = (8, 1, 4)
MICROBATCHES = 4
LOOKBACK = 6
WAIT_S = 60.0
LOGGER = "megatron.core.dist_checkpointing.moe.local_recovery.boundary_logs"


def plan(rank: int = 0, lookback: int = LOOKBACK) -> LogPlan:
    return LogPlan(TOPOLOGY, rank, SHAPE, "float32", lookback)


class Rank:
    """A rank that sends, in each iteration, tensors that tell the iteration and the microbatch."""

    def __init__(self, place: Path, rank: int = 0, *, lookback: int = LOOKBACK, **ports: Any) -> None:
        self.plan = plan(rank, lookback)
        self.store = ports.get("store") or MemoryStore(
            place, "job", 0, self.plan.sizes(MICROBATCHES), area="standby", system=ports.get("system")
        )
        self.recorder = BoundaryRecorder(ThreadEngine("boundary-copy"))
        self.lane = ports.get("lane") or ThreadExecutor("logs")
        identity = Identity("job", {"world_size": 4, "pp": 2}, frozenset(), "sparse", ((0, 0),))
        self.logs = BoundaryLogs(
            self.plan,
            identity,
            LogPorts(store=self.store, lane=self.lane, recorder=self.recorder, clock=SystemClock()),
            timeout_s=WAIT_S,
        )

    def passes(self, iteration: int, microbatches: int = MICROBATCHES) -> None:
        for microbatch in range(microbatches):
            self.recorder.sent(Direction.FORWARD, torch.full(SHAPE, iteration + microbatch / 16))

    def train(self, iterations: range, oldest_base: Callable[[int], int | None] = lambda iteration: 0) -> None:
        for iteration in iterations:
            if isinstance(self.lane, ThreadExecutor):
                self.settle()
            self.logs.begins(iteration, MICROBATCHES)
            self.passes(iteration)
            journal = StepJournal(grad_norm=iteration / 3, lm_loss=None, num_tokens=64)
            self.logs.on_commit(iteration, journal, {"samples": 8 * iteration}, oldest_base(iteration))

    def settle(self) -> None:
        assert "not sealed within" not in self.logs.drain(WAIT_S)

    def held(self) -> list[int]:
        self.settle()
        return [one.iteration for one in self.store.snapshots().sealed if one.kind == LOG]

    def end(self) -> None:
        self.lane.shutdown()
        self.recorder.close()
        self.store.close()


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def build(*arguments: Any, **keywords: Any) -> Rank:
        made.append(Rank(tmp_path, *arguments, **keywords))
        return made[-1]

    yield build
    for rank in made:
        rank.end()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


class HeldLane:
    """A lane that begins nothing until it is let go."""

    def __init__(self) -> None:
        self.go, self._lane = threading.Event(), ThreadExecutor("held")
        self._lane.submit(lambda: self.go.wait(WAIT_S))

    def submit(self, work: Callable[[], Any], /) -> Any:
        return self._lane.submit(work)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.go.set()
        self._lane.shutdown(wait, cancel_futures=cancel_futures)


class Faulty:
    """A store that refuses what it is told to."""

    def __init__(self, place: Path, sizes: list[int]) -> None:
        self._store = MemoryStore(place, "job", 0, sizes, area="standby")
        self.refuses: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def reserve(self, snapshot: SnapshotId, layout: Layout) -> Any:
        if "reserve" in self.refuses:
            raise StoreFailure("reserve: the folder is gone")
        writer = self._store.reserve(snapshot, layout)
        if "seal" in self.refuses:

            def refused(*_: Any) -> None:
                raise StoreFailure("seal: no space left")

            writer.seal = refused  # type: ignore[method-assign, assignment]
        return writer

    def free(self, snapshot: SnapshotId) -> None:
        if "free" in self.refuses:
            raise StoreFailure("free: read-only file system")
        self._store.free(snapshot)


def test_a_log_holds_what_was_sent_under_its_keys_with_the_journal_and_the_trainer(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 4))
    rank.settle()
    with rank.store.open(SnapshotId(3, 0, LOG)) as reader:
        manifest = reader.manifest
        assert [field.key for field in manifest.layout.fields] == [
            *(boundary_key(Direction.FORWARD, 0, microbatch) for microbatch in range(MICROBATCHES)),
            received_key(Direction.BACKWARD),
        ]
        for microbatch, field in enumerate(manifest.layout.fields[:-1]):
            sent = torch.full(SHAPE, 3 + microbatch / 16)
            assert bytes(reader.read(field.key)) == sent.numpy().tobytes()
    scalars = manifest.facts.scalars
    assert StepJournal.from_data(scalars["journal"]) == StepJournal(1.0, False, None, 64)  # type: ignore[arg-type]
    assert scalars["trainer"] == {"samples": 24}
    assert scalars["timeline"] == [[0, 0]]
    assert manifest.facts.job == "job"


def test_what_a_journal_says_is_read_by_the_thread_that_seals(new: Callable[..., Rank]) -> None:
    """It may still be on the device, and the thread that trains has to continue."""
    readers: list[str] = []

    class Late:
        def __float__(self) -> float:
            readers.append(threading.current_thread().name)
            return 0.5

    rank = new()
    rank.logs.begins(3, MICROBATCHES)
    rank.passes(3)
    rank.logs.on_commit(3, StepJournal(grad_norm=Late()), {}, 0)
    rank.settle()
    assert readers == ["moe-ckpt-logs"]


def test_logs_after_the_oldest_base_stay_and_older_ones_go(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 9), lambda iteration: iteration // 3 * 3)
    assert rank.held() == [7, 8]
    assert rank.logs.coverage.since == 7


def test_before_any_window_all_logs_stay_up_to_the_bound(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 12), lambda iteration: None)
    assert rank.held() == [6, 7, 8, 9, 10, 11]
    assert rank.logs.coverage.why == ""


def test_where_windows_are_older_than_the_bound_coverage_says_so(
    new: Callable[..., Rank], caplog: pytest.LogCaptureFixture
) -> None:
    rank = new()
    with caplog.at_level(logging.INFO, LOGGER):
        rank.train(range(1, 10))
    assert rank.held() == [4, 5, 6, 7, 8, 9]
    assert rank.logs.coverage.why == (
        "no boundary logs of iterations 1 to 3, needed to replay from iteration 0 to 9;"
        " only those of the last 6 iterations are kept"
    )
    assert len(said(caplog)) == 1, "it is said once, not in each iteration"
    with caplog.at_level(logging.INFO, LOGGER):
        rank.train(range(10, 11), lambda iteration: 5)
    assert rank.logs.coverage.why == ""
    assert said(caplog)[1:] == ["localized recovery available: boundary logs cover replays from iteration 5"]


def test_more_logs_are_kept_from_the_iteration_on_in_which_the_window_grows(new: Callable[..., Rank]) -> None:
    rank, more = new(), plan(lookback=LOOKBACK + 2)
    rank.logs.begins(5, MICROBATCHES)
    rank.passes(5)
    rank.store.resize(more.sizes(MICROBATCHES))
    rank.logs.fit(more)
    rank.logs.on_commit(5, StepJournal(), {}, 4)
    last = 5 + more.lookback
    rank.train(range(6, last), lambda _: 4)
    assert rank.held() == [*range(5, last)]


def test_memory_never_holds_more_than_the_bound(new: Callable[..., Rank]) -> None:
    rank = new()
    total = rank.store.total_bytes
    rank.train(range(1, 40), lambda iteration: 0)
    rank.settle()
    assert rank.store.total_bytes == total
    assert len(list(rank.store.directory.glob("*.bin"))) == rank.plan.segments


def test_logs_leave_the_segments_of_other_kinds_alone(tmp_path: Path, new: Callable[..., Rank]) -> None:
    sizes = [*plan().sizes(MICROBATCHES), 50 * plan().layout(MICROBATCHES).nbytes]
    store = MemoryStore(tmp_path, "job", 0, sizes, area="standby")
    rank = new(store=store, lane=HeldLane())
    rank.train(range(1, 30), lambda iteration: None)
    rank.lane.go.set()
    rank.settle()
    rank.logs.begins(30, MICROBATCHES)  # while all of their own segments are taken by sealed ones
    store.reserve(SnapshotId(29, 0, PARKED), plan().layout(40 * MICROBATCHES)).abandon()


def test_when_sealing_falls_behind_logs_are_lost_and_training_is_not(new: Callable[..., Rank]) -> None:
    rank = new(lane=HeldLane())
    rank.train(range(1, LOOKBACK + 5))
    assert "from iteration 0 to 10; 8 logs are still being sealed" in rank.logs.coverage.why
    rank.lane.go.set()
    rank.settle()
    rank.train(range(11, 13), lambda iteration: 10)
    assert rank.logs.coverage == type(rank.logs.coverage)(12, 11, "")


def test_a_store_without_room_drops_the_oldest_log_for_the_newest(tmp_path: Path, new: Callable[..., Rank]) -> None:
    store = MemoryStore(tmp_path, "job", 0, plan().sizes(MICROBATCHES)[:3], area="standby")
    rank = new(store=store)
    for iteration in range(1, 6):
        rank.train(range(iteration, iteration + 1))
        rank.settle()
    assert rank.held() == [3, 4, 5]
    assert rank.logs.coverage.since == 3
    assert "iterations 1 to 2" in rank.logs.coverage.why


@pytest.mark.parametrize("what", ["reserve", "seal"])
def test_a_store_that_refuses_costs_coverage_until_the_base_has_passed(
    tmp_path: Path, new: Callable[..., Rank], caplog: pytest.LogCaptureFixture, what: str
) -> None:
    store = Faulty(tmp_path, plan().sizes(MICROBATCHES))
    rank = new(store=store)
    rank.train(range(1, 3))
    store.refuses.add(what)
    rank.train(range(3, 5))
    rank.settle()
    store.refuses.clear()
    rank.train(range(5, 7))
    assert rank.held() == [1, 2, 5, 6]
    assert rank.logs.coverage.since == 5
    assert "of iterations 3 to 4, " in rank.logs.coverage.why
    assert f"{what}: " in rank.logs.coverage.why
    rank.train(range(7, 8), lambda iteration: 4)
    assert rank.logs.coverage.why == ""
    assert len(said(caplog)) == 1


def test_what_cannot_be_freed_is_tried_again(tmp_path: Path, new: Callable[..., Rank]) -> None:
    store = Faulty(tmp_path, plan().sizes(MICROBATCHES))
    rank = new(store=store)
    rank.train(range(1, 3))
    rank.settle()
    store.refuses.add("free")
    rank.train(range(3, 4), lambda iteration: 2)
    assert rank.held() == [1, 2, 3]
    store.refuses.clear()
    rank.train(range(4, 5), lambda iteration: 2)
    assert rank.held() == [3, 4]


def test_an_iteration_that_sends_otherwise_than_planned_has_no_log(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 3))
    rank.logs.begins(3, MICROBATCHES)
    rank.passes(3, MICROBATCHES - 1)
    found = rank.logs.on_commit(3, StepJournal(), {}, 0)
    assert (found.newest, found.since) == (3, None)
    assert "3 of 4 forward" in found.why
    assert rank.held() == [1, 2]


def test_the_number_of_microbatches_may_change_from_iteration_to_iteration(new: Callable[..., Rank]) -> None:
    rank = new()
    for iteration, microbatches in ((1, 2), (2, 4), (3, 1)):
        rank.logs.begins(iteration, microbatches)
        rank.passes(iteration, microbatches)
        rank.logs.on_commit(iteration, StepJournal(), {}, 0)
    rank.settle()
    counts = []
    for iteration in rank.held():
        with rank.store.open(SnapshotId(iteration, 0, LOG)) as reader:
            counts.append(sum(one.key.startswith("forward/") for one in reader.manifest.records))
    assert counts == [2, 4, 1]


def test_a_log_that_is_made_again_replaces_the_one_that_is_there(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 4))
    rank.logs.begins(2, MICROBATCHES)
    rank.passes(90)
    rank.logs.on_commit(2, StepJournal(), {}, 0)
    assert rank.held() == [1, 2, 3]
    with rank.store.open(SnapshotId(2, 0, LOG)) as reader:
        key = boundary_key(Direction.FORWARD, 0, 0)
        assert bytes(reader.read(key)) == torch.full(SHAPE, 90.0).numpy().tobytes()


def test_logs_outlive_their_process_and_count_on_the_next_start(new: Callable[..., Rank]) -> None:
    first = new()
    first.train(range(1, 5))
    first.settle()
    first.end()
    again = new()
    assert again.held() == [1, 2, 3, 4]
    again.train(range(5, 6))
    assert again.logs.coverage == type(again.logs.coverage)(5, 1, "")


def test_logs_of_another_rank_stay_as_long_as_own_ones_but_do_not_count(new: Callable[..., Rank]) -> None:
    first = new(rank=0)
    first.train(range(1, 5))
    first.settle()
    first.end()
    again = new(rank=1)
    again.train(range(5, 7), lambda iteration: 2)
    assert again.held() == [3, 4, 5, 6]
    assert again.logs.coverage.since == 5
    assert "iterations 3 to 4" in again.logs.coverage.why
    again.train(range(7, 8), lambda iteration: 6)
    assert again.held() == [7]


def test_draining_seals_the_iteration_under_way_once_all_was_sent_without_a_journal(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 3))
    rank.logs.begins(3, MICROBATCHES)
    rank.passes(3)
    assert rank.logs.drain(WAIT_S) == ""
    assert rank.held() == [1, 2, 3]
    with rank.store.open(SnapshotId(3, 0, LOG)) as reader:
        assert "journal" not in reader.manifest.facts.scalars


def test_draining_gives_up_an_iteration_of_which_a_tensor_was_not_sent(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.train(range(1, 3))
    rank.logs.begins(3, MICROBATCHES)
    rank.passes(3, MICROBATCHES - 1)
    assert rank.logs.drain(WAIT_S) == "no boundary logs of iteration 3 (not all of its tensors were sent)"
    assert rank.held() == [1, 2]
    assert rank.store.snapshots().torn == ()


def test_draining_ends_in_time_and_says_what_is_not_sealed(new: Callable[..., Rank]) -> None:
    rank = new(lane=HeldLane())
    rank.train(range(1, 3))
    told = rank.logs.drain(0.05)
    assert "iteration 1 (it was not sealed within" in told
    assert "iteration 2 (it was not sealed within" in told
    rank.lane.go.set()
    assert rank.logs.drain(WAIT_S) == ""
    assert rank.held() == [1, 2]


def test_an_iteration_that_is_given_up_leaves_nothing_behind(new: Callable[..., Rank]) -> None:
    rank = new()
    rank.logs.begins(1, MICROBATCHES)
    rank.passes(1, 2)
    rank.logs.abandon()
    rank.passes(1, 2)  # nothing records any more
    assert rank.store.snapshots().sealed == rank.store.snapshots().torn == ()
    assert list(rank.store.directory.glob("*.writing")) == []
