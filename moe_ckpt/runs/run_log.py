"""Reads what jobs append to `--metrics-jsonl`: any number of attempts in one file, whole or not.

What cannot be read is left out and counted, never an error: a job may have been killed in the middle of a line, and
other versions have other fields. A line is one of three kinds, see docs/report.md; others are passed by.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

VERSION = 1
LONGEST_LINE = 64 * 2**20
LARGEST = 1e30
"""Sums of such numbers stay finite."""
LEVELS = ("unprotected", "degraded", "protected")

_NUMBERS = (
    "iteration", "at_s", "lm_loss", "iteration_time_s", "stall_s", "slowed_s", "tokens_per_s", "model_flops_per_s",
    "snapshot_bytes", "replicated_bytes", "persisted_bytes", "protected_iteration", "persisted_iteration",
    "order_changes", "replayed",
)  # fmt: skip
_MEMORY = ("window", "checkpoint_bytes", "own_bytes", "replica_bytes", "log_bytes")
_STATES = ("protection", "persistence")
COLUMNS = (*_NUMBERS, *_MEMORY, *_STATES)
"""Of `RunLog.columns`. States are their places in `LEVELS`; NaN: not known."""

NAN = math.nan


@dataclass(frozen=True)
class AttemptStart:
    """An attempt of the job began to train. at: how many reports stand before it."""

    at: int
    at_s: float
    iteration: int
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class RecoveryRecord:
    """A recovery that ended; see `RecoveryTimeline`. at: how many reports stand before it."""

    at: int
    begun_s: float
    total_s: float
    parts: Mapping[str, float]
    scope: str = ""
    target: int = 0
    replayed: int = 0
    ranks_back: int = 0
    ranks: int = 0
    attempts: int = 1
    exactness: str = ""
    is_whole: bool = True
    table: tuple[str, ...] = ()
    lost_tokens: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    plt: float | None = None
    plt_pec: float | None = None
    mlt: float | None = None


@dataclass
class RunLog:
    """What one file has, in its order.

    columns: one value for each report of an iteration. reasons: why protection was less than asked for, from that
    report on, empty where it was not. notes: what was left out, in words.
    """

    name: str
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    starts: list[AttemptStart] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    reasons: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _booted_s: dict[str, float] = field(default_factory=dict)
    _boot: str = ""

    def __len__(self) -> int:
        return len(self.columns["iteration"])

    def add(self, data: Mapping[str, Any]) -> bool:
        """Take a line; whether it could be understood."""
        if isinstance(data.get("run"), dict):
            return self._add_start(data["run"])
        if isinstance(data.get("recovery"), dict):
            return self._add_recovery(data["recovery"])
        if "iteration" in data:
            return self._add_report(data)
        return True  # another kind, of a later version

    def _add_report(self, data: Mapping[str, Any]) -> bool:
        iteration = number(data["iteration"])
        if not 0 <= iteration < 2**53 or iteration != int(iteration):
            return False
        memory = data.get("checkpoint_memory")
        columns, memory = self.columns, memory if isinstance(memory, dict) else {}
        for name in _NUMBERS:
            columns[name].append(number(data.get(name)))
        columns["at_s"][-1] += self._set_back_s(data)
        for name in _MEMORY:
            columns[name].append(number(memory.get(name)))
        for name in _STATES:
            state = data.get(name)
            columns[name].append(LEVELS.index(state) if state in LEVELS else NAN)
        reason = data.get("reason")
        reason = reason if isinstance(reason, str) else ""
        if reason != (self.reasons[-1][1] if self.reasons else ""):
            self.reasons.append((len(self) - 1, reason))
        return True

    def _add_start(self, data: Mapping[str, Any]) -> bool:
        version = data.get("version")
        if isinstance(version, int) and version > VERSION:
            note = f"it was written by a later version ({version}); what this one does not know is not shown"
            self.notes += [note] if note not in self.notes else []
        iteration = number(data.get("iteration"))
        known = iteration >= 0 and math.isfinite(iteration)
        boot = data.get("boot")
        self._boot = boot if isinstance(boot, str) else ""
        at_s = number(data.get("at_s")) + self._set_back_s(data)
        self.starts.append(AttemptStart(len(self), at_s, int(iteration) if known else 0, data))
        return True

    def _set_back_s(self, data: Mapping[str, Any]) -> float:
        """What to add to the time of the day in a line, so that it is told by one clock on all lines of a boot.

        The clock of the day may be set between any two; how long ago the node was booted says by how much."""
        at_s, since_boot_s = number(data.get("at_s")), number(data.get("since_boot_s"))
        if not self._boot or math.isnan(at_s) or math.isnan(since_boot_s):
            return 0.0
        return self._booted_s.setdefault(self._boot, at_s - since_boot_s) + since_boot_s - at_s

    def _add_recovery(self, data: Mapping[str, Any]) -> bool:
        parts = data.get("parts")
        if not isinstance(parts, dict):
            return False
        lengths = {str(name): length_s for name, value in parts.items() if (length_s := number(value)) >= 0}
        table = data.get("table")
        shares = {name: number(data.get(name)) for name in ("plt", "plt_pec", "mlt")}
        self.recoveries.append(
            RecoveryRecord(
                len(self),
                number(data.get("begun_s")) + self._set_back_s(data),
                sum(lengths.values()),
                lengths,
                _text(data.get("scope")),
                target=_whole(data.get("target")),
                replayed=_whole(data.get("replayed")),
                ranks_back=_whole(data.get("ranks_back")),
                ranks=_whole(data.get("ranks")),
                attempts=_whole(data.get("attempts")) or 1,
                exactness=_text(data.get("exactness")),
                is_whole=data.get("is_whole") is not False,
                table=tuple(map(_text, table)) if isinstance(table, list) else (),
                lost_tokens=_lost(data.get("lost_tokens")),
                **{name: None if math.isnan(share) else share for name, share in shares.items()},
            )
        )
        return True


def read_run(path: Path, name: str) -> RunLog:
    """The log that a file has by now. Raises UnreadableCheckpoint for one that has no line of a job, or cannot be read.

    Args:
        path: The file of `--metrics-jsonl`.
        name: Name of the run in reports.
    """
    run, bad, first_bad, is_torn = RunLog(name), 0, 0, False
    try:
        with path.open("rb") as file:
            for at, line in enumerate(_lines(file), start=1):
                is_torn = not line.endswith(b"\n")
                if not line.strip():
                    continue
                data = None if len(line) > LONGEST_LINE else parsed(line)
                if data is None or not run.add(data):
                    bad, first_bad = bad + (not is_torn), first_bad or at
                    continue
                is_torn = False
    except OSError as error:
        raise UnreadableCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(run) and not run.starts:
        what = f"none of its {bad} lines is one" if bad else "it is empty" if not first_bad else "its only line is torn"
        raise UnreadableCheckpoint(f"{path} has no line of --metrics-jsonl: {what}")
    if bad:
        run.notes.append(f"{bad} lines cannot be read and are left out; the first is line {first_bad}")
    if is_torn:
        run.notes.append("the last line ends in the middle: it is being written, or its job was killed")
    return run


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None where there is none."""
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        try:
            data = json.loads(line)  # which knows NaN and Infinity, that Python's writer writes
        except (ValueError, RecursionError):
            return None
    return data if isinstance(data, dict) else None


def number(value: Any) -> float:
    """As a float; NaN for what is no number, or none that a job could mean."""
    if not isinstance(value, int | float):
        return NAN
    try:
        found = float(value)
    except OverflowError:
        return NAN
    return found if abs(found) <= LARGEST else NAN


def _lines(file: Any) -> Iterator[bytes]:
    """Lines, those that are far too long in pieces."""
    return iter(lambda: file.readline(LONGEST_LINE + 1), b"")


def _whole(value: Any) -> int:
    found = number(value)
    return 0 if math.isnan(found) else int(found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _lost(data: Any) -> dict[int, dict[int, int]]:
    return {
        layer: {expert: _whole(tokens) for expert, tokens in _by_number(experts)} for layer, experts in _by_number(data)
    }


def _by_number(data: Any) -> Iterable[tuple[int, Any]]:
    items = data.items() if isinstance(data, dict) else ()
    return [
        (int(name), value)
        for name, value in items
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 10
    ]
