"""The worker's end: a standby makes everything ready that needs no rank, and waits for a slot."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..boot_clock import since_boot_s
from ..errors import PeerLost
from .channel import (
    DESCRIPTOR,
    LAUNCHER_VERSION,
    VERSION,
    Channel,
    Message,
    can_be_copied_later,
    copied,
    end_with_launcher,
    may_be_copied,
)
from .heartbeat import own_heartbeat

OWN_NAME = Path("/proc/self/comm")
PROCESS_NAME = "rank-"
"""A standby is called this and its rank once it has one, in `ps -o pid,comm` too; its environment in /proc has none."""
FINISH_S = 60.0
"""How long an iteration that is run again may continue when others have lost a rank: its ranks need none of them."""
LOOK_S = 60.0
"""How often a standby that hears nothing looks again; the end of its launcher it notices at once."""


class WorkerSlot:
    """This process's, whoever started it.

    Attributes:
        taken_s: When this process was given its rank, by `boot_clock`; None where it was started with it.
        may_stay: Whether the launcher lets a process keep its slot that lost a peer.
        is_called_off: Whether the launcher has said since then that training begins again.
    """

    def __init__(self, channel: Channel | None, *, may_stay: bool = False) -> None:
        self._channel, self._is_training = channel, False
        self._slots: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._listener: threading.Thread | None = None
        self.taken_s: float | None = None
        self.may_stay, self.is_called_off = may_stay and channel is not None, False
        self._interruptible = threading.Event()
        self._interruptible.set()

    @classmethod
    def from_environment(cls) -> WorkerSlot:
        """As the launcher has handed it to this process; its children do not have it."""
        number, version = os.environ.pop(DESCRIPTOR, None), os.environ.pop(LAUNCHER_VERSION, None)
        if number is None:
            return cls(None)
        os.set_inheritable(int(number), False)
        return cls(Channel(socket.socket(fileno=int(number))), may_stay=version == str(VERSION))

    def take(self, warm_up: Callable[[], None] | None = None, *, copies: bool = True) -> None:
        """See `wait_for_rank`."""
        if self._channel is None:
            return
        waits = "RANK" not in os.environ
        try:
            self._channel.send({"version": VERSION, "will_copy": waits and copies and can_be_copied_later()})
            if waits:
                self._wait(warm_up, copies)
        except ConnectionError as error:
            self._channel, self.may_stay = None, False
            if waits:
                raise SystemExit(0) from error  # nobody will ever call

    def _wait(self, warm_up: Callable[[], None] | None, copies: bool) -> None:
        # Ctrl-C goes to all processes of a terminal; the launcher ends those that wait.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if warm_up is not None:
            warm_up()
        self._say_ready(copies=copies and may_be_copied())
        while "slot" not in (message := self._next_message()):
            assert self._channel is not None
            if (channel := copied(self._channel.descriptors.pop(0))) is not None:
                self._channel.close()  # here is the copy: that one is the original's
                self._channel = channel
                self._say_ready(copies=False)
        signal.signal(signal.SIGINT, interrupt)
        self._sit(message["slot"])

    def _say_ready(self, *, copies: bool) -> None:
        assert self._channel is not None
        self._channel.send({"version": VERSION, "pid": os.getpid(), "ready": True, "copies": copies})

    def _next_message(self) -> Message:
        """The launcher sends one at a time, and waits for what comes of it. Raises ConnectionError."""
        assert self._channel is not None
        while not (messages := self._channel.receive(LOOK_S)):
            pass
        return messages[0]

    def training(self) -> None:
        """New iterations are trained here: from now on standbys are in nobody's way."""
        if not self._is_training:
            self._is_training = True
            self._say({"training": True})

    def keep(self, hang_up: Callable[[], object]) -> None:
        """This process is going to stay when it loses a peer, where the launcher allows it.

        hang_up: Closes connections to other ranks, whatever this process is doing; called by another thread when the
            launcher says that training begins again.
        """
        if self.may_stay and self._listener is None:
            self._listener = threading.Thread(target=self._listen, args=[hang_up], name="moe-ckpt-slot", daemon=True)
            self._listener.start()
            self._say({"stays": True})

    @property
    def keeps(self) -> bool:
        """Whether this process stays when it loses a peer, and hears when training begins again."""
        return self.may_stay and self._listener is not None

    def finishes_first(self, finishes: bool) -> None:
        """Whether connections are kept for `FINISH_S` when training begins again, or until this is taken back: whoever
        asks looks at `is_called_off` between two iterations."""
        (self._interruptible.clear if finishes else self._interruptible.set)()

    def leave(self, timeout_s: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        """This process has lost a peer and stays: wait for the rank that it gets now, and put it into the environment.

        Args:
            timeout_s: How long it waits.
            meanwhile: Called first, while the launcher acts on it.

        Raises:
            PeerLost: The launcher has ended, or does not answer in time.
        """
        self._is_training = False
        self._say({"left": True})
        meanwhile()
        try:
            message = self._slots.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(f"launcher did not let this rank resume within {timeout_s:g} s; exiting") from None
        if message is None:
            raise PeerLost("launcher died while this rank was waiting to resume; exiting")
        self._sit(message)
        own_heartbeat().loads()

    def _listen(self, hang_up: Callable[[], object]) -> None:
        assert self._channel is not None
        while True:
            try:
                messages = self._channel.receive(LOOK_S)
            except ConnectionError:
                self.may_stay = False
                self._slots.put(None)
                return
            for message in messages:
                if "leave" in message:
                    self.is_called_off = True
                    self._give_back()
                    if not self._interruptible.is_set():
                        self._say({"finishes": FINISH_S})
                        self._interruptible.wait(FINISH_S)
                    hang_up()
                elif "slot" in message:
                    self.is_called_off = False
                    self._slots.put(message["slot"])

    def _give_back(self) -> None:
        """A slot that was not taken yet is none any more: this process still waits for one."""
        with suppress(queue.Empty):
            self._slots.get_nowait()
            self._say({"left": True})

    def _sit(self, environment: Message) -> None:
        self.taken_s = since_boot_s()
        os.environ.update(environment)
        with suppress(OSError):  # people and `ps` can live without
            OWN_NAME.write_text(PROCESS_NAME + environment["RANK"])

    def _say(self, message: Message) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ConnectionError:
                self.may_stay = False  # training continues without a launcher


@cache
def own_slot() -> WorkerSlot:
    """That of this process."""
    return WorkerSlot.from_environment()


def wait_for_rank(warm_up: Callable[[], None] | None = None, *, copies: bool = True) -> WorkerSlot:
    """Wait for a rank if this process was started without one, and put it into the environment as torchrun does.

    To be called once imports are done and before anything asks for the rank.

    Args:
        warm_up: What else can be done before there is a rank; skipped in a process that has one. What goes wrong in it
            goes wrong again in training, so better let it pass.
        copies: Whether a standby may be copied (`os.fork`) for each slot that it is needed for, in place of a start for
            each. None is that has several threads, or a GPU.

    Raises:
        SystemExit: The launcher has ended.
    """
    slot = own_slot()
    slot.take(warm_up, copies=copies)
    own_heartbeat()  # its launcher sees from here on that it runs
    end_with_launcher()
    return slot
