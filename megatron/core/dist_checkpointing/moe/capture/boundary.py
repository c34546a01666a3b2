"""Records what a rank sends over stage boundaries, beside training (MoEvement 3.4, "Upstream Logging")."""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import MoECheckpointError, UsageError
from ..ports import Field, Layout, MappedWriter
from ..types import Direction
from .engines import Span, StreamEngine

_RELEASE_S = 60.0


class BoundaryFailure(MoECheckpointError):
    """What was sent in an iteration is not what was planned, or could not be copied: there is no log of it."""


class Copies(Protocol):
    """Copies spans one by one as they come, into one segment at a time: `begin`, any number of `add`, `wait`."""

    def begin(self, segment: memoryview) -> None:
        """The next spans go to this segment. Raises TimeoutError while copies that were dropped are still under way."""

    def add(self, span: Span) -> None:
        """Copy this span some time before `wait` returns; it is kept alive until then, and does not change."""

    def wait(self, timeout_s: float) -> None:
        """Return when all is copied; nothing refers to the segment then.

        Raises TimeoutError, after which `wait` may be called again, and what a copy raised.
        """

    def drop(self) -> None:
        """Copy no more of what was added. What cannot be stopped goes on, and refers to the segment until it ends."""

    def release(self) -> None:
        """Let go of all segments, some of which are about to be given back; nothing may be under way."""

    def close(self) -> None:
        """End the use."""


@dataclass(eq=False)
class _Batch:
    """The copies into one segment; those that have not begun are left out once `segment` is None."""

    segment: memoryview | None
    given_bytes: int = 0
    copied_bytes: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    closed: bool = False
    error: BaseException | None = None

    def copy(self, span: Span) -> None:
        """Copy one span; what is raised is kept, without frames that would keep the segment alive."""
        segment = self.segment
        if segment is None or self.error is not None:
            return
        try:
            target = np.frombuffer(segment, np.uint8)
            np.copyto(target[span.offset : span.offset + span.nbytes], span.array)  # holds no GIL
            self.copied_bytes += span.nbytes
        except BaseException as error:
            error.add_note(traceback.format_exc())
            self.error = error.with_traceback(None)


class ThreadCopies:
    """`Copies` of CPU tensors by one thread, which sleeps while there is nothing to copy and ends with this object."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[_Batch, Span | None] | None] = queue.SimpleQueue()
        self._batch: _Batch | None = None
        threading.Thread(target=_serve, args=(self._waiting,), name="boundary-copy", daemon=True).start()
        self._end = weakref.finalize(self, self._waiting.put, None)

    def begin(self, segment: memoryview) -> None:
        """As `Copies.begin`; never waits, because the thread leaves out what was dropped."""
        self._batch = _Batch(segment)

    def add(self, span: Span) -> None:
        """As `Copies.add`."""
        assert self._batch is not None
        self._batch.given_bytes += span.nbytes
        self._waiting.put((self._batch, span))

    def wait(self, timeout_s: float) -> None:
        """As `Copies.wait`."""
        batch = self._batch
        if batch is None:
            return
        if not batch.closed:
            batch.closed = True
            self._waiting.put((batch, None))
        if not batch.done.wait(timeout_s):
            raise TimeoutError(
                f"waited {timeout_s:g} s for the thread that copies boundary logs, which has copied"
                f" {batch.copied_bytes} of {batch.given_bytes} bytes: the machine's memory or cores are overloaded"
            )
        batch.segment, self._batch = None, None
        if batch.error is not None:
            raise batch.error

    def drop(self) -> None:
        """As `Copies.drop`."""
        if self._batch is not None:
            self._batch.segment, self._batch = None, None

    def release(self) -> None:
        """As `Copies.release`: between iterations the thread has none."""

    def close(self) -> None:
        """As `Copies.close`."""
        self._end()


def _serve(waiting: queue.SimpleQueue[tuple[_Batch, Span | None] | None]) -> None:
    while (item := waiting.get()) is not None:
        batch, span = item
        if span is None:
            batch.done.set()
        else:
            batch.copy(span)
        del item, batch, span  # while it waits for the next, this thread keeps nothing alive


class StreamCopies:
    """`Copies` of CUDA tensors on a stream beside training's, into memory that the engine makes page-locked."""

    def __init__(self) -> None:
        self._engine, self._stream = StreamEngine(), torch.cuda.Stream()
        self._segment: memoryview | None = None
        self._under_way = False

    def begin(self, segment: memoryview) -> None:
        """As `Copies.begin`."""
        self.wait(0)
        self._segment = segment

    def add(self, span: Span) -> None:
        """As `Copies.add`: after what training's stream has been given so far, which made the tensor."""
        assert self._segment is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._engine.now(([span], self._segment))
        span.source.record_stream(self._stream)  # its memory is not used again before it is copied

    def wait(self, timeout_s: float) -> None:
        """As `Copies.wait`."""
        self.drop()
        if self._under_way:
            self._engine.wait(timeout_s)
            self._under_way = False

    def drop(self) -> None:
        """As `Copies.drop`: nothing is added any more, but what the device was given goes on."""
        if self._segment is not None:
            with torch.cuda.stream(self._stream):
                self._engine.begin([])  # marks the end of all that this stream was given
            self._segment, self._under_way = None, True

    def release(self) -> None:
        """As `Copies.release`: what is used again is made page-locked again."""
        self.wait(_RELEASE_S)
        self._engine.release()

    def close(self) -> None:
        """As `Copies.close`."""
        self._engine.close()


