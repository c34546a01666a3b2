"""Streams and events of a device that runs everything in program order."""

from __future__ import annotations

import contextlib
import time
from typing import Any


class CpuStream:
    """A stream on a device that runs everything in program order: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record `event`, or a new one, and return it."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def _wait(self, *_: object) -> None:
        """What this would wait for has already run."""

    wait_stream = wait_event = synchronize = _wait


class CpuEvent:
    """A point in program order, with the time at which it was recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._recorded_s = 0.0

    def record(self, stream: CpuStream | None = None) -> None:
        """Take the time."""
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether everything before this event has run: always."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to `end_event`, as `torch.cuda.Event.elapsed_time` gives them."""
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def _wait(self, *_: object) -> None:
        """Everything before this event has already run."""

    wait = synchronize = _wait


def no_stream_context(original: Any) -> Any:
    """For `torch.cuda.stream`: a context that changes nothing."""

    def stream(stream: CpuStream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return stream
