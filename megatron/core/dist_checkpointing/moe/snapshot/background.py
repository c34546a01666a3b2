"""The threads on which snapshots are worked on beside training, and what is said when that fails."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..device import device_thread
from ..errors import CheckpointFailure, MoECheckpointError
from ..ports import Executor, StoreFailure, Task

CLOSING_S = 60.0
"""How long `shutdown` waits; the thread ends with the process at the latest."""


class ThreadExecutor:
    """One daemon thread that runs what is submitted, in order; as `ports.Executor`."""

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = device_thread(self._run, f"moe-ckpt-{name}")
        self._thread.start()

    def submit[T](self, work: Callable[[], T], /) -> Future[T]:
        """As `ports.Executor.submit`. Raises MoECheckpointError after `shutdown`."""
        if self._closed:
            raise MoECheckpointError(f"the lane {self._name} was shut down and takes no more work")
        future: Future[T] = Future()
        self._waiting.put((future, work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `ports.Executor.shutdown`."""
        self._closed = True
        if cancel_futures:
            self._cancel_waiting()
        # Behind all that was submitted before: what was not cancelled still runs, and then the thread ends.
        self._waiting.put(None)
        if wait:
            self._thread.join(CLOSING_S)

    @property
    def has_ended(self) -> bool:
        """As `ports.Executor.has_ended`."""
        return not self._thread.is_alive()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].cancel()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            # From here on the future cannot be cancelled: whoever waits for it waits for the work.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                value = work()
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)
            del item, future, work  # while it waits for the next, this thread keeps nothing alive


log = logging.getLogger(__name__)


class BackgroundWork:
    """One thread that seals and replicates, one that writes to storage, one that exchanges messages.

    Each does one thing after the other, in the order of submission.

    Args:
        lane: makes a thread of this name.
        timeout_s: how long work that has to end is waited for.
        strict: whether lost protection ends training.
    """

    def __init__(self, lane: Callable[[str], Executor], *, timeout_s: float, strict: bool) -> None:
        # Three threads, so that neither slow storage nor a slow peer holds up the messages on which all ranks agree.
        self._replication, self._persist, self.control = (lane(name) for name in ("replication", "persist", "control"))
        self._timeout_s, self._strict = timeout_s, strict
        self._running: list[Task[None]] = []

    def replicate(self, work: Callable[[], None]) -> Task[None]:
        """Submit work on snapshots in memory."""
        return self._submitted(self._replication, work)

    def persist(self, work: Callable[[], None]) -> Task[None]:
        """Submit work on snapshots in storage."""
        return self._submitted(self._persist, work)

    def check(self) -> None:
        """Let failures of what has ended reach training; what a store refuses only costs protection."""
        running, self._running = self._running, []
        ended: list[Task[None]] = []
        # Sorted before any result is asked for: `_finish` may raise, and what still runs must stay known for `drain`.
        for task in running:
            (ended if task.done() else self._running).append(task)
        self._finish(ended)

    def drain(self) -> None:
        """Wait for all that was submitted."""
        tasks, self._running = self._running, []
        self._finish(tasks)

    def close(self, *, wait: bool) -> None:
        """End the threads; what has not begun is dropped."""
        for lane in (self._replication, self._persist, self.control):
            lane.shutdown(wait, cancel_futures=True)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is worked on any more."""
        return all(lane.has_ended for lane in (self._replication, self._persist, self.control))

    def complain(self, what: str, failures: Sequence[str]) -> None:
        """Say what protection was lost and why.

        Args:
            what: What was lost, as the beginning of a sentence.
            failures: The reasons that this rank knows; empty where only other ranks know one.

        Raises:
            CheckpointFailure: With `--moe-ckpt-strict`, which ends training.
        """
        why = "; ".join(dict.fromkeys(failures)) or "the reason is in the log of another rank"
        then = "training ends because of --moe-ckpt-strict" if self._strict else "training continues"
        # A rank without a reason of its own leaves it to those that have one, and to rank 0, to speak.
        log.log(logging.ERROR if failures else logging.WARNING, "%s: %s; %s", what, why, then)
        if self._strict:
            raise CheckpointFailure(f"{what}: {why}; {then}")

    def _submitted(self, lane: Executor, work: Callable[[], None]) -> Task[None]:
        task = lane.submit(work)
        self._running.append(task)
        return task

    def _finish(self, tasks: Sequence[Task[None]]) -> None:
        for task in tasks:
            # What a store refuses, and work that is late, cost protection. Anything else is a defect, and raised.
            try:
                task.result(self._timeout_s)
            except StoreFailure as error:
                self.complain("a store refused", [str(error)])
            except TimeoutError:
                self.complain("background work does not end", [f"waited {self._timeout_s:g} s for it"])
