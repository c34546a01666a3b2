"""The processes in which core writes checkpoints in the background, made to end with the trainer that started them.

Core (0.17 to 0.19) keeps a worker, and a manager of a queue for its results. Both wait for a trainer that was killed
without end, with torch imported and all that they were given.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

from ..seats.lifeline import end_with_parent

_LOOP = "async_loop"
_core_loop = getattr(PersistentAsyncCaller, _LOOP)  # here it is core's own, also in a worker, which imports this anew


@contextlib.contextmanager
def ending_with_their_trainer() -> Iterator[None]:
    """In this block workers that core starts end with this process."""
    setattr(PersistentAsyncCaller, _LOOP, staticmethod(worker))
    try:
        yield
    finally:
        setattr(PersistentAsyncCaller, _LOOP, staticmethod(_core_loop))


def worker(*arguments: Any) -> None:
    """What such a worker does: as core's."""
    end_with_parent()
    _core_loop(*arguments)


def results_queue(mp_mode: str = "spawn") -> Any:
    """As core's queue for results of saves, one for all; the process that keeps it ends with this one.

    mp_mode: how that is started, at the first call.
    """
    if not _kept:
        manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
        manager.start(end_with_parent)
        _kept.append((manager, manager.Queue()))  # the queue ends with its manager
    return _kept[0][1]


_kept: list[tuple[SyncManager, Any]] = []
