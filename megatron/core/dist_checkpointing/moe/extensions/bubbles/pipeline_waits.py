"""When this rank's pipeline stage waits for another one, and the pace of copies that begin there (MOETION Alg. 4).

The communicator of the pipeline puts a block of `PipelineWaits.waiting` around each wait. Copy threads ask whether one
is under way, sleep until the next, and never hold training up: it opens and closes a wait without looking at them.
What was measured in the passes of one iteration is the profile by which those of the next are planned.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ...ports import Pace
from ...types import WaitReport
from .copy_placement import CopyPlacement
from .schedules import Bubbles

CHUNK_BYTES = 1 << 20
"""A chunk that began in a wait may end after it: by about 0.1 ms where memory carries 10 GB/s."""
_POLL_S = 0.0002


class PipelineWaits:
    """The waits of a stage whose process computes what it trains. `begin`, `waiting` and `end` are training's calls.

    Args:
        wait_share: What `copy_placement.estimated_wait_share` says; None where the schedule is not known.
        clock: Tells the time in seconds.
    """

    def __init__(self, wait_share: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self._wait_share = clock, wait_share
        self._changed = threading.Condition()
        self._is_open, self._closed_s = False, 0.0
        self._begun_s: float | None = None
        self._intervals: list[tuple[float, float]] = []
        self._report = WaitReport()
        self.newest: Bubbles | None = None

    def begin(self) -> None:
        """The passes of an iteration begin."""
        self._begun_s, self._intervals = self.clock(), []

    def end(self) -> None:
        """They are over, and gradients reduced; what was measured in them is `newest` from now on."""
        if self._begun_s is not None:
            self._profiled(self._intervals, self.clock() - self._begun_s)
        self._begun_s = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """As `ports.WaitObserver.waiting`."""
        begun_s = self.clock()
        with self._changed:
            self._is_open = True
            self._changed.notify_all()
        try:
            yield
        finally:
            # No lock: this thread continues training at once, whatever copy threads do.
            self._is_open, self._closed_s = False, self.clock()
            if self._begun_s is not None and self._closed_s > begun_s:
                self._intervals.append((begun_s - self._begun_s, self._closed_s - self._begun_s))

    @property
    def is_open(self) -> bool:
        """Whether the stage waits now; from any thread."""
        return self._is_open

    def sleep(self, timeout_s: float, awake: Callable[[], bool]) -> None:
        """Return when the stage waits, when `wake` is called, or after some time; at once if already awake.

        Args:
            timeout_s: The longest time in seconds.
            awake: Whether there is no need to sleep.
        """
        with self._changed:
            if not (self.is_open or awake()):
                self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Let all copy threads look again."""
        with self._changed:
            self._changed.notify_all()

    def overrun_s(self) -> float:
        """Seconds since the newest wait ended; 0 while one is under way."""
        return 0.0 if self.is_open else max(0.0, self.clock() - self._closed_s)

    def began(self, nbytes: int, overrun_s: float, *, is_sent: bool) -> None:
        """A chunk that began in a wait was moved; by the thread that moved it.

        Args:
            nbytes: Bytes of the chunk.
            overrun_s: Seconds by which it ended after the wait.
            is_sent: Whether it was sent to a peer, else copied.
        """
        with self._changed:
            report = self._report
            name = "sent_bytes" if is_sent else "copied_bytes"
            count = {name: getattr(report, name) + nbytes}
            self._report = replace(report, overrun_s=max(report.overrun_s, overrun_s), **count)

    def take_report(self) -> WaitReport:
        """Since the last call."""
        with self._changed:
            report = self._report
            self._report = replace(report, copied_bytes=0, sent_bytes=0, overrun_s=0.0)
        return report

    def _profiled(self, intervals: list[tuple[float, float]], span_s: float) -> None:
        if span_s <= 0:
            return
        self.newest = newest = Bubbles(tuple(intervals), span_s)
        share = self._wait_share
        with self._changed:
            self._report = replace(
                self._report,
                waited_s=newest.idle_s,
                estimated_s=(share or 0.0) * newest.busy_s,
                passes_s=span_s,
            )


