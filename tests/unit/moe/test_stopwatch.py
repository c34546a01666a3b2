"""How long a GPU stood still is told by events on its stream, not by how long the host waited; a fake device here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from megatron.core.dist_checkpointing.moe.ports import Lap, Stopwatch
from megatron.core.dist_checkpointing.moe.snapshot.iteration_message import (
    CudaStopwatch,
    HostStopwatch,
    PassTimes,
)


@dataclass
class Device:
    """One stream that computes what it is given, behind a host with a clock of its own."""

    host_s: float = 0.0
    busy_until_s: float = 0.0
    waited: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.busy_until_s = max(self.host_s, self.busy_until_s) + seconds

    def now_s(self) -> float:
        return self.host_s

    def sleep(self, seconds: float) -> None:
        self.host_s += seconds


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = max(self.device.host_s, self.device.busy_until_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def synchronize(self) -> None:
        self.device.waited.append(max(0.0, self.at_s - self.device.host_s))
        self.device.host_s = max(self.device.host_s, self.at_s)

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "CUDA knows no time between events that are still to come"
        return (other.at_s - self.at_s) * 1000


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    return made


def iteration(
    device: Device, watch: Stopwatch, *, passes_s: float, launched_s: float, copies_s: float
) -> tuple[float, Lap]:
    """Launch passes, which takes the host this long, and wait for copies; the stall, and what tells of the passes."""
    device.launch(passes_s)
    device.sleep(launched_s)
    lap = watch.pause()
    device.sleep(copies_s)
    return watch.resume(), lap


def test_while_the_device_still_computes_passes_nothing_is_lost_by_waiting(device: Device) -> None:
    stall_s, lap = iteration(device, CudaStopwatch(), passes_s=5.0, launched_s=0.5, copies_s=3.0)
    assert stall_s == 0.0
    assert device.waited == [], "the host must not wait for passes"
    assert lap() is None
    device.sleep(2.0)
    assert lap() == pytest.approx(5.0)


def test_a_device_that_waits_for_copies_stands_still_from_the_end_of_its_passes(device: Device) -> None:
    stall_s, lap = iteration(device, CudaStopwatch(), passes_s=1.0, launched_s=0.2, copies_s=3.0)
    assert stall_s == pytest.approx(2.2)
    assert lap() == pytest.approx(1.0), "passes are known without the wait"
    assert device.waited == [0.0]


def test_laps_go_from_one_resume_to_the_next_pause(device: Device) -> None:
    watch = CudaStopwatch()
    for passes_s in (1.0, 2.0, 1.5):
        assert iteration(device, watch, passes_s=passes_s, launched_s=0.1, copies_s=4.0)[1]() == pytest.approx(passes_s)


def test_on_the_host_both_are_told_by_the_clock(device: Device) -> None:
    stall_s, lap = iteration(device, HostStopwatch(device), passes_s=0.0, launched_s=1.0, copies_s=0.25)
    assert (stall_s, lap()) == (0.25, 1.0)


def test_passes_of_a_loop_that_never_waits_for_its_device_are_told_late_and_each_as_it_was(device: Device) -> None:
    watch, times, told = CudaStopwatch(), PassTimes(), []
    for number in range(8):
        _, lap = iteration(device, watch, passes_s=1.0 + number, launched_s=0.1, copies_s=0.0)
        times.launched(lap, copied=number % 2 == 1)
        device.launch(0.5)  # the optimizer's step
        times.look()
        told.append(times.newest_s)
        watch.pause()
        watch.resume()
    assert told == [0.0] * 8, "the host is seconds ahead"
    device.sleep(10.0)
    times.look()
    assert times.newest_s == pytest.approx(3.0)
    device.sleep(100.0)
    times.look()
    assert times.newest_s == pytest.approx(8.0)
    assert times.slowed_s == pytest.approx(8.0 - 5.0), "against the third, fifth and seventh"
    assert device.waited == []


def test_what_copies_cost_the_passes_is_told_against_those_without() -> None:
    times = PassTimes()
    times.noted(30.0, copied=False)  # the first ones warm up
    times.noted(3.0, copied=True)
    assert times.slowed_s is None
    for passes_s in (1.0, 1.1):
        times.noted(passes_s, copied=False)
    times.noted(1.35, copied=True)
    assert times.slowed_s is None, "of two nobody knows which is usual"
    times.noted(9.0, copied=False)
    times.noted(1.35, copied=True)
    assert times.slowed_s == pytest.approx(0.25)
