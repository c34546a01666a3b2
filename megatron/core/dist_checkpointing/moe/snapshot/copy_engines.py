"""Copy engines: move bytes from live tensors into host memory segments while training goes on.

There are two, with one interface: `ThreadEngine` copies CPU tensors with a thread of its own, `StreamEngine` copies
CUDA tensors with the device's copy engine on a stream of its own. Each serves one of two users, never both:

    snapshots        now(job)*, begin(jobs) after the optimizer's step ... wait() before the next one
    boundary logs    add(job) for each tensor that is sent ... wait() after the passes, or drop()

What both users rely on, and what all code below is arranged for:

- Live memory is only read. The caller promises that it does not change until `wait` has returned; the CUDA engine
  adds the waits between streams that make this promise hold for kernels that are launched but not run yet.
- After `wait` has returned or raised a copy's error nothing here refers to a segment. Stores refuse to seal a segment
  that is still referred to, so even the frames of a kept traceback would matter.
- The engines never outlive their owner: threads are daemons, and end when their engine is collected.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import torch

from ..errors import UsageError

log = logging.getLogger(__name__)

_POLL_S = 0.0005
_TICK_S = 1e-6  # no copy is faster than the clock can tell
_TRIAL_S = 60.0


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


CopyJob: TypeAlias = tuple[Sequence[Span], memoryview]
"""Spans, and the segment that they go to."""


class CopyEngine(Protocol):
    """Copies spans of live memory, one round at a time; all calls come from the thread that trains.

    A round is what is copied between two `wait`s. The sequence of calls is told at the top of this file.
    """

    def now(self, job: CopyJob) -> None:
        """Copy what whatever this thread launches next may change; `begin` follows."""

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        """Begin to copy; the sources stay as they are until `wait`. Raises UsageError while a round is under way."""

    def add(self, job: CopyJob) -> None:
        """Copy beside training what the work launched so far makes; the round ends with `wait`.

        The sources are kept alive, and must not change, until they are copied; their owner may give them up at once.
        """

    def wait(self, timeout_s: float) -> None:
        """Return when all of the round is copied; the engine then refers to none of its segments.

        Raises:
            TimeoutError: The round is still under way; `wait` may be called again.
            Exception: What a copy raised; the round has ended.
        """

    def drop(self) -> None:
        """Copy no more of what was added. What cannot be stopped goes on, and the next `wait` waits for it."""

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """How fast the last round was, from its `begin` to its last byte; None before any bytes were copied."""

    def trial(self, spans: Sequence[Span]) -> float:
        """Bytes per second of a copy of these spans to scratch memory; no round may be under way."""

    def release(self) -> None:
        """Let go of all segments, some of which are about to be unmapped; no round may be under way."""

    def close(self) -> None:
        """End the use of the engine."""


class _CopyRound:
    """What the copy thread does for one round. The training thread appends jobs, the copy thread takes them."""

    def __init__(self, jobs: Iterable[CopyJob] = (), *, is_closed: bool = False) -> None:
        # `append`, `popleft` and `clear` of a deque are atomic: no lock is needed between the two threads.
        self.begun_s, self.ended_s = time.perf_counter(), 0.0
        self.jobs: deque[CopyJob] = deque(jobs)
        self.total_bytes = sum(span.nbytes for spans, _ in self.jobs for span in spans)
        self.copied_bytes = 0
        self.is_closed = is_closed  # whether no more jobs come
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Copy all jobs that are there; afterwards neither this object nor its error refers to their segments."""
        # Read before the jobs are taken: of a round that is closed by then, no job can be missed.
        is_closed = self.is_closed
        while (job := self._next()) is not None:
            self._copy(*job)
        # The loop has ended with no job in hand: whoever is woken here may unmap the segments.
        if is_closed:
            self.ended_s = time.perf_counter()
            self.done.set()

    def _next(self) -> CopyJob | None:
        try:
            return self.jobs.popleft()
        except IndexError:  # none is left, or `drop` has just cleared them
            return None

    def _copy(self, spans: Sequence[Span], segment: memoryview) -> None:
        if self.error is not None:
            return
        try:
            target = np.frombuffer(segment, np.uint8)
            for span in spans:
                # copyto releases the GIL, and is memcpy, which writes past the cache where torch writes through it.
                np.copyto(target[span.offset : span.offset + span.nbytes], span.array)
                self.copied_bytes += span.nbytes
        except BaseException as error:
            # Frames of the traceback would keep the segment alive as long as somebody keeps the error.
            error.add_note(traceback.format_exc())
            self.error = error.with_traceback(None)


