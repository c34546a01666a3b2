"""A worker as its launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from megatron.core.dist_checkpointing.moe.seats.channel import DESCRIPTOR, LAUNCHER_VERSION, VERSION, Channel, Message


class SeatProcess:
    """A process of the training script, waiting for a seat or in one.

    Args:
        command: Starts it.
        environment: All of it.
        idle: Run only where nothing else wants to, until it has a seat; as ever where the system would not undo that.

    Attributes:
        pid: Its number.
        is_ready: It has done all that does not depend on a rank.
        is_training: It has a seat, and trains iterations that are new.
        stays: It keeps its seat when it loses a peer.
        has_left: It has lost a peer, and waits for the rank that it gets next.
        takes_seats: Its script knows of seats.
        problem: Why it cannot be seated; empty if it can.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, idle: bool) -> None:
        here, there = socket.socketpair()
        with there:
            own = {DESCRIPTOR: str(there.fileno()), LAUNCHER_VERSION: str(VERSION)}
            self._process = subprocess.Popen(command, env={**environment, **own}, pass_fds=[there.fileno()])
        self._channel = Channel(here)
        self.pid = self._process.pid
        self._is_idle = idle and may_leave_idle_class()
        if self._is_idle:
            os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))
        self.is_ready = self.is_training = self.takes_seats = self.stays = self.has_left = False
        self.problem = ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def hear(self) -> None:
        """Note what it has said."""
        try:
            messages = self._channel.receive()
        except ConnectionError:
            return  # its exit code says the rest
        for message in messages:
            self._note(message)

    def _note(self, message: Message) -> None:
        if "version" in message:
            self.takes_seats = message["version"] == VERSION
            if not self.takes_seats:
                self.problem = f"it takes version {message['version']} of messages, and this launcher has {VERSION}"
        self.is_ready = self.is_ready or "ready" in message
        self.is_training = self.is_training or "training" in message
        self.stays = self.stays or "stays" in message
        self.has_left = self.has_left or "left" in message

    def sit(self, environment: Mapping[str, str]) -> None:
        """Tell it its rank; it starts training. Its end, if it has ended, is seen by `exit_code`."""
        self._leave_idle_class()
        self.has_left = self.is_training = False
        self._say({"seat": dict(environment)})

    def call_off(self) -> None:
        """Tell it that training begins anew: it lets go of other ranks and leaves its seat, to wait for the next."""
        self._say({"leave": True})

    def _say(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.send(message)

    def _leave_idle_class(self) -> None:
        if self._is_idle:
            for thread in Path(f"/proc/{self.pid}/task").glob("*"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
            self._is_idle = False

    def end(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._channel.close()
        return True


@cache
def may_leave_idle_class() -> bool:
    """Whether the system lets this user's processes back from the scheduling class for idle time, as root or with a
    limit of 20 or more for `ulimit -e`; tried with a thread."""
    allowed: list[bool] = []

    def attempt() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        try:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        except PermissionError:
            return
        allowed.append(True)

    thread = threading.Thread(target=attempt, name="try-idle-class")
    thread.start()
    thread.join()
    return bool(allowed)