@dataclass(eq=False)
class _Round:
    """What is still expected of an iteration: by direction, the fields and their offsets in the order of sending."""

    expected: Mapping[Direction, tuple[tuple[Field, int], ...]]
    sent: dict[Direction, int]
    problem: str = ""
    passed: bool = False

    @classmethod
    def of(cls, layout: Layout) -> _Round:
        """The round of a log's layout. Raises UsageError for a key that is of no direction."""
        expected: dict[Direction, list[tuple[Field, int]]] = {direction: [] for direction in Direction}
        for one, offset in zip(layout.fields, layout.offsets, strict=True):
            name = one.key.partition("/")[0]
            if name not in _DIRECTIONS:
                raise UsageError(f"record {one.key} is no boundary tensor: its key begins with no direction")
            expected[_DIRECTIONS[name]].append((one, offset))
        return cls({way: tuple(places) for way, places in expected.items()}, dict.fromkeys(Direction, 0))

    @property
    def complete(self) -> bool:
        """Whether all that was planned was sent."""
        return not self.problem and all(self.sent[way] == len(self.expected[way]) for way in Direction)

    def place(self, direction: Direction, tensor: torch.Tensor) -> int:
        """Where the next tensor of a direction goes. Raises BoundaryFailure for one that the plan does not have."""
        index, planned = self.sent[direction], self.expected[direction]
        self.sent[direction] += 1
        if index >= len(planned):
            raise BoundaryFailure(f"more than the {len(planned)} planned tensors were sent {direction.value}")
        (one, offset), dtype = planned[index], str(tensor.dtype).removeprefix("torch.")
        if dtype != one.dtype or tuple(tensor.shape) != one.shape:
            raise BoundaryFailure(
                f"{one.key} was planned as {one.dtype} {list(one.shape)}, but {dtype} {list(tensor.shape)} was sent"
            )
        return offset

    def shortfall(self) -> str:
        """What is wrong with what was sent up to now; empty where all is as planned."""
        if self.problem or self.complete:
            return self.problem
        counts = (f"{self.sent[way]} of {len(self.expected[way])} {way.value}" for way in Direction)
        return f"the iteration ended with fewer tensors sent than were planned: {', '.join(counts)}"


_DIRECTIONS = {direction.value: direction for direction in Direction}


class BoundaryRecorder:
    """The `ports.BoundarySink` that copies what is sent in an iteration into a snapshot's memory, beside training.

    In each iteration: `arm`, any number of `sent`, `passed`, `end`, or `disarm` at any time. Between `passed` and the
    next `arm`, as in an evaluation, nothing is recorded. The k-th tensor that is sent in a direction is the k-th record
    of the layout whose key begins with it (see `types.boundary_key`).
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._round: _Round | None = None

    def arm(self, layout: Layout, writer: MappedWriter) -> None:
        """Record what is sent from here on into the memory of this writer, which was reserved with this layout.

        Raises UsageError while it is armed, TimeoutError while the device still copies what was given up.
        """
        if self._round is not None:
            raise UsageError("boundary tensors are being recorded: end that before the next iteration begins")
        expected = _Round.of(layout)
        self._copies.begin(writer.whole())
        self._round = expected

    def sent(self, direction: Direction, tensor: Any) -> None:
        """As `ports.BoundarySink.sent`; what is wrong is told by `end`."""
        current = self._round
        if current is None or current.problem or current.passed:
            return
        try:
            offset = current.place(direction, tensor)
            # Not the tensor itself: schedules give up its memory, while the copy needs it.
            source = tensor.detach().reshape(-1).view(torch.uint8)
            self._copies.add(Span(source, offset))
        except Exception as error:
            told = isinstance(error, MoECheckpointError)
            current.problem = str(error) if told else f"{type(error).__name__}: {error}"

    def passed(self) -> None:
        """The passes of the iteration have ended: what is sent from here on, as in an evaluation, is none of it."""
        if self._round is not None:
            self._round.passed = True

    @property
    def complete(self) -> bool:
        """Whether it is armed and all that was planned has been sent; the copies may still be under way."""
        return self._round is not None and self._round.complete

    def end(self, timeout_s: float) -> None:
        """Wait until all is copied; nothing refers to the writer's memory afterwards, and nothing is recorded.

        Raises TimeoutError, after which it may be called again or given up by `disarm`; BoundaryFailure where what was
        sent is not what the layout says, or what a copy raised. With nothing armed it returns.
        """
        current = self._round
        if current is None:
            return
        if problem := current.shortfall():
            self.disarm()
            raise BoundaryFailure(problem)
        try:
            self._copies.wait(timeout_s)
        except TimeoutError:
            raise
        except Exception as error:
            self._round = None
            raise BoundaryFailure(f"a boundary tensor could not be copied: {error}") from error
        self._round = None

    def disarm(self) -> None:
        """Give up what was recorded since `arm`, and record nothing more. Its memory is let go of as soon as possible:
        a store does not use it again before."""
        if self._round is not None:
            self._round = None
            self._copies.drop()

    def release(self) -> None:
        """Let go of all memory, some of which is about to be given back; between two iterations."""
        self._copies.release()

    def close(self) -> None:
        """End the use of the recorder."""
        self.disarm()
        self._copies.close()
