"""Nodes that come (back) while training runs wait until it stands at the end of an iteration that is protected.

torch's agents ask their rendezvous whether nodes wait, and start all workers again as soon as some do. Here the agent
of each node first puts a file where its workers look after each iteration; they come to an end together, say so in
another file, and only then the agent hears of the nodes. Where workers do not answer it hears of them all the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.launcher import api as launcher

from megatron.core.dist_checkpointing.moe.standby.joining import FOLDER, Joining

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long nodes wait at most: training may be long in an iteration, or in a save."""


class DeferredNodeCount:
    """In place of a rendezvous handler's `num_nodes_waiting`: 0 until workers stand where they can be stopped."""

    def __init__(self, count: Callable[[], int], joining: Joining, now_s: Callable[[], float] = time.monotonic) -> None:
        self._count, self._joining, self._now_s = count, joining, now_s
        self._since_s: float | None = None
        self._is_stuck = False

    def __call__(self) -> int:
        waiting = self._count()
        if self._joining.is_ready:  # workers have ended for it, whoever waits by now
            return max(1, waiting)
        if not waiting:
            self._since_s = None
            self._forget()
            return 0
        if self._since_s is None:
            self._since_s = self._now_s()
            try:
                self._joining.ask()
            except OSError as error:
                log.warning("workers cannot be asked to make way (%s): nodes wait for %g s", error, PATIENCE_S)
        return waiting if self._now_s() - self._since_s > PATIENCE_S else 0

    def meeting(self) -> None:
        """All nodes meet: workers that start after that were asked nothing yet, whoever waits by then."""
        self._since_s = None
        self._forget()

    def _forget(self) -> None:
        try:
            self._joining.forget()
        except OSError as error:  # on each poll; said once
            if not self._is_stuck:
                log.warning("workers may make way for nodes that no longer wait (%s)", error)
            self._is_stuck = True


@contextlib.contextmanager
def patient_nodes(folder: Path) -> Iterator[None]:
    """In this block agents that torch's launchers make let nodes wait for their workers."""
    own = launcher.LocalElasticAgent

    def made(*arguments: Any, **options: Any) -> Any:
        agent = own(*arguments, **options)
        handler = agent.get_worker_group().spec.rdzv_handler
        deferred, meet = DeferredNodeCount(handler.num_nodes_waiting, Joining(folder)), handler.next_rendezvous

        def next_rendezvous() -> Any:
            deferred.meeting()
            return meet()

        handler.num_nodes_waiting, handler.next_rendezvous = deferred, next_rendezvous
        return agent

    os.environ[FOLDER] = str(folder)
    launcher.LocalElasticAgent = made
    try:
        yield
    finally:
        launcher.LocalElasticAgent = own
        del os.environ[FOLDER]
