"""Threads that do work beside training and never keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import MoECheckpointError

T = TypeVar("T")

CLOSING_S = 60.0
"""How long `shutdown` waits; the thread ends with the process at the latest."""


class ThreadExecutor:
    """One daemon thread that runs what is submitted, in order; as `ports.Lane`."""

    def __init__(self, name: str) -> None:
        self._name, self._closed = name, False
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"moe-ckpt-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], /) -> Future[T]:
        """As `ports.Lane.submit`. Raises MoECheckpointError after `shutdown`."""
        if self._closed:
            raise MoECheckpointError(f"the lane {self._name} was shut down and takes no more work")
        future: Future[T] = Future()
        self._waiting.put((future, work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `ports.Lane.shutdown`."""
        self._closed = True
        if cancel_futures:
            self._cancel_waiting()
        self._waiting.put(None)
        if wait:
            self._thread.join(CLOSING_S)

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
            if not future.set_running_or_notify_cancel():
                continue
            try:
                value = work()
            except BaseException as error:  # it is raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)
            del item, future, work  # while it waits for the next, this thread keeps nothing alive
