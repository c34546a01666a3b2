"""What a worker lets its launcher see: that it moves, that it still runs, and whether it left by a fault of its own.

A file of a few bytes in memory that both have mapped. `moved` is called once for each iteration and costs two stores. A
thread says every second that the process still runs, which one that is stopped, or holds the GIL for ever, does not. It
also says where the main thread is: ranks that wait in different collectives for each other all run, and only that tells
them apart.
"""

from __future__ import annotations

import faulthandler
import logging
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
from types import FrameType
from typing import NamedTuple

log = logging.getLogger(__name__)

FOLDER = "MOE_CKPT_HEARTBEATS"
"""Environment variable with the launcher's folder; a process has the file in it that is called like its number."""
BEAT_S = 1.0

_LAYOUT = struct.Struct("<qqq")  # when it moved last, when it was last seen to run, what it does
_PLACE = struct.Struct("<160s")  # behind it: where the main thread is, UTF-8, padded with zeros
_SIZE = _LAYOUT.size + _PLACE.size


class Activity(IntEnum):
    """What a worker does. One that loads, trains, or has come back to where all ranks stand, has to make progress; one
    that lost a peer, or ends as all do, is not to blame."""

    STARTING = 0
    TRAINING = 1
    LEFT = 2
    LOST_A_PEER = 3
    REJOINED = 4
    LOADING = 5


class HeartbeatReading(NamedTuple):
    """What a worker has said last; times are those of `time.monotonic`, in seconds. place: as `place_of` has it."""

    moved_s: float
    alive_s: float
    doing: Activity
    place: str = ""


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: its innermost function, and the line of Megatron that it was called from, if any was.

    Such as `barrier, called by training_log (megatron/training/training.py:2823)`.
    """
    if frame is None:
        return ""
    innermost, caller = frame.f_code.co_name, frame.f_back
    while caller is not None:
        module = str(caller.f_globals.get("__name__", ""))
        if module.startswith(_CALLERS) and not module.startswith(_FORWARDING):
            file = module.replace(".", "/")
            return f"{innermost}, called by {caller.f_code.co_name} ({file}.py:{caller.f_lineno})"
        caller = caller.f_back
    return innermost


_CALLERS = ("megatron.", "pretrain_gpt", "__main__")
_FORWARDING = ("megatron.core.timers", "megatron.core.dist_checkpointing.moe.replication")
"""They wait in a line that all callers share."""


def stacks_signal() -> int:
    """At which a worker with a heartbeat prints the stacks of all its threads."""
    return int(signal.SIGRTMIN) + 8


class Heartbeat:
    """This process's. folder: of its launcher; None: nobody looks."""

    def __init__(self, folder: str | None) -> None:
        self._memory: mmap.mmap | None = None
        self._doing, self._moved_s = Activity.STARTING, time.monotonic()
        if folder is None:
            return
        try:
            faulthandler.register(stacks_signal(), file=sys.stderr, all_threads=True)
            descriptor = os.open(Path(folder) / str(os.getpid()), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, self._packed(self._doing) + bytes(_PLACE.size), 0)
                self._memory = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
            threading.Thread(target=self._beat, name="moe-ckpt-heartbeat", daemon=True).start()
        except (OSError, ValueError, AttributeError) as error:
            log.error("no heartbeat (%s): the launcher sees neither a hang nor an error of this rank", error)

    def loads(self) -> None:
        """From here on the first iteration is waited for, or the end of a recovery."""
        self._say(Activity.LOADING)

    def moved(self) -> None:
        """An iteration was trained; from here on the next one is waited for."""
        self._say(Activity.TRAINING)

    def rejoined(self) -> None:
        """After a fault all ranks stand at one iteration again; from here on the next one is waited for.

        One that ran iterations again trains already.
        """
        self._say(Activity.TRAINING if self._doing is Activity.TRAINING else Activity.REJOINED)

    def rest(self, *, lost_a_peer: bool) -> None:
        """Training ends here, or begins again: no progress is due. lost_a_peer: nothing here is to blame, whatever else
        fails until something is loaded or trained again."""
        if self._doing is not Activity.LOST_A_PEER:
            self._say(Activity.LOST_A_PEER if lost_a_peer else Activity.LEFT)

    @property
    def stood_s(self) -> float:
        """Seconds since this process made progress."""
        return time.monotonic() - self._moved_s

    def _say(self, doing: Activity) -> None:
        self._doing = doing
        if doing not in (Activity.LEFT, Activity.LOST_A_PEER):
            self._moved_s = time.monotonic()
        if self._memory is not None:
            self._memory[: _LAYOUT.size] = self._packed(doing)

    def _beat(self) -> None:
        main = threading.main_thread().ident
        while self._memory is not None:
            time.sleep(BEAT_S)
            place = place_of(sys._current_frames().get(main or 0)).encode()[: _PLACE.size]
            _PLACE.pack_into(self._memory, _LAYOUT.size, place)
            struct.pack_into("<q", self._memory, 8, time.monotonic_ns())

    @staticmethod
    def _packed(doing: Activity) -> bytes:
        now = time.monotonic_ns()
        return _LAYOUT.pack(now, now, doing)


def read_beat(folder: Path, pid: int) -> HeartbeatReading | None:
    """What a worker said; None for one that says nothing, or nothing that can be understood.

    Args:
        folder: Of the heartbeats of this node.
        pid: Of the worker.
    """
    try:
        with (folder / str(pid)).open("rb") as file:
            content = file.read(_SIZE)
        moved_ns, alive_ns, doing = _LAYOUT.unpack_from(content)
        place = content[_LAYOUT.size :].rstrip(b"\0").decode(errors="replace")
        return HeartbeatReading(
            moved_ns / 1e9, alive_ns / 1e9, Activity(doing), "".join(filter(str.isprintable, place))
        )
    except (OSError, struct.error, ValueError):
        return None


@cache
def own_heartbeat() -> Heartbeat:
    """That of this process."""
    return Heartbeat(os.environ.get(FOLDER))
