"""How bytes get from live tensors into the memory of snapshots while training goes on."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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


Job: TypeAlias = tuple[Sequence[Span], memoryview]
"""Spans, and the segment that they go to."""


class CopyEngine(Protocol):
    """Copies spans of live memory: `now` any number of times, `begin`, `wait`; then the next round.

    One round at a time, all calls from the thread that trains. Each live tensor stays as it is from `begin` until
    `wait` has returned, those given to `now` until whatever this thread launches next.
    """

    def now(self, job: Job) -> None:
        """Copy what later work of this thread, and of the device on its behalf, may change."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Begin to copy. Raises UsageError while a round is under way."""

    def wait(self, timeout_s: float) -> None:
        """Return when all of the round is copied; the engine then refers to none of the round's segments.

        Raises TimeoutError, after which `wait` may be called again, and what a copy raised.
        """

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """How fast the last round was, from its `begin` to its last byte; None before any bytes were copied."""

    def trial(self, spans: Sequence[Span]) -> float:
        """Bytes per second of a copy of these spans to memory that is given back at once; none may be under way."""

    def release(self) -> None:
        """Let go of all segments, some of which are about to be given back; none may be under way."""

    def close(self) -> None:
        """End the use of the engine."""


@dataclass(eq=False)
class _Round:
    """What the copy thread does at a time."""

    jobs: Sequence[Job]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    copied_bytes: int = 0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self.begun_s = time.perf_counter()
        self.total_bytes = sum(span.nbytes for spans, _ in self.jobs for span in spans)

    def run(self) -> None:
        """Copy; neither this object nor the error refers to the segments afterwards."""
        try:
            for job in self.jobs:
                self._copy(job)
        except BaseException as error:
            # Frames of the traceback would keep the segments alive as long as somebody keeps the error.
            error.add_note(traceback.format_exc())
            self.error = error.with_traceback(None)
        self.jobs = ()
        self.ended_s = time.perf_counter()

    def _copy(self, job: Job) -> None:
        spans, segment = job
        target = np.frombuffer(segment, np.uint8)
        for span in spans:
            # Where torch writes through the cache, this is memcpy, which goes past it; it holds no GIL.
            np.copyto(target[span.offset : span.offset + span.nbytes], span.array)
            self.copied_bytes += span.nbytes


class ThreadEngine:
    """One thread that copies CPU tensors; it sleeps between rounds and ends with the engine."""

    def __init__(self) -> None:
        self._rounds: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._current: _Round | None = None
        self._bandwidth: float | None = None
        threading.Thread(target=_serve, args=(self._rounds,), name="snapshot-copy", daemon=True).start()
        self._end = weakref.finalize(self, self._rounds.put, None)

    def now(self, job: Job) -> None:
        """As `CopyEngine.now`."""
        one = _Round([job] if job[0] else [])
        one.run()
        if one.error is not None:
            raise one.error

    def begin(self, jobs: Sequence[Job]) -> None:
        """As `CopyEngine.begin`."""
        _require_none(self._current)
        self._current = _Round([job for job in jobs if job[0]])
        self._rounds.put(self._current)

    def wait(self, timeout_s: float) -> None:
        """As `CopyEngine.wait`."""
        current = self._current
        if current is None:
            return
        if not current.done.wait(timeout_s):
            raise TimeoutError(
                f"waited {timeout_s:g} s for the copy thread, which has copied {current.copied_bytes} of"
                f" {current.total_bytes} bytes: the machine's memory or cores are overloaded"
            )
        self._current = None
        if current.error is not None:
            raise current.error
        if current.copied_bytes:
            self._bandwidth = current.copied_bytes / max(current.ended_s - current.begun_s, _TICK_S)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """As `CopyEngine.bandwidth_bytes_per_s`."""
        return self._bandwidth

    def trial(self, spans: Sequence[Span]) -> float:
        """As `CopyEngine.trial`."""
        segment = memoryview(bytearray(_end_of(spans)))
        before = self._bandwidth
        for _ in range(2):  # pages are touched for the first time only once
            self.begin([(spans, segment)])
            self.wait(_TRIAL_S)
        self._bandwidth, found = before, self._bandwidth
        return found or 0.0

    def release(self) -> None:
        """As `CopyEngine.release`: between rounds the thread has none."""

    def close(self) -> None:
        """As `CopyEngine.close`."""
        self._end()


