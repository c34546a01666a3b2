"""What a worker lets its launcher see: that it moves, that it still runs, and whether it left by a fault of its own.

A file of a few bytes in memory that both have mapped. `moved` is called once for each iteration and costs two stores; a
thread says every second that the process still runs, which one that is stopped, or holds the GIL for ever, does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = "MOE_CKPT_HEARTBEATS"
"""Environment variable with the launcher's folder; a process has the file in it that is called like its number."""
BEAT_S = 1.0

_LAYOUT = struct.Struct("<qqq")  # when it moved last, when it was last seen to run, what it does


class Doing(IntEnum):
    """What a worker does. Only one that trains has to make progress; one that lost a peer is not to blame."""

    STARTING = 0
    TRAINING = 1
    LEFT = 2
    LOST_A_PEER = 3


class Beat(NamedTuple):
    """What a worker has said last; times are those of `time.monotonic`, in seconds."""

    moved_s: float
    alive_s: float
    doing: Doing


def stacks_signal() -> int:
    """At which a worker with a heartbeat prints the stacks of all its threads."""
    return int(signal.SIGRTMIN) + 8


class Heartbeat:
    """This process's. folder: of its launcher; None: nobody looks."""

    def __init__(self, folder: str | None) -> None:
        self._memory: mmap.mmap | None = None
        if folder is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):  # without it a launcher sees less
            faulthandler.register(stacks_signal(), file=sys.stderr, all_threads=True)
            descriptor = os.open(Path(folder) / str(os.getpid()), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, self._packed(Doing.STARTING), 0)
                self._memory = mmap.mmap(descriptor, _LAYOUT.size)
            finally:
                os.close(descriptor)
            threading.Thread(target=self._beat, name="moe-ckpt-heartbeat", daemon=True).start()

    def moved(self) -> None:
        """An iteration was trained; from here on the next one is waited for."""
        self._say(Doing.TRAINING)

    def rest(self, *, lost_a_peer: bool) -> None:
        """Training ends here, or begins anew: no progress is due. lost_a_peer: nothing here is to blame."""
        self._say(Doing.LOST_A_PEER if lost_a_peer else Doing.LEFT)

    def _say(self, doing: Doing) -> None:
        if self._memory is not None:
            self._memory[:] = self._packed(doing)

    def _beat(self) -> None:
        while self._memory is not None:
            time.sleep(BEAT_S)
            struct.pack_into("<q", self._memory, 8, time.monotonic_ns())

    @staticmethod
    def _packed(doing: Doing) -> bytes:
        now = time.monotonic_ns()
        return _LAYOUT.pack(now, now, doing)


def read_beat(folder: Path, pid: int) -> Beat | None:
    """What a worker said; None for one that says nothing, or nothing that can be understood."""
    try:
        moved_ns, alive_ns, doing = _LAYOUT.unpack((folder / str(pid)).read_bytes())
        return Beat(moved_ns / 1e9, alive_ns / 1e9, Doing(doing))
    except (OSError, struct.error, ValueError):
        return None


@cache
def own_heartbeat() -> Heartbeat:
    """That of this process."""
    return Heartbeat(os.environ.get(FOLDER))
