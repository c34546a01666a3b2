"""Copy engines: move bytes from live tensors into host memory segments while training continues.

There are two, with one interface: `ThreadEngine` copies CPU tensors with a thread of its own, `StreamEngine` (in
`stream_engine.py`) copies CUDA tensors on streams of its own. Each serves one of two users, never both:

    snapshots        now(job)*, begin(jobs, pace) after the optimizer's step ... wait() before the next one
    boundary logs    add(job) for each tensor that is sent ... wait() after the passes, or drop()

What both users rely on, and what all code below is arranged for:

- The caller promises that live memory does not change until `wait` has returned. On CUDA that speaks of what the host
  has launched: kernels that are launched but have not run yet are waited for by streams, not by the host.
- After `wait` has returned or raised a copy's error nothing here refers to a segment. Stores refuse to seal a segment
  that is still referred to, so even the frames of a kept traceback would matter.
- The engines never outlive their owner: threads are daemons, and end when their engine is collected.
"""

from __future__ import annotations

import abc
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..errors import UsageError
from ..ports import Pace
from ..storage.system import LOCK_BYTES

# Copies in chunks, one after the other at a given rate: so that training's own transfers never wait for long.
#
# A transfer that has begun is not interrupted. On a GPU the token counts of each MoE layer come to the host through the
# same copy engine as snapshots do, and the host waits for them; gradients and tokens for other nodes cross the same
# bus. Both copy engines cut what they copy by `chunked` and launch it as a `ports.Pace` lets them: `Throttle`, or the
# one of `BubblePace`.

CHUNK_BYTES = 8 << 20
"""About 0.2 ms of a bus that carries 50 GB/s."""


@dataclass(frozen=True, eq=False)
class Span:
    """Live memory that is copied in one piece: `source`, flat uint8, goes to `offset` bytes after a segment's start."""

    source: torch.Tensor
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return int(self.source.numel())

    @cached_property
    def array(self) -> np.ndarray:
        """The source as an array; of CPU tensors only."""
        array: np.ndarray = self.source.numpy()
        return array


type CopyJob = tuple[Sequence[Span], memoryview]
"""Spans, and the segment that they go to."""


def chunked(
    spans: Sequence[Span], chunk_bytes: int = CHUNK_BYTES, lock_bytes: int = LOCK_BYTES
) -> Iterator[tuple[Span, int, int]]:
    """Spans in pieces, in order.

    Args:
        spans: Live memory, and where it goes in a segment.
        chunk_bytes: The most that a piece has.
        lock_bytes: No piece goes over a multiple of this in the segment.

    Yields:
        For each piece the span, and its first byte and the one past its last within the span.
    """
    for span in spans:
        start = 0
        while start < span.nbytes:
            to_border = lock_bytes - (span.offset + start) % lock_bytes
            end = min(start + min(chunk_bytes, to_border), span.nbytes)
            yield span, start, end
            start = end


def total_bytes(jobs: Sequence[CopyJob]) -> int:
    """Bytes of all spans of these jobs."""
    return sum(span.nbytes for spans, _ in jobs for span in spans)


class Throttle:
    """Holds chunks back until they are due at this rate; None: they are due at once.

    Args:
        bytes_per_s: The rate.
        free_bytes: So many come first, without a pause between them: how fast they go tells how fast the link is.
        clock: Tells the time in seconds.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(
        self, bytes_per_s: float | None, *, free_bytes: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._bytes_per_s, self.free_bytes, self._clock = bytes_per_s, free_bytes, clock
        self._begun_s, self._bytes = clock(), 0
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """Hold nothing back any more: somebody waits for the end. From any thread."""
        self._hurried.set()

    def take(self, nbytes: int) -> float:
        """Return when the next chunk, of so many bytes, may begin; the seconds that it was held back."""
        before, self._bytes = self._bytes, self._bytes + nbytes
        if self._bytes_per_s is None or before < self.free_bytes or self._hurried.is_set():
            return 0.0
        begun_s = self._clock()
        pause_s = self._begun_s + before / self._bytes_per_s - begun_s
        if pause_s <= 0:
            return 0.0
        self._hurried.wait(pause_s)
        return self._clock() - begun_s

    def moved(self, nbytes: int) -> None:
        """As `ports.Pace.moved`."""


TICK_S = 1e-6  # no copy is faster than the clock can tell
_TRIAL_S = 60.0


class CopyEngine(abc.ABC):
    """Copies spans of live memory, one round at a time; all calls come from the thread that trains.

    A round is what is copied between two `wait`s. The sequence of calls stands at the top of this file.
    """

    bandwidth_bytes_per_s: float | None = None
    """How fast the last round's copies were, pauses between them left out; None before any bytes were copied."""

    def prepare(self, segments: Sequence[memoryview]) -> None:  # noqa: B027, an engine need not do anything
        """These segments are going to be copied to: make them ready beside training."""

    @abc.abstractmethod
    def now(self, job: CopyJob) -> None:
        """Copy what whatever this thread launches next may change; `begin` follows."""

    @abc.abstractmethod
    def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
        """Begin to copy; the sources stay as they are until `wait`.

        Args:
            jobs: Spans of live memory, and the segments that they go to.
            pace: When chunks may begin, as long as nobody waits for the end; None: as fast as it goes.

        Raises:
            UsageError: A round is under way.
        """

    @abc.abstractmethod
    def add(self, job: CopyJob) -> None:
        """Copy beside training what the work launched so far makes; the round ends with `wait`.

        The sources are kept alive, and must not change, until they are copied; their owner may give them up at once.
        """

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Return when all of the round is copied; the engine then refers to none of its segments.

        Raises:
            TimeoutError: The round is still under way; `wait` may be called again.
            Exception: What a copy raised; the round has ended.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Copy no more of what was added. What cannot be stopped continues, and the next `wait` waits for it."""

    @abc.abstractmethod
    def trial(self, spans: Sequence[Span]) -> float:
        """Bytes per second of a copy of these spans to scratch memory; no round may be under way."""

    @abc.abstractmethod
    def release(self, segments: Sequence[memoryview]) -> None:
        """Forget segments that are about to be unmapped; no round may be under way."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the use of the engine."""


