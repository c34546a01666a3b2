"""Copies begin while a pipeline stage waits for another one, and never hold it up; on a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.extensions.bubbles import pipeline_waits
from megatron.core.dist_checkpointing.moe.extensions.bubbles.copy_placement import CopyPlacement, estimated_wait_share
from megatron.core.dist_checkpointing.moe.extensions.bubbles.pipeline_waits import (
    BubblePace,
    BubbleSends,
    DevicePipelineWaits,
    PipelineWaits,
)
from megatron.core.dist_checkpointing.moe.extensions.bubbles.schedules import schedule_1f1b
from megatron.core.dist_checkpointing.moe.local_recovery.communicator import BoundaryCommunicator
from megatron.core.dist_checkpointing.moe.snapshot.copy_engines import Span, ThreadEngine
from megatron.core.dist_checkpointing.moe.types import Topology
from megatron.core.dist_checkpointing.moe.types.snapshots import WaitReport
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

RATE = 1000.0  # bytes per second


class Passes:
    """One iteration of a stage on a clock that only this object moves: when it waits, and a copy beside it.

    `sleep` of the waits, which the copy calls, moves the clock to the next edge of a wait or to the end of the sleep.
    """

    def __init__(self, intervals: Sequence[tuple[float, float]], span_s: float) -> None:
        self.now_s, self.intervals, self.span_s = 0.0, intervals, span_s
        self.waits = PipelineWaits(clock=lambda: self.now_s)
        self.in_waits = self.beside = 0

    def profile(self) -> None:
        """The iteration before, in which nothing is copied."""
        self.waits.begin()
        for start_s, end_s in self.intervals:
            self.now_s = start_s
            with self.waits.waiting():
                self.now_s = end_s
        self.now_s = self.span_s
        self.waits.end()
        self.now_s = 0.0

    def copy(self, pace: Any, nbytes: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copy in chunks at RATE while the stage waits and computes in turn."""
        cls = type(self.waits)
        monkeypatch.setattr(cls, "is_open", property(lambda _: self.is_waiting()))
        monkeypatch.setattr(cls, "sleep", lambda _, timeout_s, awake: self.sleep(timeout_s))
        for _ in range(nbytes // chunk):
            pace.take(chunk)
            if self.is_waiting():
                self.in_waits += chunk
            else:
                self.beside += chunk
            self.now_s += chunk / RATE
            pace.moved(chunk)

    def is_waiting(self) -> bool:
        return any(start_s <= self.now_s < end_s for start_s, end_s in self.intervals)

    def sleep(self, timeout_s: float) -> None:
        starts = [start_s for start_s, _ in self.intervals if start_s > self.now_s]
        self.now_s = min([self.now_s + timeout_s, *starts])


class Evenly:
    """The pace of `spread`, on the same clock."""

    def __init__(self, passes: Passes, nbytes: int, span_s: float) -> None:
        self._passes, self._per_byte_s, self._begun = passes, span_s / nbytes, 0

    def take(self, nbytes: int) -> None:
        self._passes.now_s = max(self._passes.now_s, self._begun * self._per_byte_s)
        self._begun += nbytes

    def moved(self, nbytes: int) -> None:
        """Nothing to note."""


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("nbytes", [400, 1500])
def test_more_of_a_copy_begins_in_waits_than_where_it_is_spread(
    stage: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = schedule_1f1b(4, 4, 0.25, 0.5).waits(stage)
    found = {}
    for name in ("bubbles", "spread"):
        passes = Passes(waits.intervals, waits.span_s)
        passes.profile()
        assert passes.waits.newest == waits
        placement = CopyPlacement.of(nbytes, passes.waits.newest, 0.8 * waits.span_s, RATE)
        span_s = 0.8 * waits.span_s
        pace = BubblePace(placement, passes.waits) if name == "bubbles" else Evenly(passes, nbytes, span_s)
        with monkeypatch.context() as patched:
            passes.copy(pace, nbytes, 10, patched)
        assert passes.now_s <= waits.span_s
        found[name] = passes.in_waits
    assert found["bubbles"] > found["spread"]
    # Of few bytes all; of many, all that the waits within the copy's time can carry, but for a chunk at each edge.
    inside_s = sum(max(0.0, min(end_s, 0.8 * waits.span_s) - start_s) for start_s, end_s in waits.intervals)
    assert found["bubbles"] >= min(nbytes, RATE * inside_s) - 10 * len(waits.intervals)


def test_what_waits_have_no_time_for_goes_beside_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes([(0.2, 0.3)], 1.0)
    passes.profile()
    placement = CopyPlacement.of(500, passes.waits.newest, 0.8, RATE)
    passes.copy(BubblePace(placement, passes.waits), 500, 10, monkeypatch)
    assert (passes.in_waits, passes.beside) == (100, 400)
    assert passes.waits.take_report().copied_bytes == 100


def test_a_copy_sleeps_until_the_stage_waits_and_the_stage_is_not_held_up_by_it() -> None:
    waits = PipelineWaits()
    pace = BubblePace(CopyPlacement(8, 8, 1000.0, 1.0), waits)
    engine, source = ThreadEngine(), torch.arange(8, dtype=torch.uint8)
    target = memoryview(bytearray(8))
    engine.begin([([Span(source, 0)], target)], pace)
    time.sleep(0.05)
    assert bytes(target) == bytes(8), "no wait, and nothing is due for 992 s"
    waits.begin()
    with waits.waiting():
        until_s = time.monotonic() + 10
        while bytes(target) != bytes(range(8)) and time.monotonic() < until_s:
            time.sleep(0.001)
    waits.end()
    assert bytes(target) == bytes(range(8))
    engine.wait(10)
    report = waits.take_report()
    assert report.copied_bytes == 8
    assert 0 < report.waited_s <= report.passes_s


def test_whoever_waits_for_the_end_of_a_copy_does_not_wait_for_bubbles() -> None:
    engine, waits = ThreadEngine(), PipelineWaits()
    target = memoryview(bytearray(8))
    pace = BubblePace(CopyPlacement(8, 8, 1e6, 1.0), waits)
    engine.begin([([Span(torch.ones(8, dtype=torch.uint8), 0)], target)], pace)
    engine.wait(10)
    assert bytes(target) == bytes([1] * 8)
    assert waits.take_report().copied_bytes == 0


def test_a_chunk_that_ends_after_its_wait_is_told_of_and_chunks_are_small() -> None:
    now = [0.0]
    waits = PipelineWaits(clock=lambda: now[0])
    pace = BubblePace(CopyPlacement(8, 8, 1000.0, 1.0), waits)
    with waits.waiting():
        pace.take(8)
        now[0] = 1.0
    now[0] = 1.25
    pace.moved(8)
    assert waits.take_report().overrun_s == 0.25
    assert waits.take_report() == WaitReport()
    assert pace.chunk_bytes == pipeline_waits.CHUNK_BYTES <= 1 << 20


def test_sends_wait_for_bubbles_once_it_is_known_how_fast_they_go() -> None:
    now = [0.0]
    waits = PipelineWaits(clock=lambda: now[0])
    sends = BubbleSends(waits)
    first = sends.begin(100)
    assert first.take(100) == 0.0, "nothing is known yet"
    now[0] = 0.1
    first.moved(100)
    assert sends.moving_s == pytest.approx(0.1)
    waits.begin()
    with waits.waiting():
        now[0] = 1.1
    waits.end()
    second = sends.begin(100)
    with waits.waiting():
        second.take(100)
        second.moved(100)
    assert waits.take_report().sent_bytes == 100


def test_numbers_of_all_ranks_come_to_the_means_of_stages() -> None:
    topology = Topology(4, pp=2)
    reports = [WaitReport(0.1 * rank, 0.2, 1.0, 10 * rank, rank, 0.001) for rank in range(4)]
    rows = [report.to_numbers(topology, rank) for rank, report in enumerate(reports)]
    stages = WaitReport.of_stages([sum(column) for column in zip(*rows, strict=True)], topology)
    assert [stage.waited_s for stage in stages] == pytest.approx([0.05, 0.25])
    assert [stage.copied_bytes for stage in stages] == [5, 25]
    assert WaitReport.of_stages((), topology) == ()


def test_the_estimate_follows_what_the_stage_computed() -> None:
    now = [0.0]
    waits = PipelineWaits(estimated_wait_share(0, 2, 4, 1), clock=lambda: now[0])
    waits.begin()
    now[0] = 3.0
    with waits.waiting():
        now[0] = 4.0
    now[0] = 7.0
    waits.end()
    report = waits.take_report()
    assert (report.waited_s, report.passes_s) == (1.0, 7.0)
    assert report.estimated_s == pytest.approx(6.0 / 4)  # one microbatch's passes of four, of 6 s


@pytest.mark.parametrize("wait_on_reqs", [True, False])
def test_the_communicator_tells_of_each_wait_for_another_stage(
    wait_on_reqs: bool, single_process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    waits = PipelineWaits()

    class Request:
        def wait(self) -> None:
            seen.append(waits.is_open)

    def asked(_: Any, **options: Any) -> Any:
        request = Request()
        if options["wait_on_reqs"]:
            request.wait()
        return torch.ones(2), None, {"recv_prev": request}

    monkeypatch.setattr(P2PCommunicator, "_communicate", asked)
    config = {"use_ring_exchange_p2p": False, "virtual_pipeline_model_parallel_size": None, "timers": None}
    communicator = BoundaryCommunicator(torch.distributed.group.WORLD, SimpleNamespace(**config))  # type: ignore[arg-type]
    communicator.waits = waits
    if wait_on_reqs:
        communicator.recv_forward((2,), False)
    else:
        _, handles = communicator.send_forward_recv_forward(None, True, (2,), overlap_p2p_comm=True)
        assert not seen
        handles["recv_prev"].wait()
    assert seen == [True]
    assert not waits.is_open


class Mark:
    """An event of a device whose time the test moves."""

    def __init__(self, device: list[float], at_s: float) -> None:
        self._device, self.at_s = device, at_s

    def query(self) -> bool:
        return self._device[0] >= self.at_s

    def elapsed_time(self, other: Mark) -> float:
        assert self.query() and other.query(), "both events must be completed"
        return 1000 * (other.at_s - self.at_s)


def test_on_a_device_a_wait_is_under_way_when_its_stream_has_come_to_it_not_when_the_host_has() -> None:
    device, times = [0.0], iter([0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0])
    waits = DevicePipelineWaits(0.5, event=lambda: Mark(device, next(times)))  # type: ignore[arg-type, return-value]
    waits.begin()
    for _ in range(2):
        with waits.waiting():
            pass
    waits.end()
    found = []
    for now_s in (0.5, 1.2, 1.7, 2.5, 3.5):
        device[0] = now_s
        found.append(waits.is_open)
    assert found == [False, True, False, True, False]
    assert waits.take_report().passes_s == 0.0, "the device has not come to the end"
    with waits.waiting():
        pass  # in an evaluation, to which the device comes later
    device[0] = 4.0
    report = waits.take_report()
    assert (report.waited_s, report.estimated_s, report.passes_s) == (1.5, 0.5 * 2.5, 4.0)
