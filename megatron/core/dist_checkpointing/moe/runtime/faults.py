"""Fault injection: kill a given rank at a given point of a given iteration, once per job; no torch."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import MoECheckpointError, UsageError
from ..storage.system import sync_directory


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
        return False
    except OSError as error:
        raise _unrecordable(ledger_dir, error) from error
    return True


def _unrecordable(ledger_dir: Path, error: OSError) -> MoECheckpointError:
    return MoECheckpointError(
        f"faults cannot be recorded in {ledger_dir} ({error.strerror}), so a restart would repeat them; "
        "make it writable or do without --moe-ckpt-inject-fault"
    )
