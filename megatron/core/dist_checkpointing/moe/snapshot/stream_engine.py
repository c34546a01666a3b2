"""The copy engine of CUDA tensors: streams, events, and a thread that launches copies in chunks.

Three streams take part, and this is who waits for whom:

    training's stream   the current stream of whoever calls; runs the model, and the copies of `now`
    copy stream         runs the copies of `begin`: waits for training's stream, nobody waits for it but the host
    send stream         runs the copies of `add`: each waits for what training's stream was given before that `add`;
                        apart from the copy stream, which waits for it once, at the end of the round

Copies of `begin` are launched by a thread, chunk by chunk, at the rate that was asked for; as fast as they go once the
host waits for them and training's stream has nothing left to run. The thread also page-locks what is not locked yet:
neither holds training up. Both streams of copies have the lowest priority there is. That orders kernels; transfers are
ordered by their chunks alone.

The host never waits for a device but in `wait`, which polls the event `copied` that is recorded last. Two more things
are needed that CPU memory does not know: memory of a tensor that is given up must not be handed out again while another
stream still reads it (`record_stream`), and segments must stay mapped and page-locked while the device writes.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence

import torch

from ..device import ignore_captures, own_stream
from ..ports import Pace
from .copy_engines import (
    CHUNK_BYTES,
    TICK_S,
    CopyEngine,
    CopyJob,
    Span,
    Throttle,
    chunked,
    extent_bytes,
    require_idle,
    total_bytes,
)
from .page_locks import PageLocks

_POLL_S = 0.0005
_CLOSE_S = 60.0
_MEASURED_BYTES = 8 * CHUNK_BYTES
"""So much of a round is copied without pauses: that tells how fast the link is."""


class _Launching:
    """What the launching thread does for one round, and what came of it."""

    def __init__(self, pace: Pace) -> None:
        self.pace, self.done = pace, threading.Event()
        self.measured_bytes = 0
        self.error: BaseException | None = None


class StreamEngine(CopyEngine):
    """The `CopyEngine` of CUDA tensors.

    The device writes to a segment directly (DMA) only where its pages are locked: see `page_locks`.

    Args:
        locks: Shared with other engines that copy to the same segments.
        name: Of its streams, which no other engine has at the same time.
    """

    def __init__(self, locks: PageLocks | None = None, name: str = "snapshot") -> None:
        self._copy_stream, self._send_stream = (own_stream(f"{name}-{use}") for use in ("copy", "send"))
        self._ready, self._begun, self._measured, self._copied = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )
        self._reached = torch.cuda.Event()  # on training's stream, where the host waits for copies
        self._locks = locks or PageLocks()
        # Segments must stay mapped while the device writes to them: these lists keep them referred to.
        self._current: list[memoryview] | None = None
        self._before: list[memoryview] = []
        self._launching: _Launching | None = None
        self._has_added = False  # whether `add` was called in this round, whose end is not marked yet

    def prepare(self, segments: Sequence[memoryview]) -> None:
        self._locks.begin(segments)

    def now(self, job: CopyJob) -> None:
        # On the caller's current stream: what it launches next runs after the copy.
        if job[0]:
            self._launch(job)
            self._before.append(job[1])

    def begin(self, jobs: Sequence[CopyJob], pace: Pace | None = None) -> None:
        """As `CopyEngine.begin`."""
        require_idle(self._current)
        # First, the copies must see what the current stream was given so far (the optimizer's step). Second, this
        # puts what `now` launched there before the event `copied` below: to wait for that one is to wait for all.
        self._ready.record()
        self._copy_stream.wait_event(self._ready)
        self._current, self._before = self._before + [segment for _, segment in jobs], []
        pace = pace or Throttle(None)
        pace.free_bytes = _MEASURED_BYTES
        self._launching = _Launching(pace)
        if not total_bytes(jobs):
            self._run(self._launching, [])
            return
        arguments = self._launching, list(jobs), torch.cuda.current_device()
        threading.Thread(target=self._run_beside, args=arguments, name="snapshot-launch", daemon=True).start()
        # No stream waits for the copies: the host does, in `wait`, before it launches what changes the sources.

    def add(self, job: CopyJob) -> None:
        self._has_added = True  # first: also what is launched by a call that then fails has to be waited for
        # The kernels that make these tensors are launched but need not have run.
        self._send_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._send_stream):
            self.now(job)
        for span in job[0]:
            # The caller gives the tensor up at once. Without this the allocator would hand its memory to the next
            # kernel of training's stream, which does not wait for the send stream.
            span.source.record_stream(self._send_stream)

    def wait(self, timeout_s: float) -> None:
        self.drop()
        launching = self._launching
        if self._current is None or launching is None:
            return
        deadline = time.monotonic() + timeout_s
        # The host may be ahead of the device: as long as that computes what it was given, nobody stands still, and
        # copies without a pause would only slow it down.
        self._reached.record()
        # Polled, because CUDA waits for events without a timeout.
        while not (launching.done.is_set() and self._copied.query()):
            if self._reached.query():
                launching.pace.hurry()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for the device to end {len(self._current)} copy jobs")
            time.sleep(_POLL_S)
        self._current = self._launching = None
        if launching.error is not None:
            raise launching.error
        if launching.measured_bytes:
            measured_s = self._begun.elapsed_time(self._measured) / 1000
            self.bandwidth_bytes_per_s = launching.measured_bytes / max(measured_s, TICK_S)

    def drop(self) -> None:
        # What the device was given cannot be taken back: mark its end, for the next `wait`.
        if self._has_added:
            self._has_added = False
            with torch.cuda.stream(self._send_stream):
                self.begin([])  # makes the copy stream wait for the send stream, and marks the end of all it was given

    def trial(self, spans: Sequence[Span]) -> float:
        # Into memory that is page-locked, as segments are; the host waits for it.
        require_idle(self._current)
        target = torch.empty(extent_bytes(spans), dtype=torch.uint8, pin_memory=True)
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream), torch.no_grad():
            self._begun.record()
            for span, start, end in chunked(spans):
                into = target[span.offset + start : span.offset + end]
                into.copy_(span.source[start:end], non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        nbytes = sum(span.nbytes for span in spans)
        return float(nbytes / max(self._begun.elapsed_time(self._copied) / 1000, TICK_S))

    def release(self, segments: Sequence[memoryview]) -> None:
        require_idle(self._current)
        self._locks.release(segments)

    def close(self) -> None:
        # What was page-locked stays so: other engines copy to it, and so may the next session of this process.
        if self._launching is not None:
            self._launching.pace.hurry()
            self._launching.done.wait(_CLOSE_S)
        self._copy_stream.synchronize()

    def _run_beside(self, launching: _Launching, jobs: list[CopyJob], device: int) -> None:
        with torch.cuda.device(device):
            ignore_captures()
            self._run(launching, jobs)

    def _run(self, launching: _Launching, jobs: list[CopyJob]) -> None:
        """Launch all copies of a round on the copy stream, and mark their end; afterwards `jobs` is empty."""
        try:
            with torch.cuda.stream(self._copy_stream), torch.no_grad():
                self._begun.record()
                while jobs:
                    self._launch_throttled(launching, jobs.pop(0))
                if launching.measured_bytes < _MEASURED_BYTES:
                    self._measured.record()
                self._copied.record()
        except BaseException as error:  # raised by `wait`
            # Frames of the traceback would keep the segment alive as long as somebody keeps the error.
            error.add_note(traceback.format_exc())
            launching.error = error.with_traceback(None)
            jobs.clear()
            with torch.cuda.stream(self._copy_stream):
                self._copied.record()
        launching.done.set()

    def _launch_throttled(self, launching: _Launching, job: CopyJob) -> None:
        spans, segment = job
        target = torch.frombuffer(segment, dtype=torch.uint8)
        for span, start, end in chunked(spans, launching.pace.chunk_bytes):
            launching.pace.take(end - start)
            self._locks.lock(segment, span.offset + start)
            into = target[span.offset + start : span.offset + end]
            into.copy_(span.source[start:end], non_blocking=True)
            launching.pace.moved(end - start)
            if launching.measured_bytes < _MEASURED_BYTES:
                launching.measured_bytes += end - start
                if launching.measured_bytes >= _MEASURED_BYTES:
                    self._measured.record()

    def _launch(self, job: CopyJob) -> None:
        """Queue the copies of a job on the current stream; the host does not wait where the segment is page-locked."""
        spans, segment = job
        target = torch.frombuffer(segment, dtype=torch.uint8)
        with torch.no_grad():
            for span, start, end in chunked(spans):
                into = target[span.offset + start : span.offset + end]
                into.copy_(span.source[start:end], non_blocking=True)
