"""The ports to time and to work that runs beside training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Clock(Protocol):
    """Time as the coordinator sees it."""

    def now_s(self) -> float:
        """Seconds from an arbitrary start, never going back."""

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""


class Stopwatch(Protocol):
    """Time of the device that trains: between `resume` and `pause` work is launched, else it may stand still.

    It is running when it is made.
    """

    def pause(self) -> None:
        """Training launches nothing more for now."""

    def resume(self) -> float:
        """It goes on; the seconds for which the device had nothing to do since `pause`."""

    def lap_s(self) -> float | None:
        """Seconds that the work took which was launched before the last `pause`, since the `resume` before that; None
        as long as it is not known."""


class Pace(Protocol):
    """When the chunks of a copy, or of what is sent, may begin. One thread takes and moves, any may be in a hurry.

    chunk_bytes: the most that a chunk has. free_bytes: so many come first without a pause.
    """

    chunk_bytes: int
    free_bytes: int

    def take(self, nbytes: int) -> float:
        """Return when the next chunk, of so many bytes, may begin; the seconds that it was held back."""

    def moved(self, nbytes: int) -> None:
        """The chunk that was taken has been moved, as far as the host can tell."""

    def hurry(self) -> None:
        """Hold nothing back any more: somebody waits for the end. From any thread."""


class SendPace(Protocol):
    """Makes the pace of all that one exchange sends.

    moving_s: what chunks have taken so far, pauses between them left out.
    """

    moving_s: float

    def begin(self, total_bytes: int) -> Pace:
        """Of so many bytes, of which the first chunk follows."""


class WaitObserver(Protocol):
    """Is told when training on this rank waits for another pipeline stage."""

    def waiting(self) -> AbstractContextManager[None]:
        """A block in which the thread that trains, or on a device its stream, does nothing else. Never raises."""


class Task[T](Protocol):
    """Work that was submitted to a lane."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raises what it raised; TimeoutError after `timeout` seconds."""


class Executor(Protocol):
    """Runs work beside training, one piece after the other in the order of submission; as `concurrent.futures`."""

    def submit[T](self, work: Callable[[], T], /) -> Task[T]:
        """Run `work` after all that was submitted before."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait for the rest, or drop what has not begun."""

    @property
    def has_ended(self) -> bool:
        """Whether all work has ended and no more will begin."""
