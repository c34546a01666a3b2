"""The threads on which snapshots are worked on beside training, and what is said when that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..errors import CheckpointFailure
from ..ports import Executor, StoreFailure, Task

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

    def complain(self, what: str, failures: Sequence[str]) -> None:
        """Say what protection was lost and why; ends training with `--moe-ckpt-strict`. Raises CheckpointFailure."""
        why = "; ".join(dict.fromkeys(failures)) or "the reason is in the log of another rank"
        then = "training ends because of --moe-ckpt-strict" if self._strict else "training goes on"
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
            try:
                task.result(self._timeout_s)
            except StoreFailure as error:
                self.complain("a store refused", [str(error)])
            except TimeoutError:
                self.complain("background work does not end", [f"waited {self._timeout_s:g} s for it"])
