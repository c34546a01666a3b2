"""Runs a job under faults to its end, watches that it gets on, and measures what it took."""

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
from types import TracebackType

from megatron.pretrain.chaos.faults import Fault, Kind
from megatron.pretrain.chaos.processes import TOKEN, Running
from megatron.pretrain.chaos.reports import Journal, read_journal
from megatron.pretrain.processes import started_s

ROOT = Path(__file__).resolve().parents[3]
POLL_S = 0.05
STOP_SIGNAL = signal.SIGUSR1
ASK_AGAIN_S = 0.5
TAIL = 30
"""Lines of a job's output that are told when it fails."""


class ChaosFailure(Exception):
    """A job hung, failed, or could not be struck; says what was waited for, and the last that the job said."""


@dataclass(frozen=True)
class Strike:
    """A fault that happened. at_s: seconds after the first iteration, later than planned where nobody was there to be
    killed. iteration: the newest that was reported then. node: which was lost, if one was."""

    fault: Fault
    at_s: float
    iteration: int
    node: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a job did. start_s: from its launch to its first report. wall_s: from there to its last one. first, last:
    iterations of these."""

    folder: Path
    journal: Journal
    log: str
    start_s: float
    wall_s: float
    first: int
    last: int
    strikes: tuple[Strike, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How a job is run. faults: when what is killed. run_s: after so many seconds it is told to end after its current
    iteration; None: it ends by itself. patience_s: within which there has to be another iteration."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    faults: Sequence[Fault] = ()
    run_s: float | None = None
    patience_s: float = 180.0


@dataclass
class Job:
    """A job under way; leaving the `with` block kills all of it. `folder` gets its log and its reports."""

    plan: Plan
    folder: Path
    memory: Path
    say: Callable[[str], None]
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __enter__(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.memory.mkdir(parents=True, exist_ok=True)
        self._log, self._reports = self.folder / "log", self.folder / "reports"
        own = {TOKEN: self.token, "PYTHON": sys.executable, "PYTHONFAULTHANDLER": "1"}
        self._launched_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.plan.command, "--metrics-jsonl", str(self._reports)],
                env={**os.environ, **self.plan.environment, **own}, stdout=log, stderr=log, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self._running = Running(self.token, self.memory)
        self._heard_s, self._size = time.monotonic(), 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.kill_all()
        self._process.wait()

    def run(self) -> Outcome:
        """To its end. Raises ChaosFailure."""
        self._wait("its first iteration", lambda: bool(read_journal(self._reports).reports))
        self._listen()
        begun_s, first = self._heard_s, read_journal(self._reports).reports[0]["iteration"]
        strikes = []
        for fault in self.plan.faults:
            if self._sleep_until(begun_s + fault.at_s):
                break
            strikes.append(self._strike(fault, begun_s))
        if self.plan.run_s is not None and not self._sleep_until(begun_s + self.plan.run_s):
            self._tell_to_end()
        self._wait("its end", lambda: self._process.poll() is not None)
        if self._process.returncode:
            raise self._failed(f"ended with exit code {self._process.returncode}")
        self._listen()
        journal = read_journal(self._reports)
        wall_s = self._heard_s - begun_s
        return Outcome(self.folder, journal, self._log.read_text(errors="replace"), begun_s - self._launched_s,
                       wall_s, first, journal.newest, tuple(strikes))  # fmt: skip

    def _strike(self, fault: Fault, begun_s: float) -> Strike:
        node: list[str] = []

        def struck() -> bool:
            if fault.kind is Kind.RANK:
                return self._running.lose_rank(fault.target)
            node[:] = [self._running.lose_node(fault.target)]
            return bool(node[0])

        # Where a restart is under way the victim may not be there yet: then it is struck as soon as it is.
        self._wait(f"{fault.kind.value} {fault.target} to be there to be killed", struck)
        strike = Strike(fault, time.monotonic() - begun_s, self._newest_iteration(), "".join(node))
        self.say(f"{self.plan.name}: {strike.at_s:6.1f} s: killed {fault.kind.value} {fault.target}"
                 f"{f' ({strike.node})' if strike.node else ''} after iteration {strike.iteration}")  # fmt: skip
        return strike

    def _tell_to_end(self) -> None:
        """Ask rank 0 to end after its iteration. It can hear that only while it trains, and each process once: while
        Python ends there is no handler any more, and the signal would kill."""
        asked_s, asked = 0.0, set[int]()

        def ended() -> bool:
            nonlocal asked_s
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                asked_s = time.monotonic()
                worker = self._running.workers().get(0)
                trains = worker is not None and self._reports.stat().st_mtime > started_s(worker.pid)
                if worker is not None and trains and worker.pid not in asked:
                    asked.add(worker.pid)
                    self._running.signal(0, STOP_SIGNAL)
            return self._process.poll() is not None

        self._wait("its end after it was told to end", ended)

    def _sleep_until(self, at_s: float) -> bool:
        """Let the job train until then; whether it ended before that."""
        self._wait("the next iteration", lambda: time.monotonic() >= at_s or self._process.poll() is not None)
        return self._process.poll() is not None

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        """Raises ChaosFailure when the job fails, or no iteration is reported for too long."""
        since_s = time.monotonic()
        while not until():
            self._listen()
            if self._process.poll() not in (None, 0):
                raise self._failed(f"ended with exit code {self._process.returncode} while it had to go on")
            if self._process.poll() == 0:
                return
            if time.monotonic() - max(since_s, self._heard_s) > self.plan.patience_s:
                self._running_stacks()
                raise self._failed(f"was waited for in vain for {self.plan.patience_s:.0f} s: {what}")
            time.sleep(POLL_S)

    def _listen(self) -> None:
        """Note when the reports grow."""
        size = self._reports.stat().st_size if self._reports.exists() else 0
        if size != self._size:
            self._size, self._heard_s = size, time.monotonic()

    def _newest_iteration(self) -> int:
        return read_journal(self._reports).newest

    def _running_stacks(self) -> None:
        """Let every rank write into the log where it is, by its fault handler."""
        for rank in self._running.workers():
            self._running.signal(rank, signal.SIGABRT)
        time.sleep(2.0)

    def _failed(self, how: str) -> ChaosFailure:
        lines = self._log.read_text(errors="replace").splitlines()
        return ChaosFailure(
            f"{self.plan.name} {how}; newest iteration {self._newest_iteration()}; its log {self._log} ends with:\n"
            + "\n".join(lines[-TAIL:])
        )
