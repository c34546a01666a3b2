"""What ends a process at a point of an iteration: faults that are injected, once per job, and SIGTERM; no torch."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from ..errors import MoECheckpointError, Terminated, UsageError
from ..storage.system import sync_directory

log = logging.getLogger(__name__)


class Phase(Enum):
    """The points of an iteration at which a fault can strike."""

    START = "start"
    """Before the forward pass."""
    FORWARD_BACKWARD = "forward-backward"
    """After forward, backward and gradient reduction, before the optimizer step."""
    STEP = "step"
    """After the optimizer step."""
    SAVE = "save"
    """Right after a checkpoint save returned or was scheduled."""
    END = "end"
    """At the end of the iteration, when its numbers are written down."""


@dataclass(frozen=True)
class FaultPoint:
    """Where to strike: a global rank, an iteration (from 1), a phase of it."""

    rank: int
    iteration: int
    phase: Phase = Phase.START

    def __str__(self) -> str:
        return f"{self.rank}@{self.iteration}:{self.phase.value}"


def parse_fault(text: str) -> FaultPoint:
    """Read `RANK@ITER[:PHASE]`; the phase is `start` if not given. Raises UsageError for anything else."""
    found = re.fullmatch(r"([0-9]+)@([0-9]+)(?::(.*))?", text)
    phases = {phase.value: phase for phase in Phase}
    name = Phase.START.value if found is None or found[3] is None else found[3]
    if found is None or name not in phases:
        raise UsageError(
            f"fault {text!r} is not RANK@ITER[:PHASE], for example 2@7:step; the phases are {', '.join(phases)}"
        )
    if int(found[2]) == 0:
        raise UsageError(f"fault {text!r} names iteration 0, but iterations count from 1; use {found[1]}@1:{name}")
    return FaultPoint(int(found[1]), int(found[2]), phases[name])


def check_fault_ranks(points: Collection[FaultPoint], world_size: int) -> None:
    """Refuse points of ranks that the job does not have.

    Args:
        points: Where to strike, of all ranks.
        world_size: Number of ranks.

    Raises:
        UsageError: Names the point.
    """
    for point in points:
        if point.rank >= world_size:
            raise UsageError(f"fault {point} names rank {point.rank}, but the ranks are 0 to {world_size - 1}")


def kill_self() -> None:
    """End this process as a crash does: nothing runs after it, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """Strikes at the points of this rank, each at most once per job.

    Args:
        points: Where to strike, of all ranks.
        rank: This rank.
        ledger_dir: A directory that the job's restarts share and other jobs do not. A point is recorded there, durably,
            before it strikes, so that the restarted worker continues. Without one, a point strikes once per process.
        kill: Ends the process.

    Raises:
        MoECheckpointError: The directory cannot be made.
    """

    def __init__(
        self,
        points: Collection[FaultPoint],
        rank: int,
        ledger_dir: Path | None,
        kill: Callable[[], None] = kill_self,
    ) -> None:
        self._waiting = {point for point in points if point.rank == rank}
        self._rank, self._ledger_dir, self._kill = rank, ledger_dir, kill
        if self._waiting and ledger_dir is not None:
            try:
                ledger_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unrecordable(ledger_dir, error) from error

    def reached(self, iteration: int, phase: Phase) -> None:
        """Training has come to a point; does not return if a fault is due here.

        Args:
            iteration: In which it is, from 1.
            phase: Of that iteration.

        Raises:
            MoECheckpointError: The point cannot be recorded; then it does not strike.
        """
        point = FaultPoint(self._rank, iteration, phase)
        if point not in self._waiting:
            return
        # Without a ledger this alone keeps it from striking twice in this process.
        self._waiting.discard(point)
        if self._ledger_dir is None or _record(self._ledger_dir, point):
            self._kill()


def fault_injector(points: Sequence[str], rank: int, job_id: str) -> FaultInjector:
    """What it fired is remembered across restarts of the job.

    Args:
        points: As `parse_fault` reads them.
        rank: This rank.
        job_id: Of the job.
    """
    parsed = [parse_fault(text) for text in points]
    ledger = Path(tempfile.gettempdir()) / f"moe-ckpt-faults-{job_id}"
    return FaultInjector(parsed, rank, ledger)


def _record(ledger_dir: Path, point: FaultPoint) -> bool:
    """Record `point` durably; False if it was recorded before."""
    path = ledger_dir / f"fired-{point.rank}-{point.iteration}-{point.phase.value}"
    try:
        # "x": whoever makes the file strikes, and nobody after it.
        with path.open("x") as file:
            file.write(f"{point}\n")
            file.flush()
            os.fsync(file.fileno())
        # The file's name is synced apart from its content: without it a node that goes down here would strike again.
        sync_directory(ledger_dir)
    except FileExistsError:
        log.info("the fault %s was injected before, as %s says: remove that to have it again", point, path)
        return False
    except OSError as error:
        raise _unrecordable(ledger_dir, error) from error
    return True


def _unrecordable(ledger_dir: Path, error: OSError) -> MoECheckpointError:
    return MoECheckpointError(
        f"faults cannot be recorded in {ledger_dir} ({error.strerror}), so a restart would repeat them; "
        "make it writable or do without --moe-ckpt-inject-fault"
    )


# SIGTERM between two phases of a step.


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
        self._file: tuple[int, int] | None = None

    def install(self) -> None:
        """From here on, where this is the main thread; Python lets no other one do it."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._file = _file(self._before)
            _ALL.add(self)

    def read(self) -> bytes:
        """The signals that have come since the last call."""
        try:
            found = self.reader.recv(4096)
        except BlockingIOError:
            return b""
        if self._before is not None and self._is_theirs():
            with suppress(OSError):  # it was closed meanwhile
                os.write(self._before, found)
        return found

    def uninstall(self) -> None:
        """Whoever was told of signals before is again. For the thread that installed it."""
        if self._before is not None:
            before = self._before if self._is_theirs() else -1
            current = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            if current != self._writer.fileno():  # set by somebody else, who is still there
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._before = None
        _ALL.discard(self)
        self.reader.close()
        self._writer.close()

    def _is_theirs(self) -> bool:
        """Whether the descriptor of before is open still. Closed by who had it, its number is another file's."""
        if self._before is None or self._file is None or _file(self._before) != self._file:
            return False
        return not os.get_blocking(self._before)

    def forget(self) -> None:
        """In a forked child: its signals are no business of its parent's."""
        with suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
        self._before = None
        self.reader.close()
        self._writer.close()


def _file(descriptor: int | None) -> tuple[int, int] | None:
    """What tells the file that is open there from all others; None where none is."""
    if descriptor is None or descriptor < 0:
        return None
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