class ThreadEngine:
    """The `CopyEngine` of CPU tensors: one thread, which sleeps while there is nothing to copy."""

    def __init__(self, name: str = "snapshot-copy") -> None:
        self._name = name
        self._rounds: queue.SimpleQueue[_CopyRound | None] = queue.SimpleQueue()
        self._current: _CopyRound | None = None
        self._bandwidth: float | None = None
        # The thread gets the queue, not the engine, so that the engine can be collected, which ends the thread.
        threading.Thread(target=_serve, args=(self._rounds,), name=name, daemon=True).start()
        self._end = weakref.finalize(self, self._rounds.put, None)

    def now(self, job: CopyJob) -> None:
        """As `CopyEngine.now`: on this thread."""
        if job[0]:
            done = _CopyRound([job])
            done.run()
            if done.error is not None:
                raise done.error

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        """As `CopyEngine.begin`."""
        _require_none(self._current)
        # Closed from the start: it ends with its last byte, not with the `wait` that may come much later.
        self._current = _CopyRound((job for job in jobs if job[0]), is_closed=True)
        self._rounds.put(self._current)

    def add(self, job: CopyJob) -> None:
        """As `CopyEngine.add`."""
        if self._current is None:
            self._current = _CopyRound()
        self._current.total_bytes += sum(span.nbytes for span in job[0])
        self._current.jobs.append(job)
        self._rounds.put(self._current)

    def wait(self, timeout_s: float) -> None:
        """As `CopyEngine.wait`."""
        current = self._current
        if current is None:
            return
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
            self._bandwidth = current.copied_bytes / max(current.ended_s - current.begun_s, _TICK_S)

    def drop(self) -> None:
        """As `CopyEngine.drop`: a span that is being copied is copied to its end, and nobody waits for it."""
        if self._current is not None:
            self._current.jobs.clear()
            self._current = None

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """As `CopyEngine.bandwidth_bytes_per_s`."""
        return self._bandwidth

    def trial(self, spans: Sequence[Span]) -> float:
        """As `CopyEngine.trial`."""
        segment = memoryview(bytearray(_end_of(spans)))
        before = self._bandwidth
        for _ in range(2):  # the first copy also touches the pages for the first time
            self.begin([(spans, segment)])
            self.wait(_TRIAL_S)
        self._bandwidth, found = before, self._bandwidth
        return found or 0.0

    def release(self) -> None:
        """As `CopyEngine.release`: between rounds the thread has none."""

    def close(self) -> None:
        """As `CopyEngine.close`."""
        self._end()


def _serve(rounds: queue.SimpleQueue[_CopyRound | None]) -> None:
    while (current := rounds.get()) is not None:
        current.run()
        del current  # while it waits for the next, this thread keeps nothing alive


def _end_of(spans: Sequence[Span]) -> int:
    return max((span.offset + span.nbytes for span in spans), default=0)


def _require_none(current: object) -> None:
    if current is not None:
        raise UsageError("a round of copies is under way: wait for it before the next begins")


