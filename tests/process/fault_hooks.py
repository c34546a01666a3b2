"""Faults that wait until what a test is about has happened: copies reach peers at their own pace."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from world import Hook

PATIENCE_S = 60.0
"""How long a fault waits; after that it strikes all the same, and the test says what is missing."""


@contextlib.contextmanager
def struck_when_sealed(memory: str, iteration: int, copies: int) -> Iterator[None]:
    """A rank kills itself only when `copies` snapshots of `iteration` are sealed in the memory of all nodes.

    Snapshots are sealed and replicated in background threads while training goes on, so the newest iteration that a
    recovery finds depends on how busy the machine is; with this it does not.
    """
    from megatron.core.dist_checkpointing.moe.runtime import faults

    kill = os.kill

    def kill_when_sealed(pid: int, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while number == signal.SIGKILL and sealed(Path(memory), iteration) < copies and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(pid, number)

    with mock.patch.object(faults.os, "kill", kill_when_sealed):
        yield


def once_sealed(memory: Path, iteration: int, copies: int) -> Hook:
    """The hook for a job with this memory."""
    return partial(struck_when_sealed, str(memory), iteration, copies)


def sealed(memory: Path, iteration: int) -> int:
    """How many snapshots of `iteration` lie sealed in the memory of all nodes, replicas included."""
    return len(list(memory.glob(f"*/*/slot-*/segment-*.iter_{iteration:07}-*.json")))
