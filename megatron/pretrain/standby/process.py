"""A worker as its launcher sees it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from megatron.core.dist_checkpointing.moe.standby.slot import DESCRIPTOR, LAUNCHER_VERSION, VERSION, Channel, Message

OF_RANKS = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    " MASTER_ADDR MASTER_PORT".split()
)
"""Environment variables of ranks. A launcher may have been given some, by `export RANK=0` or an operator of Kubernetes:
standbys that inherited them would not wait."""
COPY_S = 5.0
"""How long a standby may take to copy itself, which takes it some hundredths of a second."""
_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


class SlotProcess:
    """A process of the training script, waiting for a slot or in one.

    Attributes:
        pid: Its number.
        is_ready: It has done all that does not depend on a rank.
        is_training: It has a slot, and trains iterations that are new.
        stays: It keeps its slot when it loses a peer.
        has_left: It has lost a peer, and waits for the rank that it gets next.
        takes_slots: Its script knows of slots.
        will_copy: It has said that it can be copied for each slot once it is ready.
        copies: It is ready, and can be copied.
        finish_s: For how long it continues with an iteration that it runs again, now that the launcher restarts
        training. problem: Why it cannot be assigned; empty if it can. is_silent: It has closed its end.
    """

    def __init__(self, process: psutil.Process, channel: Channel, *, is_idle: bool = False) -> None:
        self._process, self._channel, self._is_idle = process, channel, is_idle
        self.pid = process.pid
        self.is_ready = self.is_training = self.takes_slots = self.stays = self.has_left = False
        self.will_copy = self.copies = self.is_silent = False
        self.finish_s = 0.0
        self.problem = ""

    @classmethod
    def started(cls, command: Sequence[str], environment: Mapping[str, str], *, idle: bool) -> SlotProcess:
        """A new one.

        Args:
            command: The training script and its arguments.
            environment: All variables of the process.
            idle: As a standby: without a rank, and only where nothing else wants to run, until it has a slot; as ever
                where the system would not undo that.
        """
        if idle:
            environment = {name: value for name, value in environment.items() if name not in OF_RANKS}
        here, there = socket.socketpair()
        with there:
            own = {DESCRIPTOR: str(there.fileno()), LAUNCHER_VERSION: str(VERSION)}
            process = psutil.Popen(command, env={**environment, **own}, pass_fds=[there.fileno()])
        is_idle = idle and may_leave_idle_class()
        if is_idle:
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return cls(process, Channel(here), is_idle=is_idle)

    def copy(self) -> SlotProcess | None:
        """A copy of this standby, which waits as it does; None where there is none within `COPY_S`."""
        self.hurry()  # it sleeps from here on, but for the moments that a copy takes
        here, there = socket.socketpair()
        channel, until = Channel(here), time.monotonic() + COPY_S
        with there, contextlib.suppress(OSError, psutil.NoSuchProcess):
            adopt_orphans()
            self._channel.send({"copy": True}, there.fileno())
            there.close()
            while (left_s := until - time.monotonic()) > 0:
                for message in channel.receive(left_s):
                    copy = SlotProcess(psutil.Process(message["pid"]), channel)
                    copy._note(message)
                    return copy
        channel.close()
        self.copies = False
        return None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code: int | None = None
        with contextlib.suppress(psutil.TimeoutExpired):
            code = self._process.wait(0)
        return code

    def hear(self) -> None:
        """Note what it has said."""
        try:
            messages = self._channel.receive()
        except ConnectionError:
            self.is_silent = True
            return  # its exit code says the rest
        for message in messages:
            self._note(message)

    def _note(self, message: Message) -> None:
        if "version" in message:
            self.takes_slots = message["version"] == VERSION
            if not self.takes_slots:
                self.problem = f"it takes version {message['version']} of messages, and this launcher has {VERSION}"
        self.is_ready = self.is_ready or "ready" in message
        self.is_training = self.is_training or "training" in message
        self.stays = self.stays or "stays" in message
        self.has_left = self.has_left or "left" in message
        self.will_copy = self.will_copy or message.get("will_copy", False)
        self.copies = self.copies or message.get("copies", False)
        self.finish_s = message.get("finishes", self.finish_s)

    def sit(self, environment: Mapping[str, str]) -> None:
        """Tell it its rank; it starts training. Its end, if it has ended, is seen by `exit_code`."""
        self.hurry()
        self.has_left, self.is_training, self.finish_s = False, False, 0.0
        self._say({"slot": dict(environment)})

    def call_off(self) -> None:
        """Tell it that training begins again: it releases other ranks and leaves its slot, to wait for the next."""
        self._say({"leave": True})

    def _say(self, message: Message) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.send(message)

    def hurry(self) -> None:
        """Let a standby run as everybody does: others wait for it."""
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
        except psutil.TimeoutExpired:
            return False
        self._channel.close()
        return True


def await_word(processes: Iterable[SlotProcess], timeout_s: float) -> None:
    """Wait until one of them says something or closes its end.

    Args:
        processes: The processes.
        timeout_s: How long at most.
    """
    words = select.poll()
    for process in processes:
        if not process.is_silent:
            words.register(process._channel, select.POLLIN)
    words.poll(timeout_s * 1000)


@cache
def adopt_orphans() -> None:
    """From here on this process is the parent of those whose own has ended, among them copies of standbys."""
    if (error := ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), f"prctl(PR_SET_CHILD_SUBREAPER) gives {error}")


def let_orphans_go(own: Container[int]) -> None:
    """Take note of the ends of adopted processes, if any are adopted, so that the system can forget them. own: those
    whose exit codes are asked for otherwise."""
    if not adopt_orphans.cache_info().currsize:
        return
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


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
