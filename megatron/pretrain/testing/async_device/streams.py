"""Streams, events, and the work that they order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar


class QueuedWork:
    """What a stream was given to do once: a kernel, a copy, or a mark.

    Args:
        run: Does it, on some thread of the host, once all of `after` is done.
        stream: Runs its work in the order in which it was given.
        after: QueuedWork of other streams.
        name: For messages.
        blocks: Device memory that it looks at or writes.
    """

    def __init__(
        self, run: Callable[[], object], stream: Stream, after: Sequence[QueuedWork], name: str, blocks: Sequence[Any]
    ) -> None:
        self.run, self.stream, self.name, self.blocks = run, stream, name, blocks
        self.done = False
        self.after = [one for one in after if not one.done]
        self.is_held: Callable[[], bool] = bool
        """Whether it spins, as a kernel of NCCL does whose peer is gone."""

    @property
    def is_mark(self) -> bool:
        """Whether nothing but its place on the stream matters."""
        return self.name in ("event", "wait", "reuse", "free")

    def blocker(self) -> QueuedWork | None:
        """The first work that this one waits for."""
        return next((one for one in self.after if not one.done), None)


class Stream:
    """As `torch.cuda.Stream`."""

    device_of_all: ClassVar[Any]
    """The `AsyncDevice` of a subclass."""

    def __init__(self, device: Any = None, priority: int = 0, **_: object) -> None:
        self.priority = priority
        self.queue: deque[QueuedWork] = deque()
        self.last: QueuedWork | None = None
        self.freed: list[Any] = []  # blocks that the next allocation on it gets
        self.device_of_all.streams.append(self)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As `torch.cuda.Stream.priority_range`."""
        return 0, -1

    def wait_event(self, event: Event) -> None:
        """As `torch.cuda.Stream.wait_event`."""
        self._after(event.mark)

    def wait_stream(self, stream: Stream) -> None:
        """As `torch.cuda.Stream.wait_stream`."""
        self._after(stream.last)

    def record_event(self, event: Event | None = None) -> Event:
        """As `torch.cuda.Stream.record_event`."""
        marked: Event = event or self.device_of_all.Event()
        marked.record(self)
        return marked

    def synchronize(self) -> None:
        """As `torch.cuda.Stream.synchronize`."""
        self.device_of_all.wait_for(self.last)

    def query(self) -> bool:
        """As `torch.cuda.Stream.query`."""
        self.device_of_all.progress()
        return bool(self.last is None or self.last.done)

    def _after(self, work: QueuedWork | None) -> None:
        if work is not None and not work.done:
            self.device_of_all.give(_nothing, "wait", stream=self, after=[work])


class Event:
    """As `torch.cuda.Event`."""

    device_of_all: ClassVar[Any]
    """The `AsyncDevice` of a subclass."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.mark: QueuedWork | None = None
        self._timed, self._reached_s = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        """As `torch.cuda.Event.record`."""
        stream = stream or self.device_of_all.current_stream()
        self.mark = self.device_of_all.give(self._reached, "event", stream=stream)

    def wait(self, stream: Stream | None = None) -> None:
        """As `torch.cuda.Event.wait`."""
        (stream or self.device_of_all.current_stream()).wait_event(self)

    def query(self) -> bool:
        """As `torch.cuda.Event.query`."""
        self.device_of_all.called("cudaEventQuery")
        self.device_of_all.progress()
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        """As `torch.cuda.Event.synchronize`."""
        self.device_of_all.called("cudaEventSynchronize")
        self.device_of_all.wait_for(self.mark)

    def elapsed_time(self, end_event: Event) -> float:
        """As `torch.cuda.Event.elapsed_time`. Raises RuntimeError where one of the two was not reached."""
        self.device_of_all.called("cudaEventElapsedTime")
        for event in (self, end_event):
            if not event._timed or event.mark is None:
                raise RuntimeError("CUDA error: invalid resource handle")
            if not event.mark.done:
                raise RuntimeError("CUDA error: device not ready")
        return (end_event._reached_s - self._reached_s) * 1e3

    def _reached(self) -> None:
        self._reached_s = time.perf_counter()


def _nothing() -> None:
    """To be waited for is all that it does."""
