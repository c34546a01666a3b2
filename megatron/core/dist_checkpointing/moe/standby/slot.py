"""The worker's end: a standby makes everything ready that needs no rank, and waits for a slot."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..boot_clock import is_there, machine, since_boot_s, started
from ..errors import PeerLost
from .heartbeat import own_heartbeat

log = logging.getLogger(__name__)

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

    def fileno(self) -> int:
        """Of this end, to wait for several."""
        return self._connection.fileno()

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
    with suppress(OSError):  # that of the folder itself
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
LAUNCHER = "MOE_CKPT_LAUNCHER"
"""Environment variable in which our launchers name themselves to ranks: the parent of an orphan is another process."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@cache
def end_with_launcher() -> None:
    """From here on this process ends at once when the launcher that started it does, if one did; so do its forks."""
    if LAUNCHED in os.environ:
        last_words = f"rank {os.environ.get('RANK', '?')}: the launcher of this rank has ended, so it ends too"
        end_with_parent(last_words)
        if _is_orphan():  # since before the parent was looked at
            _end(last_words)
        _end_forks_with_this_process()


def this_launcher() -> str:
    """This process, for `LAUNCHER` of its ranks."""
    return f"{machine()} {os.getpid()} {started(os.getpid())}"


def _is_orphan() -> bool:
    """Whether the launcher that named itself has ended; one outside this container cannot be seen."""
    # Not by the number of the parent: a launcher may be process 1, which adopts orphans.
    where, *process = os.environ.pop(LAUNCHER, "-").split()  # what this process starts has another launcher
    return where == machine() and not is_there((int(process[0]), int(process[1])))


def end_with_parent(last_words: str = "") -> None:
    """From here on this process is killed when the one that started it ends, and says so on standard error."""
    parent = os.getppid()
    with suppress(OSError):  # it has ended already, or the system is too old
        life = os.pidfd_open(parent)
        threading.Thread(target=_watch, args=(parent, life, last_words), name="moe-ckpt-lifeline", daemon=True).start()


def _watch(parent: int, life: int, last_words: str) -> None:
    end = select.poll()
    end.register(life, select.POLLIN)
    if os.getppid() == parent:
        end.poll()
    _end(last_words)


def _end(last_words: str) -> None:
    if last_words:
        with suppress(OSError):
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

    @property
    def began_s(self) -> float:
        """When this process was given its rank, or started with it, by `boot_clock`."""
        return started(os.getpid()) / os.sysconf("SC_CLK_TCK") if self.taken_s is None else self.taken_s

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
        while self._channel is not None and self._channel.descriptors:  # of a copy that came too late
            os.close(self._channel.descriptors.pop())
        signal.signal(signal.SIGINT, interrupt)
        self._sit(message["slot"])

    def _say_ready(self, *, copies: bool) -> None:
        assert self._channel is not None
        self._channel.send({"version": VERSION, "pid": os.getpid(), "ready": True, "copies": copies})

    def _next_message(self) -> Message:
        """The launcher sends one at a time, and waits for what comes of it: a slot behind a copy that came too late
        stands for both. Raises ConnectionError."""
        assert self._channel is not None
        while not (messages := self._channel.receive(LOOK_S)):
            pass
        return next((one for one in messages if "slot" in one), messages[0])

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

    @property
    def finish_s(self) -> float:
        """For how long connections are kept when others are lost; 0 unless it `finishes_first`, and keeps its slot."""
        return FINISH_S if self.keeps and not self._interruptible.is_set() else 0.0

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
                    try:
                        hang_up()
                    except Exception:  # a race with the main thread, which closes them too; the slot is still to come
                        log.exception("connections could not be closed for a restart of training")
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
