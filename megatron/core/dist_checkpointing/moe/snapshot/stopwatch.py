"""How long training's device stood still for checkpoints, and how long its passes took.

The host runs ahead of a GPU: while it waits for copies, the device may still have passes to compute, and what the host
waited says nothing of what training lost. So points of an iteration are marked with events on training's stream. Two
of them with nothing launched in between are as far apart as the device had nothing to do.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

import torch

from ..ports import Clock

_REMEMBERED = 16
_COLD, _ENOUGH = 1, 3


class HostStopwatch:
    """As `ports.Stopwatch`, where the host computes what it trains."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._resumed_s, self._paused_s = clock.now_s(), clock.now_s()
        self._lap_s: float | None = None

    def pause(self) -> None:
        """As `ports.Stopwatch.pause`."""
        self._paused_s = self._clock.now_s()
        self._lap_s = self._paused_s - self._resumed_s

    def resume(self) -> float:
        """As `ports.Stopwatch.resume`."""
        self._resumed_s = self._clock.now_s()
        return self._resumed_s - self._paused_s

    def lap_s(self) -> float | None:
        """As `ports.Stopwatch.lap_s`."""
        return self._lap_s


class CudaStopwatch:
    """As `ports.Stopwatch`, by events on the stream that is current when it is called; no call waits for passes."""

    def __init__(self) -> None:
        self._resumed, self._paused = _recorded(), _recorded()
        self._lap: tuple[Any, Any] | None = None

    def pause(self) -> None:
        """As `ports.Stopwatch.pause`."""
        self._paused = _recorded()
        self._lap = self._resumed, self._paused

    def resume(self) -> float:
        """As `ports.Stopwatch.resume`."""
        # Asked before the next event is recorded: where the device has not come to the pause yet, it had work to do
        # all the time, whatever the host waited for.
        stood_still = self._paused.query()
        self._resumed = _recorded()
        if not stood_still:
            return 0.0
        self._resumed.synchronize()  # at once: there is nothing before it on the stream
        return float(self._paused.elapsed_time(self._resumed)) / 1000

    def lap_s(self) -> float | None:
        """As `ports.Stopwatch.lap_s`."""
        if self._lap is None or not self._lap[1].query():
            return None
        return float(self._lap[0].elapsed_time(self._lap[1])) / 1000


def _recorded() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PassTimes:
    """What the newest passes took, and what copies cost them: the time by which those with copies take longer."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_REMEMBERED)
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        self._cold = _COLD + 1
        self.slowed_s: float | None = None

    @property
    def shortest_s(self) -> float | None:
        """Of the newest passes: the first ones of a start take long. None where none are known."""
        return min(self._newest, default=None)

    def noted(self, passes_s: float, *, copied: bool) -> None:
        """Take in the passes of an iteration.

        `slowed_s` is then how much longer those with copies take than the median without, None until `_ENOUGH` warm
        ones without are known. The first passes of a process build kernels and caches, and do not count.

        Args:
            passes_s: How long they took.
            copied: Whether a snapshot was copied meanwhile.
        """
        self._newest.append(passes_s)
        self._cold = max(0, self._cold - 1)
        if not copied:
            if not self._cold:
                self._alone.append(passes_s)
            return
        self.slowed_s = passes_s - median(self._alone) if len(self._alone) >= _ENOUGH else None
