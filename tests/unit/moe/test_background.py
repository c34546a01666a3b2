"""Lanes: background work in order, on a thread that keeps no process alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor

PATIENCE_S = 60.0


@pytest.fixture
def lane() -> Iterator[ThreadExecutor]:
    made = ThreadExecutor("test")
    yield made
    made.shutdown()


def test_work_runs_on_one_thread_in_the_order_of_submission(lane: ThreadExecutor) -> None:
    order: list[tuple[int, int]] = []
    tasks = [lane.submit(lambda at=at: order.append((at, threading.get_ident()))) for at in range(50)]  # type: ignore[misc]
    tasks[-1].result(PATIENCE_S)
    assert [at for at, _ in order] == list(range(50))
    assert len({thread for _, thread in order} - {threading.get_ident()}) == 1


def test_a_result_is_what_the_work_returned(lane: ThreadExecutor) -> None:
    task = lane.submit(lambda: 7)
    assert task.result(PATIENCE_S) == 7
    assert task.done()


def test_an_error_is_raised_where_the_result_is_asked_for_and_the_lane_continues(lane: ThreadExecutor) -> None:
    broken = lane.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        broken.result(PATIENCE_S)
    assert lane.submit(lambda: "next").result(PATIENCE_S) == "next"


def test_waiting_too_long_raises_and_the_work_still_ends(lane: ThreadExecutor) -> None:
    gate = threading.Event()
    task = lane.submit(lambda: gate.wait(PATIENCE_S))
    with pytest.raises(TimeoutError):
        task.result(0.01)
    assert not task.done()
    gate.set()
    assert task.result(PATIENCE_S) is True


def test_a_lane_that_was_shut_down_takes_no_more_work() -> None:
    lane = ThreadExecutor("test")
    lane.shutdown()
    with pytest.raises(MoECheckpointError, match="lane test was shut down"):
        lane.submit(lambda: 0)


def test_shutting_down_brings_what_waits_to_its_end() -> None:
    lane, done = ThreadExecutor("test"), []
    for at in range(5):
        lane.submit(lambda at=at: done.append(at))  # type: ignore[misc]
    lane.shutdown(wait=True)
    assert done == list(range(5))


def test_shutting_down_may_drop_what_has_not_begun() -> None:
    lane, gate, begun = ThreadExecutor("test"), threading.Event(), threading.Event()
    first = lane.submit(lambda: (begun.set(), gate.wait(PATIENCE_S)))
    second = lane.submit(lambda: 2)
    assert begun.wait(PATIENCE_S)
    lane.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        second.result(PATIENCE_S)
    gate.set()
    assert first.result(PATIENCE_S)[1] is True


def test_work_that_has_ended_is_not_kept(lane: ThreadExecutor) -> None:
    class Snapshot:
        """Stands for memory that must be free again."""

    snapshot = Snapshot()
    gone = weakref.ref(snapshot)
    lane.submit(lambda held=snapshot: held and None).result(PATIENCE_S)  # type: ignore[misc]
    del snapshot
    lane.submit(lambda: None).result(PATIENCE_S)  # the lane has release what was before
    gc.collect()
    assert gone() is None


@pytest.mark.ci
def test_a_lane_at_work_does_not_keep_a_process_from_ending() -> None:
    program = (
        "import threading\n"
        "from megatron.core.dist_checkpointing.moe.snapshot.workers import ThreadExecutor\n"
        "begun = threading.Event()\n"
        "ThreadExecutor('stuck').submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S * 4, check=False).returncode == 0
