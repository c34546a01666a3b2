"""The copy engine of CUDA tensors: streams, events and page-locked memory.

Three streams take part, and this is who waits for whom:

    training's stream   the current stream of whoever calls; runs the model, and the copies of `now`
    copy stream         runs the copies of `begin`: waits for training's stream, nobody waits for it but the host
    send stream         runs the copies of `add`: each waits for what training's stream was given before that `add`;
                        apart from the copy stream, which waits for it once, at the end of the round

The host never waits for a device but in `wait`, which polls the event `copied` that `begin` records last. Two more
things are needed that CPU memory does not know: memory of a tensor that is given up must not be handed out again while
another stream still reads it (`record_stream`), and segments must stay mapped and page-locked while the device writes.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from .copy_engines import TICK_S, CopyEngine, CopyJob, Span, extent_bytes, require_idle

log = logging.getLogger(__name__)

_POLL_S = 0.0005


class StreamEngine(CopyEngine):
    """The `CopyEngine` of CUDA tensors.

    The device writes to a segment directly (DMA) only where its pages are locked, which happens once for each segment
    when it is first seen. Where the driver refuses that, copies go through its own staging buffers and stall training;
    this is logged once.
    """

    def __init__(self) -> None:
        self._copy_stream, self._send_stream = torch.cuda.Stream(), torch.cuda.Stream()
        self._begun, self._copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._bytes = 0
        self._locked_bytes: dict[int, int] = {}  # by the address of a segment, how much of it is page-locked
        self._refused = False
        self._end = weakref.finalize(self, _unlock, self._locked_bytes)
        self._end.atexit = False  # the process ends, and CUDA with it
        # Segments must stay mapped while the device writes to them: these lists keep them referred to.
        self._current: list[memoryview] | None = None
        self._before: list[memoryview] = []
        self._has_added = False  # whether `add` was called in this round, whose end is not marked yet

    def now(self, job: CopyJob) -> None:
        # On the caller's current stream: what it launches next runs after the copy.
        if job[0]:
            self._launch(job)
            self._before.append(job[1])

    def begin(self, jobs: Sequence[CopyJob]) -> None:
        require_idle(self._current)
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
        if self._current is None:
            return
        deadline = time.monotonic() + timeout_s
        # Polled, because CUDA waits for events without a timeout.
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for the device to end {len(self._current)} copy jobs")
            time.sleep(_POLL_S)
        self._current = None
        if self._bytes:
            self.bandwidth_bytes_per_s = self._bytes / max(self._begun.elapsed_time(self._copied) / 1000, TICK_S)

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
            for span in spans:
                target[span.offset : span.offset + span.nbytes].copy_(span.source, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        nbytes = sum(span.nbytes for span in spans)
        return float(nbytes / max(self._begun.elapsed_time(self._copied) / 1000, TICK_S))

    def release(self) -> None:
        require_idle(self._current)
        # A copy that still runs, `now`'s on training's stream among them, would write to pages that are not locked.
        self._copy_stream.synchronize()
        torch.cuda.current_stream().synchronize()
        _unlock(self._locked_bytes)

    def close(self) -> None:
        # Segments are unmapped after this: what was page-locked must not be so any longer.
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
