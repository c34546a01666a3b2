"""Copies in chunks, one after the other at a given rate: so that training's own transfers never wait for long.

A transfer that has begun is not interrupted. On a GPU the token counts of each MoE layer come to the host through the
same copy engine as snapshots do, and the host waits for them; gradients and tokens for other nodes cross the same bus.
Both copy engines cut what they copy by `chunked` and launch it as a `ports.Pace` lets them: `Throttle`, or the one of
`bubble_pace`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

CHUNK_BYTES = 8 << 20
"""About 0.2 ms of a bus that carries 50 GB/s."""

LOCK_BYTES = 256 << 20
"""Segments are page-locked in pieces of this size; a transfer must lie in one of them."""


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
    """Each span in pieces of at most `chunk_bytes`, in order: the span, and from where to where in it.

    No piece goes over a multiple of `lock_bytes` in the segment.
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
