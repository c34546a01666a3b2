"""The ports to time and to work that runs beside training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T", covariant=True)


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


class Task(Protocol[T]):
    """Work that was submitted to a lane."""

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""

    def result(self, timeout: float | None = None) -> T:
        """What it returned, or raises what it raised; TimeoutError after `timeout` seconds."""


class Executor(Protocol):
    """Runs work beside training, one piece after the other in the order of submission; as `concurrent.futures`."""

    def submit(self, work: Callable[[], T], /) -> Task[T]:
        """Run `work` after all that was submitted before."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; wait for the rest, or drop what has not begun."""

    @property
    def has_ended(self) -> bool:
        """Whether all work has ended and no more will begin."""
