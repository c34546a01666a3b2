"""The worker's end: a standby makes everything ready that needs no rank, and waits for a seat."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from functools import cache

from .channel import DESCRIPTOR, VERSION, Channel

LOOK_S = 60.0
"""How often a standby that hears nothing looks again; the end of its launcher it notices at once."""


class Seat:
    """This process's, whoever started it.

    Attributes:
        taken_s: When a standby was given a rank, in seconds since 1970; None in a process that was started with one.
    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel, self._is_training = channel, False
        self.taken_s: float | None = None

    @classmethod
    def from_environment(cls) -> Seat:
        """As the launcher has handed it to this process; its children do not have it."""
        number = os.environ.pop(DESCRIPTOR, None)
        if number is None:
            return cls(None)
        os.set_inheritable(int(number), False)
        return cls(Channel(socket.socket(fileno=int(number))))

    def take(self, warm_up: Callable[[], None] | None = None) -> None:
        """See `take_seat`."""
        if self._channel is None:
            return
        waits = "RANK" not in os.environ
        try:
            self._channel.send({"version": VERSION})
            if waits:
                self._wait(self._channel, warm_up)
        except ConnectionError as error:
            self._channel = None
            if waits:
                raise SystemExit(0) from error  # nobody will ever call

    def _wait(self, channel: Channel, warm_up: Callable[[], None] | None) -> None:
        # Ctrl-C goes to all processes of a terminal; the launcher ends those that wait.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if warm_up is not None:
            warm_up()
        channel.send({"ready": True})
        messages = channel.receive(LOOK_S)
        while not messages:
            messages = channel.receive(LOOK_S)
        signal.signal(signal.SIGINT, interrupt)
        self.taken_s = time.time()
        os.environ.update(messages[0]["seat"])

    def training(self) -> None:
        """New iterations are trained here: from now on standbys are in nobody's way."""
        if self._channel is not None and not self._is_training:
            self._is_training = True
            try:
                self._channel.send({"training": True})
            except ConnectionError:
                self._channel = None  # training goes on without a launcher


@cache
def own_seat() -> Seat:
    """That of this process."""
    return Seat.from_environment()


def take_seat(warm_up: Callable[[], None] | None = None) -> Seat:
    """Wait for a rank if this process was started without one, and put it into the environment as torchrun does.

    To be called once imports are done and before anything asks for the rank.

    Args:
        warm_up: What else can be done before there is a rank; skipped in a process that has one. What goes wrong in it
            goes wrong again in training, so better let it pass.

    Raises:
        SystemExit: The launcher has ended.
    """
    seat = own_seat()
    seat.take(warm_up)
    return seat