class StreamEngine:
    """The `CopyEngine` of CUDA tensors: a stream beside training's, and segments that the device writes to directly.

    Three streams take part. *Training's* is the current stream of the caller. The *copy stream* runs what `begin` is
    given; its two events mark begin and end of every round. The *send stream* runs what `add` is given; it is apart
    from the copy stream so that each tensor waits for the work before its own `add` only.

    The device writes to a segment directly (DMA) only where its pages are locked, which happens once for each segment
    when it is first seen. Where the driver refuses that, copies go through its own staging buffers and stall training;
    this is logged once.
    """

    def __init__(self) -> None:
        self._copy_stream, self._send_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self._begun, self._copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._bytes, self._bandwidth = 0, None
        self._locked_bytes: dict[int, int] = {}  # by the address of a segment, how much of it is page-locked
        self._refused = False
        self._end = weakref.finalize(self, _unlock, self._locked_bytes)
        self._end.atexit = False  # the process ends, and CUDA with it
        # Segments must stay mapped while the device writes to them: these lists keep them referred to.
        self._current: list[memoryview] | None = None
        self._before: list[memoryview] = []
        self._has_added = False

    def now(self, job: CopyJob) -> None:
        """As `CopyEngine.now`: on the caller's current stream, so that what it launches next runs after the copy."""
        if job[0]:
            self._launch(job)
            self._before.append(job[1])

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        """As `CopyEngine.begin`."""
        _require_none(self._current)
        # First, the copies must see what the current stream was given so far (the optimizer's step). Second, this
        # puts what `now` launched there before the event `copied` below: to wait for that one is to wait for all.
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        self._current, self._before = self._before + [segment for _, segment in jobs], []
        self._bytes = sum(span.nbytes for spans, _ in jobs for span in spans)
        with torch.cuda.stream(self._copy_stream):
            self._begun.record()
            for job in jobs:
                if job[0]:
                    self._launch(job)
            self._copied.record()
        # No stream waits for the copies: the host does, in `wait`, before it launches what changes the sources.

    def add(self, job: CopyJob) -> None:
        """As `CopyEngine.add`."""
        # The kernels that make these tensors are launched but need not have run.
        self._send_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._send_stream):
            self.now(job)
        for span in job[0]:
            # The caller gives the tensor up at once. Without this the allocator would hand its memory to the next
            # kernel of training's stream, which does not wait for the send stream.
            span.source.record_stream(self._send_stream)
        self._has_added = True

    def wait(self, timeout_s: float) -> None:
        """As `CopyEngine.wait`."""
        self.drop()
        if self._current is None:
            return
        deadline = time.monotonic() + timeout_s
        # Polled, not synchronized: that could not end in time, and would hold the GIL's other users up.
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for the device to copy to {len(self._current)} segments")
            time.sleep(_POLL_S)
        self._current = None
        if self._bytes:
            self._bandwidth = self._bytes / max(self._begun.elapsed_time(self._copied) / 1000, _TICK_S)

    def drop(self) -> None:
        """As `CopyEngine.drop`: what the device was given cannot be taken back."""
        if self._has_added:
            self._has_added = False
            with torch.cuda.stream(self._send_stream):
                self.begin([])  # makes the copy stream wait for the send stream, and marks the end of all it was given

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """As `CopyEngine.bandwidth_bytes_per_s`."""
        return self._bandwidth

    def trial(self, spans: Sequence[Span]) -> float:
        """As `CopyEngine.trial`: into memory that is page-locked, as segments are; the host waits for it."""
        _require_none(self._current)
        target = torch.empty(_end_of(spans), dtype=torch.uint8, pin_memory=True)
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream), torch.no_grad():
            self._begun.record()
            for span in spans:
                target[span.offset : span.offset + span.nbytes].copy_(span.source, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        nbytes = sum(span.nbytes for span in spans)
        return float(nbytes / max(self._begun.elapsed_time(self._copied) / 1000, _TICK_S))

    def release(self) -> None:
        """As `CopyEngine.release`: segments that are used again are page-locked again."""
        _require_none(self._current)
        # Copies of both kinds, `now`'s among them, must have ended before the lock goes under their feet.
        self._copy_stream.synchronize()
        torch.cuda.current_stream().synchronize()
        _unlock(self._locked_bytes)

    def close(self) -> None:
        """As `CopyEngine.close`; what was page-locked is so no longer."""
        self._copy_stream.synchronize()
        self._end()

    def _launch(self, job: CopyJob) -> None:
        """Queue the copies of a job on the current stream; the host does not wait where the segment is page-locked."""
        spans, segment = job
        target = torch.frombuffer(segment, dtype=torch.uint8)
        self._lock(target)
        with torch.no_grad():
            for span in spans:
                target[span.offset : span.offset + span.nbytes].copy_(span.source, non_blocking=True)

    def _lock(self, target: torch.Tensor) -> None:
        """Make a segment page-locked as far as this target goes, unless it is."""
        address, nbytes, cudart = target.data_ptr(), target.numel(), torch.cuda.cudart()
        known_bytes = self._locked_bytes.get(address, 0)
        if self._refused or nbytes <= known_bytes:
            return
        if known_bytes:
            # CUDA knows ranges by their address: a longer one takes the place of the shorter, once that is idle.
            self._copy_stream.synchronize()
            torch.cuda.current_stream().synchronize()
            cudart.cudaHostUnregister(address)
        code = int(cudart.cudaHostRegister(address, nbytes, 0))
        if code:
            self._refused = True
            # CUDA keeps the error, and the next launch of whatever kernel reports it: let that be a launch of ours.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
            log.warning(
                "cannot page-lock %d bytes of the memory tier (CUDA error %d): copies are slower and stall training;"
                " raise the limit of locked memory (ulimit -l)",
                nbytes,
                code,
            )
        else:
            self._locked_bytes[address] = nbytes


def _unlock(locked_bytes: dict[int, int]) -> None:
    for address in locked_bytes:
        torch.cuda.cudart().cudaHostUnregister(address)
    locked_bytes.clear()
