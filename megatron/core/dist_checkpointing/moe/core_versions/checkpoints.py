"""Core's writer of `torch_dist` checkpoints."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from .async_workers import results_queue

_QUEUE = (
    "get_write_results_queue" if hasattr(filesystem_async, "get_write_results_queue") else "_get_write_results_queue"
)


@contextlib.contextmanager
def results_in_process(is_async: Callable[[], bool]) -> Iterator[None]:
    """Keep core from starting a manager process for the results of a save that this process writes itself.

    Starting one imports torch anew on every rank, at the first save after each start. One that is needed ends with this
    process.

    Args:
        is_async: Whether other processes write, whose results come through that manager.
    """
    original = getattr(filesystem_async, _QUEUE)
    results: queue.Queue[Any] = queue.Queue()
    setattr(filesystem_async, _QUEUE, lambda *given, **named: results_queue(*given, **named) if is_async() else results)
    try:
        yield
    finally:
        setattr(filesystem_async, _QUEUE, original)
