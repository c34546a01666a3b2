"""Runs a job under faults to its end, watches that it makes progress, and measures how long it took."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_ckpt.drills.processes import TOKEN, Running, catches
from moe_ckpt.drills.reports import Journal, read_journal
from moe_ckpt.drills.schedule import Kind, PlannedKill
from moe_ckpt.scripts import scripts_folder

ROOT = scripts_folder()
POLL_S = 0.05
STOP_SIGNAL = signal.SIGUSR1
ASK_AGAIN_S = 0.5
LOG_LINES = 30
"""Lines of a job's output that are shown when it fails."""


class DrillFailure(Exception):
    """A job hung, failed, or could not be struck; says what was waited for, and the end of the job's log."""


@dataclass(frozen=True)
class InjectedKill:
    """A kill that happened. at_s: seconds after the first iteration, later than planned where nobody was there to be
    killed. iteration: the newest that was reported then. node: which was lost, if one was."""

    planned: PlannedKill
    at_s: float
    iteration: int
    node: str = ""


@dataclass(frozen=True)
class DrillOutcome:
    """What a job did. start_s: from its launch to its first report. wall_s: from there to its last one. first, last:
    iterations of these."""

    folder: Path
    journal: Journal
    log: str
    start_s: float
    wall_s: float
    first: int
    last: int
    strikes: tuple[InjectedKill, ...] = ()


@dataclass(frozen=True)
class JobPlan:
    """How a job is run. kills: what is killed when. run_s: after so many seconds it is asked to end after its current
    iteration; None: it ends by itself. patience_s: within which there has to be another iteration."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    kills: Sequence[PlannedKill] = ()
    run_s: float | None = None
    patience_s: float = 180.0


@dataclass
class DrillJob:
    """A running job; leaving the `with` block kills all of it. `folder` gets its log and its reports."""

    plan: JobPlan
    folder: Path
    memory: Path
    say: Callable[[str], None]
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __enter__(self) -> DrillJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.memory.mkdir(parents=True, exist_ok=True)
        self._log, self._reports = self.folder / "log", self.folder / "reports"
        own = {TOKEN: self.token, "MOE_CKPT_PYTHON": sys.executable, "PYTHONFAULTHANDLER": "1"}
        self._launched_s = self._progress_s = time.monotonic()
        self._size = 0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.plan.command, "--metrics-jsonl", str(self._reports)],
                env={**os.environ, **self.plan.environment, **own}, stdout=log, stderr=log, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self._running = Running(self.token, self.memory)
        return self

    def __exit__(self, *_error: object) -> None:
        self._running.kill_all()
        self._process.wait()

    def run(self) -> DrillOutcome:
        """To its end. Raises DrillFailure."""
        self._wait("its first iteration", lambda: bool(read_journal(self._reports).reports))
        self._note_progress()
        begun_s, first = self._progress_s, read_journal(self._reports).reports[0]["iteration"]
        strikes = []
        for planned in self.plan.kills:
            if self._ends_before(begun_s + planned.at_s):
                break
            strikes.append(self._strike(planned, begun_s))
        if self.plan.run_s is not None and not self._ends_before(begun_s + self.plan.run_s):
            self._ask_to_end()
        self._wait("its end", lambda: self._process.poll() is not None)
        if self._process.returncode:
            raise self._failed(f"ended with exit code {self._process.returncode}")
        self._note_progress()
        journal = read_journal(self._reports)
        return DrillOutcome(
            self.folder, journal, self._log.read_text(errors="replace"), begun_s - self._launched_s,
            self._progress_s - begun_s, first, journal.newest, tuple(strikes),
        )  # fmt: skip

    def _strike(self, planned: PlannedKill, begun_s: float) -> InjectedKill:
        node, victim = "", f"{planned.kind.value} {planned.target}"

        def struck() -> bool:
            nonlocal node
            if planned.kind is Kind.RANK:
                return self._running.lose_rank(planned.target)
            node = self._running.lose_node(planned.target)
            return bool(node)

        # Where a restart is under way the victim may not be there yet: then it is struck as soon as it is.
        self._wait(f"{victim} to be there to be killed", struck)
        strike = InjectedKill(planned, time.monotonic() - begun_s, read_journal(self._reports).newest, node)
        where = f" ({node})" if node else ""
        self.say(f"{self.plan.name}: {strike.at_s:6.1f} s: killed {victim}{where} after iteration {strike.iteration}")
        return strike

    def _ask_to_end(self) -> None:
        """Ask rank 0 to end after its iteration, each process once, and only one that has its handler: another, such as
        a standby that has just got its rank, would be killed by the signal."""
        asked_s, asked = 0.0, set[int]()

        def ended() -> bool:
            nonlocal asked_s
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                asked_s = time.monotonic()
                pid = self._running.workers().get(0)
                if pid is not None and pid not in asked and catches(pid, STOP_SIGNAL):
                    asked.add(pid)
                    self._running.signal(0, STOP_SIGNAL)
            return self._process.poll() is not None

        self._wait("its end after it was asked to end", ended)

    def _ends_before(self, at_s: float) -> bool:
        """Let the job train until then; whether it ended before that."""
        self._wait("the next iteration", lambda: time.monotonic() >= at_s or self._process.poll() is not None)
        return self._process.poll() is not None

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        """Raises DrillFailure when the job fails, or no iteration is reported for too long."""
        since_s = time.monotonic()
        while not until():
            self._note_progress()
            if self._process.poll() not in (None, 0):
                raise self._failed(f"ended with exit code {self._process.returncode} while it had to continue")
            if self._process.poll() == 0:
                return
            if time.monotonic() - max(since_s, self._progress_s) > self.plan.patience_s:
                self._write_stacks()
                raise self._failed(f"made no progress for {self.plan.patience_s:.0f} s while waiting for {what}")
            time.sleep(POLL_S)

    def _note_progress(self) -> None:
        """Note when the reports grow."""
        size = self._reports.stat().st_size if self._reports.exists() else 0
        if size != self._size:
            self._size, self._progress_s = size, time.monotonic()

    def _write_stacks(self) -> None:
        """Let every rank write into the log where it is, by its fault handler."""
        for rank in self._running.workers():
            self._running.signal(rank, signal.SIGABRT)
        time.sleep(2.0)

    def _failed(self, how: str) -> DrillFailure:
        end = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        newest = read_journal(self._reports).newest
        return DrillFailure(f"{self.plan.name} {how}; newest iteration {newest}; its log {self._log} ends with:\n{end}")
