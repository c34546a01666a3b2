"""SIGTERM between two phases of a step."""

from __future__ import annotations

import os
import signal
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
        if os.getpid() == self._process:
            self._requested = True
        else:  # a forked helper, such as a reader of data, ends at once
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
