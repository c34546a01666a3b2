"""What protects training copies the bytes of its moment on a device that runs everything late, in whatever order.

Each wait that is taken out of the code is missed by some schedule: the sentences below say which bytes are wrong then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_training import LOGS, TRAINING, Findings, Training, trained

from megatron.core.dist_checkpointing.moe.device import Arriving
from megatron.core.dist_checkpointing.moe.in_place import process_restart
from megatron.core.dist_checkpointing.moe.local_recovery.step_guard import LiveBuffers
from megatron.core.dist_checkpointing.moe.snapshot import workers
from megatron.core.dist_checkpointing.moe.snapshot.page_locks import PageLocks
from megatron.core.dist_checkpointing.moe.snapshot.stream_engine import StreamEngine
from megatron.pretrain.testing.async_device import SCHEDULES
from megatron.pretrain.testing.async_device.streams import Stream

SEEDS = 20


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_byte_is_wrong_and_nobody_holds_up_training(schedule: str) -> None:
    assert trained(schedule, 1).all == []


@pytest.mark.ci
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_many_seeds_none_finds_a_wrong_byte(schedule: str) -> None:
    assert {seed: found for seed in range(2, 2 + SEEDS) if (found := trained(schedule, seed).all)} == {}


def test_locked_ahead_again_after_a_resize_logs_hold_up_nobody() -> None:
    def resize(training: Training, number: int) -> None:
        if number == 2:
            training.resize_logs()

    assert trained("random", 1, between=resize).all == []


Mutate = Callable[[pytest.MonkeyPatch], None]


def without(owner: type, name: str) -> Mutate:
    """The call does nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: None)


def memory_not_kept(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, job: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "record_stream", lambda *_: None)
            added(self, job)

    added = StreamEngine.add
    patch.setattr(StreamEngine, "add", add)


def wait_for_the_launching_thread_only(patch: pytest.MonkeyPatch) -> None:
    def wait(self: Any, timeout_s: float) -> None:
        self.drop()
        launching, self._launching = self._launching, None
        if launching is not None:
            launching.pace.hurry()
            launching.done.wait(timeout_s)
        self._current = None

    patch.setattr(StreamEngine, "wait", wait)


def wait_for_the_event_only(patch: pytest.MonkeyPatch) -> None:
    def launch_late(self: Any, launching: Any, jobs: Any, device: int) -> None:
        time.sleep(0.2)
        launch(self, launching, jobs, device)

    def begin(self: Any, jobs: Any, pace: Any = None) -> None:
        begun(self, jobs, pace)
        self._launching.done = threading.Event()
        self._launching.done.set()

    launch, begun = StreamEngine._run_beside, StreamEngine.begin
    patch.setattr(StreamEngine, "_run_beside", launch_late)
    patch.setattr(StreamEngine, "begin", begin)


def logs_end_without_their_stream(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Any) -> None:
        if self._has_added:
            self._has_added = False
            self.begin([])

    patch.setattr(StreamEngine, "drop", drop)


def buffers_on_the_copy_stream(patch: pytest.MonkeyPatch) -> None:
    def now(self: Any, job: Any) -> None:
        current = torch.cuda.current_stream()
        is_training = current is torch.cuda.default_stream()
        with torch.cuda.stream(self._copy_stream if is_training else current):
            copied(self, job)

    copied = StreamEngine.now
    patch.setattr(StreamEngine, "now", now)


def counts_read_at_once(patch: pytest.MonkeyPatch) -> None:
    def call(self: Any) -> Any:
        self._arrived = None
        return asked(self)

    asked = Arriving.wait
    patch.setattr(Arriving, "wait", call)


def buffers_not_cloned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveBuffers, "copy", lambda self: tuple(state.tensor for state in self._buffers))


WRONG_BYTES: dict[str, tuple[Mutate, str]] = {
    "snapshots do not wait for the step": (without(Stream, "wait_event"), "lazy"),
    "logs do not wait for what makes the tensor": (without(Stream, "wait_stream"), "starve-training"),
    "memory of what was sent is not kept": (memory_not_kept, "starve-copies"),
    "the end of copies is not waited for": (wait_for_the_launching_thread_only, "starve-copies"),
    "the launching thread is not waited for": (wait_for_the_event_only, "eager"),
    "the end of a log does not wait for its stream": (logs_end_without_their_stream, "starve-copies"),
    "buffers are copied on the copy stream": (buffers_on_the_copy_stream, "lazy"),
    "counts are read before they came": (counts_read_at_once, "starve-training"),
    "parked buffers are not cloned": (buffers_not_cloned, "eager"),
}
"""What is taken out, and the schedule that is the first to see it."""


def seen(first: str) -> Findings:
    """What the first schedule and seed find that find something."""
    found = Findings()
    for schedule in (first, *SCHEDULES):
        for seed in range(1, 4):
            found = trained(schedule, seed, iterations=3)
            if found.all:
                return found
    return found


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_a_wait_that_is_missing_is_seen_in_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, schedule = WRONG_BYTES[name]
    mutate(monkeypatch)
    found = seen(schedule)
    assert found.problems


def plain_thread(run: Callable[[], object], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (workers, ("cudaEventQuery", "moe-ckpt-control")),
        (process_restart, ("cudaDeviceSynchronize", "moe-ckpt-device")),
    ],
    ids=["lane", "device check"],
)
def test_a_thread_without_a_device_is_seen_on_that_of_another_rank(
    module: Any, call: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "device_thread", plain_thread)
    assert seen("lazy").elsewhere == {call}


def test_page_locks_that_are_lost_at_a_resize_are_seen_as_copies_that_hold_up_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resize(training: Training, number: int) -> None:
        if number == 2:
            monkeypatch.setattr(PageLocks, "begin", lambda *_: None)
            monkeypatch.setattr(PageLocks, "lock", lambda *_: None)
            training.resize_logs()

    found = trained("random", 1, between=resize)
    assert found.problems == []
    assert sum(one.nbytes for one in found.blocking if one.thread == TRAINING) > LOGS.nbytes


def test_counts_that_training_reads_itself_are_seen_as_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(tensor: torch.Tensor) -> Any:
        found = tensor.cpu()  # what an iteration would cost if its thread read the numbers itself
        return SimpleNamespace(wait=lambda: found)

    monkeypatch.setattr("device_training.Arriving", counts)
    found = trained("lazy", 1)
    assert found.problems == []
    assert found.waited