def _serve(rounds: queue.SimpleQueue[_Round | None]) -> None:
    while (one := rounds.get()) is not None:
        one.run()
        one.done.set()
        del one  # while it waits for the next, this thread keeps nothing alive


def _end_of(spans: Sequence[Span]) -> int:
    return max((span.offset + span.nbytes for span in spans), default=0)


def _require_none(current: object) -> None:
    if current is not None:
        raise UsageError("a round of copies is under way: wait for it before the next begins")


class StreamEngine:
    """A CUDA stream beside training's, and segments that the device writes to directly.

    Segments are made page-locked when first seen; they are reused, so that happens once for each. Where the driver
    refuses that, copies go through its own staging buffers and stall training: this is logged once.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._begun, self._copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._bytes, self._bandwidth = 0, None
        self._locked_bytes: dict[int, int] = {}
        self._refused = False
        self._end = weakref.finalize(self, _unlock, self._locked_bytes)
        self._end.atexit = False  # the process ends, and CUDA with it
        self._current: list[memoryview] | None = None
        self._before: list[memoryview] = []

    def now(self, job: Job) -> None:
        """As `CopyEngine.now`: on training's own stream, so that what it runs next comes after."""
        if job[0]:
            self._launch(job)
            self._before.append(job[1])

    def begin(self, jobs: Sequence[Job]) -> None:
        """As `CopyEngine.begin`."""
        _require_none(self._current)
        # The event below comes after what `now` launched, since this stream waits for training's.
        self._stream.wait_stream(torch.cuda.current_stream())
        self._current, self._before = self._before + [segment for _, segment in jobs], []
        self._bytes = sum(span.nbytes for spans, _ in jobs for span in spans)
        with torch.cuda.stream(self._stream):
            self._begun.record()
            for job in jobs:
                if job[0]:
                    self._launch(job)
            self._copied.record()

    def wait(self, timeout_s: float) -> None:
        """As `CopyEngine.wait`."""
        if self._current is None:
            return
        deadline = time.monotonic() + timeout_s
        while not self._copied.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:g} s for the device to copy {len(self._current)} snapshots")
            time.sleep(_POLL_S)
        self._current = None
        if self._bytes:
            self._bandwidth = self._bytes / max(self._begun.elapsed_time(self._copied) / 1000, _TICK_S)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """As `CopyEngine.bandwidth_bytes_per_s`."""
        return self._bandwidth

    def trial(self, spans: Sequence[Span]) -> float:
        """As `CopyEngine.trial`: into memory that is page-locked, as segments are; training's device waits for it."""
        _require_none(self._current)
        target = torch.empty(_end_of(spans), dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._begun.record()
            for span in spans:
                target[span.offset : span.offset + span.nbytes].copy_(span.source, non_blocking=True)
            self._copied.record()
        self._copied.synchronize()
        nbytes = sum(span.nbytes for span in spans)
        return float(nbytes / max(self._begun.elapsed_time(self._copied) / 1000, _TICK_S))

    def release(self) -> None:
        """As `CopyEngine.release`: what is used again is made page-locked again."""
        _require_none(self._current)
        self._stream.synchronize()
        torch.cuda.current_stream().synchronize()
        _unlock(self._locked_bytes)

    def close(self) -> None:
        """As `CopyEngine.close`; what was page-locked is so no longer."""
        self._stream.synchronize()
        self._end()

    def _launch(self, job: Job) -> None:
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
            self._stream.synchronize()
            torch.cuda.current_stream().synchronize()
            cudart.cudaHostUnregister(address)
        code = int(cudart.cudaHostRegister(address, nbytes, 0))
        if code:
            self._refused = True
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")  # the first kernel after an error reports it, wherever it came from
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
