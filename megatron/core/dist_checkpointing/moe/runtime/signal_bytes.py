"""Signals as bytes that a thread can wait for, while the main thread is inside a call that runs no Python code."""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from contextlib import suppress

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