class DevicePipelineWaits(PipelineWaits):
    """The waits of a stage on a GPU: of its stream, told by events before and after what the stream waits for.

    The host runs ahead, so that several waits may be on the stream. Copy threads ask for the oldest that is not over.
    """

    def __init__(self, wait_share: float | None = None, event: Callable[[], torch.cuda.Event] | None = None) -> None:
        super().__init__(wait_share)
        self._event = event or _recorded
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._first: torch.cuda.Event | None = None
        self._over = 0  # of the pairs, so many are known to be over

    def begin(self) -> None:
        self._measure()
        # `_over` before the pairs that it counts: a copy thread that has seen the new ones writes no count of the old.
        self._over, self._first, self._marks, self._pairs = 0, self._event(), None, []

    def end(self) -> None:
        if self._first is not None:
            self._marks = self._first, self._event()
        self._first = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        before = self._event()
        try:
            yield
        finally:
            if self._first is not None:  # in an evaluation after the passes there is no profile that it would be of
                self._pairs.append((before, self._event()))

    @property
    def is_open(self) -> bool:
        pairs, at = self._pairs, self._over
        while at < len(pairs) and pairs[at][1].query():
            at += 1
        if pairs is self._pairs:
            self._over = at
        return at < len(pairs) and bool(pairs[at][0].query())

    def sleep(self, timeout_s: float, awake: Callable[[], bool]) -> None:
        """As `PipelineWaits.sleep`; looks at the device's events every now and then, for they wake nobody."""
        with self._changed:
            if not (self.is_open or awake()):
                self._changed.wait(min(timeout_s, _POLL_S))

    def overrun_s(self) -> float:
        return 0.0

    def take_report(self) -> WaitReport:
        self._measure()
        return super().take_report()

    def _measure(self) -> None:
        """Profile the newest passes, if the device has come to their end."""
        if self._marks is None or not self._marks[1].query():
            return
        (first, last), self._marks = self._marks, None
        bounds = [(first.elapsed_time(one), first.elapsed_time(other)) for one, other in self._pairs]
        span_s = first.elapsed_time(last) / 1000
        self._profiled([(a / 1000, b / 1000) for a, b in bounds if a < b and b / 1000 <= span_s], span_s)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class BubblePace:
    """The `ports.Pace` of one copy: chunks begin in waits, and beside computation only when they are due."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, placement: CopyPlacement, waits: PipelineWaits, *, is_sent: bool = False) -> None:
        self._placement, self._waits, self._is_sent = placement, waits, is_sent
        self._begun_s, self._is_hurried, self._is_in_wait = waits.clock(), False, False
        self._in_waits = self._beside = self.free_bytes = 0

    def take(self, nbytes: int) -> float:
        """As `ports.Pace.take`."""
        waits, asked_s = self._waits, self._waits.clock()
        while True:
            self._is_in_wait = waits.is_open
            if self._is_in_wait:
                self._in_waits += nbytes
                break
            due_s = self._begun_s + self._placement.due_s(self._in_waits, self._beside)
            if self._is_hurried or self._in_waits + self._beside < self.free_bytes or due_s <= waits.clock():
                self._beside += nbytes
                break
            waits.sleep(due_s - waits.clock(), lambda: self._is_hurried)
        return waits.clock() - asked_s

    def moved(self, nbytes: int) -> None:
        """As `ports.Pace.moved`."""
        if self._is_in_wait:
            self._waits.began(nbytes, self._waits.overrun_s(), is_sent=self._is_sent)

    def hurry(self) -> None:
        """As `ports.Pace.hurry`."""
        self._is_hurried = True
        self._waits.wake()


class BubbleSends:
    """The `ports.SendPace` of what a rank sends to its peers."""

    SHARE = 0.4
    """Of the passes in which an exchange is to end: all ranks hear of it in the middle of an iteration."""

    def __init__(self, waits: PipelineWaits) -> None:
        self._waits = waits
        self._moved_bytes, self._moving_s, self.moving_s = 0, 0.0, 0.0

    def begin(self, total_bytes: int) -> Pace:
        """As `ports.SendPace.begin`; without a pause as long as nothing is known of passes and bandwidth."""
        newest, rate = self._waits.newest, self._moved_bytes / self._moving_s if self._moving_s else 0.0
        span_s = self.SHARE * newest.span_s if newest is not None and rate else 0.0
        return _MeasuredPace(CopyPlacement.of(total_bytes, newest, span_s, rate), self._waits, self)

    def noted(self, nbytes: int, moving_s: float) -> None:
        """A chunk was sent; older ones count less.

        Args:
            nbytes: Its bytes.
            moving_s: Seconds that it took.
        """
        self.moving_s += moving_s
        self._moved_bytes, self._moving_s = self._moved_bytes // 2 + nbytes, self._moving_s / 2 + moving_s


class _MeasuredPace(BubblePace):
    """Tells how fast chunks were sent."""

    def __init__(self, placement: CopyPlacement, waits: PipelineWaits, sends: BubbleSends) -> None:
        super().__init__(placement, waits, is_sent=True)
        self._sends, self._taken_s = sends, 0.0

    def take(self, nbytes: int) -> float:
        held_s = super().take(nbytes)
        self._taken_s = self._waits.clock()
        return held_s

    def moved(self, nbytes: int) -> None:
        super().moved(nbytes)
        self._sends.noted(nbytes, self._waits.clock() - self._taken_s)