def extent_bytes(spans: Sequence[Span]) -> int:
    """Bytes of the smallest segment that spans fit into."""
    return max((span.offset + span.nbytes for span in spans), default=0)


def require_idle(current: object) -> None:
    """Raise UsageError where a round is under way."""
    if current is not None:
        raise UsageError("a round of copies is under way: wait for it before the next begins")


class _CopyRound:
    """What the copy thread does for one round. The training thread appends jobs, the copy thread takes them."""

    def __init__(self, jobs: Iterable[CopyJob] = (), *, is_closed: bool = False, pace: Pace | None = None) -> None:
        # `append`, `popleft` and `clear` of a deque are atomic: no lock is needed between the two threads.
        self.jobs: deque[CopyJob] = deque(jobs)
        self.total_bytes, self.copying_s = total_bytes([*self.jobs]), 0.0
        self.pace: Pace = pace or Throttle(None)
        self.copied_bytes = 0
        self.is_closed = is_closed  # whether no more jobs come
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Copy all jobs that are there; afterwards neither this object nor its error refers to their segments."""
        # Read before the jobs are taken: of a round that is closed by then, no job can be missed.
        is_closed = self.is_closed
        while self.jobs:
            self._copy_next()
        # No frame holds a job any more: whoever is woken here may unmap the segments.
        if is_closed:
            self.done.set()

    def _copy_next(self) -> None:
        try:
            spans, segment = self.jobs.popleft()
        except IndexError:  # `drop` has just cleared them
            return
        if self.error is not None:
            return
        try:
            target: np.ndarray = np.frombuffer(segment, np.uint8)
            for span, start, end in chunked(spans, self.pace.chunk_bytes):
                self.pace.take(end - start)
                begun_s = time.perf_counter()
                # copyto releases the GIL, and is memcpy, which writes past the cache where torch writes through it.
                np.copyto(target[span.offset + start : span.offset + end], span.array[start:end])
                self.copying_s += time.perf_counter() - begun_s
                self.copied_bytes += end - start
                self.pace.moved(end - start)
        except BaseException as error:
            # Frames of the traceback would keep the segment alive as long as somebody keeps the error.
            error.add_note(traceback.format_exc())
            self.error = error.with_traceback(None)


class ThreadEngine(CopyEngine):
    """The `CopyEngine` of CPU tensors: one thread, which sleeps while there is nothing to copy."""

    def __init__(self, name: str = "snapshot-copy") -> None:
        self._name = name
        self._rounds: queue.SimpleQueue[_CopyRound | None] = queue.SimpleQueue()
        self._current: _CopyRound | None = None
        # The thread gets the queue, not the engine, so that the engine can be collected, which ends the thread.
        threading.Thread(target=_serve, args=(self._rounds,), name=name, daemon=True).start()
        self._end = weakref.finalize(self, self._rounds.put, None)

    def now(self, job: CopyJob) -> None:
        if job[0]:
            done = _CopyRound([job])
            done.run()
            if done.error is not None:
                raise done.error

    def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
        """As `CopyEngine.begin`."""
        require_idle(self._current)
        # Closed from the start: it ends with its last byte, not with the `wait` that may come much later.
        self._current = _CopyRound((job for job in jobs if job[0]), is_closed=True, pace=pace)
        self._rounds.put(self._current)

    def add(self, job: CopyJob) -> None:
        if self._current is None:
            self._current = _CopyRound()
        for span in job[0]:
            self._current.total_bytes += span.nbytes
        self._current.jobs.append(job)
        self._rounds.put(self._current)

    def wait(self, timeout_s: float) -> None:
        current = self._current
        if current is None:
            return
        current.pace.hurry()
        if not current.is_closed:
            current.is_closed = True
            self._rounds.put(current)
        if not current.done.wait(timeout_s):
            raise TimeoutError(
                f"waited {timeout_s:g} s for the thread {self._name}, which has copied {current.copied_bytes} of"
                f" {current.total_bytes} bytes: the machine's memory or cores are overloaded"
            )
        self._current = None
        if current.error is not None:
            raise current.error
        if current.copied_bytes:
            self.bandwidth_bytes_per_s = current.copied_bytes / max(current.copying_s, TICK_S)

    def drop(self) -> None:
        # A job that the thread has taken is copied to its end; nobody waits for it.
        if self._current is not None:
            self._current.jobs.clear()
            self._current = None

    def trial(self, spans: Sequence[Span]) -> float:
        segment = memoryview(bytearray(extent_bytes(spans)))
        before = self.bandwidth_bytes_per_s
        for _ in range(2):  # the first copy also touches the pages for the first time
            self.begin([(spans, segment)])
            self.wait(_TRIAL_S)
        self.bandwidth_bytes_per_s, found = before, self.bandwidth_bytes_per_s
        return found or 0.0

    def release(self, segments: Sequence[memoryview]) -> None:
        pass  # between rounds the thread refers to no segment

    def close(self) -> None:
        self._end()


def _serve(rounds: queue.SimpleQueue[_CopyRound | None]) -> None:
    while (current := rounds.get()) is not None:
        current.run()
        del current  # while it waits for the next, this thread keeps nothing alive
