"""SIGTERM between two phases of a step."""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from contextlib import suppress
from types import FrameType

from ..errors import Terminated


class Termination:
    """SIGTERM, noted and acted on between the phases of a step, so that state can be put aside before the end.

    A launcher sends it to all ranks when one has failed, and kills those that are still there after a while.
    """

    def __init__(self) -> None:
        self._requested, self._process = False, 0

    def install(self) -> None:
        """Catch the signal from here on, unless a handler is there already, which has its own idea of the end.

        Called by the main thread.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # Before the handler is there, which compares it: a signal may come right after.
            self._process = os.getpid()
            signal.signal(signal.SIGTERM, self._on_signal)

    def uninstall(self) -> None:
        """Let the signal end this process again; nothing happens where it was not caught."""
        if self.is_installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @property
    def is_installed(self) -> bool:
        """Whether this object handles the signal now."""
        return self._process == os.getpid() and signal.getsignal(signal.SIGTERM) == self._on_signal

    @property
    def is_requested(self) -> bool:
        """Whether the signal has come."""
        return self._requested

    def check(self) -> None:
        """Raises Terminated when the signal has come."""
        if self._requested:
            raise Terminated("told to end by SIGTERM; leaving, so that the job can be restarted")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Only a flag: a handler runs between any two bytecodes, also where a lock is held or a file half written.
        if os.getpid() == self._process:
            self._requested = True
        else:  # a forked helper, such as a reader of data, ends at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


# Signals as bytes that a thread can wait for, while the main thread is inside a call that runs no Python code.

_ALL: weakref.WeakSet[SignalBytes] = weakref.WeakSet()


def _leave_in_child() -> None:
    # A forked helper, such as a reader of data, would tell its parent of signals that it gets itself.
    for pair in list(_ALL):
        pair.forget()


os.register_at_fork(after_in_child=_leave_in_child)


class SignalBytes:
    """The numbers of signals that have a handler in Python, as they come; from `install` to `uninstall`.

    A descriptor that others had set for the same purpose gets them too.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        # Python's handler in C writes to it, and must not wait where nobody reads.
        for end in (self.reader, self._writer):
            end.setblocking(False)
        self._before: int | None = None

    def install(self) -> None:
        """From here on, where this is the main thread; Python lets no other one do it."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            _ALL.add(self)

    def read(self) -> bytes:
        """The signals that have come since the last call."""
        try:
            found = self.reader.recv(4096)
        except BlockingIOError:
            return b""
        if self._before is not None and self._before >= 0:
            with suppress(OSError):  # it was closed meanwhile
                os.write(self._before, found)
        return found

    def uninstall(self) -> None:
        """Whoever was told of signals before is again. For the thread that installed it."""
        if self._before is not None:
            current = signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
            if current != self._writer.fileno():  # set by somebody else, who is still there
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._before = None
        _ALL.discard(self)
        self.reader.close()
        self._writer.close()

    def forget(self) -> None:
        """In a forked child: its signals are no business of its parent's."""
        with suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
        self._before = None
        self.reader.close()
        self._writer.close()
