"""Standbys that are copied: a process that has everything ready is forked for each seat that has to be filled."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from pathlib import Path

from .channel import Channel

ADOPTED_S = 5.0
"""How long the launcher may take to become the parent of a copy; the system does that as the process between ends."""
DEVICES = Path("/dev")
_POLL_S = 0.001


def may_be_copied() -> bool:
    """Whether a fork of this process would be whole: no other thread runs in it, and it uses no GPU."""
    return len(os.listdir("/proc/self/task")) == 1 and not any(map(_is_gpu, Path("/proc/self/fd").iterdir()))


def can_be_copied_later() -> bool:
    """Whether that can be expected of a standby that has just begun: this machine has no GPU that it would use."""
    return not any(DEVICES.glob("nvidia[0-9]*"))


def _is_gpu(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):  # that of the folder itself
        return os.readlink(descriptor).startswith("/dev/nvidia")
    return False


def copied(descriptor: int) -> Channel | None:
    """Fork this process: in the copy its channel to the launcher, over this socket; None in the original.

    The launcher, which is the parent of the original and adopts orphans, becomes that of the copy, so it sees how the
    copy ends. A copy that somebody else adopts ends at once.
    """
    launcher = os.getppid()
    gc.freeze()  # else the next collection writes to each page that the two share
    if between := os.fork():
        os.close(descriptor)
        os.waitpid(between, 0)
        return None
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    until = time.monotonic() + ADOPTED_S
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(_POLL_S)
    if os.getppid() != launcher:
        os._exit(1)
    return Channel(socket.socket(fileno=descriptor))
