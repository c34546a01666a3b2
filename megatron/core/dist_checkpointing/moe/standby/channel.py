"""Messages between a launcher and one of its workers: a line of JSON each, over a pair of sockets."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

VERSION = 2
"""Of the messages; a launcher does not slot a worker that speaks another."""
DESCRIPTOR = "MOE_CKPT_SEAT"
"""Environment variable with the number of the worker's descriptor."""
LAUNCHER_VERSION = "MOE_CKPT_SEAT_VERSION"
"""Environment variable with the version that the launcher speaks."""

Message = dict[str, Any]


class Channel:
    """One end. Raises ConnectionError from any call once the other end is gone.

    Attributes:
        descriptors: Those that came with messages, oldest first; whoever takes one out closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._text = connection, b""
        self.descriptors: list[int] = []
        connection.setblocking(False)
        self._poll = select.poll()  # `select` takes no descriptor from 1024 on
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send without waiting; messages are far smaller than what a socket holds.

        Args:
            message: Goes as one line of JSON.
            descriptor: One that the other process gets a copy of, if any.

        Raises:
            ConnectionError: The other process has ended.
        """
        text = json.dumps(message).encode() + b"\n"
        if descriptor is None:
            self._connection.sendall(text)
        else:
            socket.send_fds(self._connection, [text], [descriptor])

    def receive(self, timeout_s: float = 0.0) -> list[Message]:
        """What has come, oldest first; waits for it `timeout_s` at most. Raises ConnectionError."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        while self._poll.poll(0):
            part, descriptors, *_ = socket.recv_fds(self._connection, 65536, 8, socket.MSG_CMSG_CLOEXEC)
            self.descriptors += descriptors
            if not part:
                if b"\n" in self._text:
                    break  # first what was said
                raise ConnectionResetError("the other end of the slot's socket is closed")
            self._text += part
        *lines, self._text = self._text.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


# Standbys that are copied: a process that has everything ready is forked for each slot that has to be filled.

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


# Nothing outlives its job: a rank ends with its launcher, and processes that it has started end with it.
#
# The system is asked for the end of one process by another (`pidfd_open`). It would also send a signal by itself
# (PR_SET_PDEATHSIG), but does so when the *thread* ends that made the process; that is used for forks of a main thread.

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Environment variable of processes that torchrun has started, or a launcher made of it."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@cache
def end_with_launcher() -> None:
    """From here on this process ends at once when the launcher that started it does, if one did; so do its forks."""
    if LAUNCHED in os.environ:
        end_with_parent(f"rank {os.environ.get('RANK', '?')}: the launcher of this rank has ended, so it ends too")
        _end_forks_with_this_process()


def end_with_parent(last_words: str = "") -> None:
    """From here on this process is killed when the one that started it ends, and says so on standard error."""
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has ended already, or the system is too old
        life = os.pidfd_open(parent)
        threading.Thread(target=_watch, args=(parent, life, last_words), name="moe-ckpt-lifeline", daemon=True).start()


def _watch(parent: int, life: int, last_words: str) -> None:
    end = select.poll()
    end.register(life, select.POLLIN)
    if os.getppid() == parent:
        end.poll()
    if last_words:
        with contextlib.suppress(OSError):
            os.write(2, f"{last_words}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def _end_forks_with_this_process() -> None:
    by_main = False

    def note() -> None:
        nonlocal by_main
        by_main = threading.current_thread() is threading.main_thread()

    def end_with_main_thread() -> None:
        if by_main:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    os.register_at_fork(before=note, after_in_child=end_with_main_thread)
