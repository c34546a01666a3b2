"""Time and work beside training in a simulated world."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from .world import World


class FakeClock:
    """A `ports.Clock` of virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_s(self) -> float:
        """As `ports.Clock.now_s`."""
        return self._world.now_s()

    def sleep(self, seconds: float) -> None:
        """As `ports.Clock.sleep`."""
        self._world.event(f"sleep {seconds:g} s")
        self._world.sleep(seconds)


class FakeTask[Value]:
    """A `ports.Task`; one that was dropped raises CancelledError."""

    def __init__(self, world: World, lane: str, work: Callable[[], Value]) -> None:
        self._world, self._lane, self._work = world, lane, work
        self._values: list[Value] = []
        self._error: Exception | None = None
        self._done = False

    def done(self) -> bool:
        """As `ports.Task.done`."""
        self._world.event(f"ask whether work on lane {self._lane} is done")
        return self._done

    def result(self, timeout: float | None = None) -> Value:
        """As `ports.Task.result`, in virtual time."""
        self._world.event(f"ask for the result of work on lane {self._lane}")
        if not self._world.wait(f"waits for work on lane {self._lane}", lambda: self._done, timeout):
            raise TimeoutError(f"work on lane {self._lane} has not ended after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._values[0]

    def run(self) -> None:
        """For the lane: do the work. Lets only the end of the rank through."""
        try:
            self._values.append(self._work())
        except Exception as error:
            self._error = error
        self._done = True

    def cancel(self) -> None:
        """For the lane: it will never be done."""
        self._error, self._done = CancelledError(f"lane {self._lane} was shut down"), True


class FakeLane:
    """A `ports.Executor` of one rank. Its thread lives while there is work: an idle lane keeps nothing from ending."""

    def __init__(self, world: World, rank: int, name: str) -> None:
        self._world, self._rank, self._name = world, rank, name
        self._tasks: deque[FakeTask[Any]] = deque()
        self._works, self._open = False, True

    def submit[Value](self, work: Callable[[], Value], /) -> FakeTask[Value]:
        """As `ports.Executor.submit`. Raises RuntimeError after `shutdown`, as `concurrent.futures` does."""
        self._world.event(f"submit work to lane {self._name}")
        if not self._open:
            raise RuntimeError(f"lane {self._name} was shut down and takes no more work")
        task = FakeTask(self._world, self._name, work)
        self._tasks.append(task)
        if not self._works:
            self._works = True
            self._world.spawn(self._rank, self._name, self._drain)
        return task

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `ports.Executor.shutdown`."""
        self._world.event(f"shut lane {self._name} down")
        self._open = False
        if cancel_futures:
            while self._tasks:
                self._tasks.popleft().cancel()
        if wait:
            self._world.wait(f"waits for the end of lane {self._name}", lambda: not self._works)

    @property
    def has_ended(self) -> bool:
        """As `ports.Executor.has_ended`."""
        return not self._works

    def _drain(self) -> None:
        while self._tasks:
            self._tasks.popleft().run()
        self._works = False
