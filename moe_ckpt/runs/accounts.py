"""What came of a run: which reports count, where its time went, which faults struck it, what was lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .run_log import LEVELS, AttemptStart, RecoveryRecord, RunLog


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of a run, from its first start to its last line, by what they went to; all but `useful_s` is overhead.

    useful_s: iterations of which the newest state consists, each counted once. stall_s: in which training waited for
    checkpoints. slowed_s: by which copies beside training made passes longer. again_s: iterations that were run again.
    stopped_s: from the last iteration before a fault to the end of the recovery or restart. other_s: what lies between
    iterations: evaluation, data, start of the first one. is_by_clock: else lines have no times, so that stops without a
    recovery, and what lies between iterations, are not known.
    """

    useful_s: float = 0.0
    stall_s: float = 0.0
    slowed_s: float = 0.0
    again_s: float = 0.0
    stopped_s: float = 0.0
    other_s: float = 0.0
    is_by_clock: bool = True

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.useful_s + self.stall_s + self.slowed_s + self.again_s + self.stopped_s + self.other_s

    @property
    def ettr(self) -> float:
        """Effective training time ratio (MoEvement 2.4), so far."""
        return self.useful_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class Stop:
    """Training stopped and continued: a fault, or a restart. after: the newest iteration before it. resumed: behind
    which it continued. recovery: None where a checkpoint was loaded. what: was struck, where a drill says it."""

    after: int
    resumed: int
    at_s: float
    recovery: RecoveryRecord | None = None
    what: str = ""


@dataclass(frozen=True)
class InjectedFault:
    """A fault that a drill injected. after: the newest iteration that was reported by then."""

    what: str
    after: int


@dataclass(frozen=True)
class DrillResult:
    """What a drill found out. exact: whether all came out as without faults. ettr: by the run without faults."""

    exact: bool
    ettr: float | None
    stock_ettr: float | None
    differences: int


@dataclass
class Run:
    """A log with what follows from it; struck, drill: where it was part of a drill."""

    log: RunLog
    struck: tuple[InjectedFault, ...] = ()
    drill: DrillResult | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As it is shown."""
        return self.log.name

    @cached_property
    def kept(self) -> list[int]:
        """Places of the reports of which the newest state consists: of each iteration, up to the newest, the last that
        was not replayed."""
        iterations, replayed = self.log.columns["iteration"], self.log.columns["replayed"]
        kept: list[int] = []
        for at in range(len(self.log)):
            if replayed[at] == 1:
                continue
            while kept and iterations[kept[-1]] >= iterations[at]:
                kept.pop()
            kept.append(at)
        return kept

    @cached_property
    def again(self) -> list[int]:
        """Places of all other reports: replayed, or trained again later."""
        kept = set(self.kept)
        return [at for at in range(len(self.log)) if at not in kept]

    def of_kept(self, name: str) -> list[float]:
        """A column of those that count."""
        column = self.log.columns[name]
        return [column[at] for at in self.kept]

    @cached_property
    def newest(self) -> int:
        """The newest iteration; 0 without any."""
        return int(self.log.columns["iteration"][self.kept[-1]]) if self.kept else 0

    def last(self, name: str) -> float:
        """The newest value of a column; NaN where none is known."""
        return self.log.columns[name][-1] if len(self.log) else math.nan

    @property
    def facts(self) -> Mapping[str, object]:
        """Of its newest attempt."""
        return self.log.starts[-1].facts if self.log.starts else {}

    @cached_property
    def states(self) -> dict[str, dict[str, float]]:
        """For each tier that is there, the share of iterations in each state."""
        found: dict[str, dict[str, float]] = {}
        for tier in ("protection", "persistence"):
            known = [int(level) for level in self.of_kept(tier) if not math.isnan(level)]
            if known:
                found[tier] = {name: known.count(at) / len(known) for at, name in enumerate(LEVELS)}
        return found

    @cached_property
    def stops(self) -> list[Stop]:
        """In their order."""
        found = list(_stops(self.log))
        named: list[Stop] = []
        struck = list(self.struck)
        for at, stop in enumerate(found):
            until = found[at + 1].after if at + 1 < len(found) else math.inf
            mine = [one for one in struck if one.after <= stop.after or (one.after < until and at + 1 == len(found))]
            struck = [one for one in struck if one not in mine]
            what = ", ".join(one.what for one in mine)
            named.append(Stop(stop.after, stop.resumed, stop.at_s, stop.recovery, what))
        return named

    @cached_property
    def lost_tokens(self) -> dict[int, dict[int, int]]:
        """By layer and expert, of all recoveries."""
        found: dict[int, dict[int, int]] = {}
        recoveries = self.log.recoveries
        for at, recovery in enumerate(recoveries):
            # From as far back, or further, these tokens were trained again.
            again = any(later.target <= recovery.target for later in recoveries[at + 1 :])
            starts = (one for one in self.log.starts if one.at > recovery.at)
            if again or any(one.iteration < recovery.target for one in starts):
                continue
            for layer, experts in recovery.lost_tokens.items():
                for expert, tokens in experts.items():
                    row = found.setdefault(layer, {})
                    row[expert] = row.get(expert, 0) + tokens
        return found

    @cached_property
    def time(self) -> TimeSpent:
        """Where it went."""
        return _by_clock(self) or _by_sums(self)


def _stops(log: RunLog) -> Iterator[Stop]:
    """At each start but the first, at each recovery, and where iterations begin again without either."""
    iterations, replayed = log.columns["iteration"], log.columns["replayed"]
    starts = {start.at: start for start in log.starts[1:]} if log.starts else {}
    recoveries: dict[int, RecoveryRecord] = {}
    for recovery in log.recoveries:
        recoveries[recovery.at] = recovery
    newest, opened = 0, None
    for at in range(len(log) + 1):
        if at in starts:
            if opened is not None:
                yield opened
            opened = Stop(newest, starts[at].iteration, starts[at].at_s)
        if at in recoveries:
            recovery = recoveries[at]
            # Of an attempt that began and then recovered there is one stop.
            opened = Stop(opened.after if opened else newest, recovery.target, recovery.begun_s, recovery)
        if at == len(log) or replayed[at] == 1:
            continue
        iteration = int(iterations[at])
        if opened is None and newest and iteration <= newest:
            opened = Stop(newest, iteration - 1, log.columns["at_s"][at])
        if opened is not None:
            yield opened
            opened = None
        newest = iteration if iteration <= newest else max(newest, iteration)
    if opened is not None:
        yield opened


def _events(log: RunLog) -> Iterator[tuple[float, AttemptStart | RecoveryRecord | int]]:
    """Everything in the order of the file, with when it ended; a report as its place."""
    marks: dict[int, list[AttemptStart | RecoveryRecord]] = {}
    both: list[AttemptStart | RecoveryRecord] = [*log.starts, *log.recoveries]
    for mark in both:
        marks.setdefault(mark.at, []).append(mark)
    at_s = log.columns["at_s"]
    for at in range(len(log) + 1):
        for mark in marks.get(at, []):
            yield (mark.at_s if isinstance(mark, AttemptStart) else mark.begun_s + mark.total_s), mark
        if at < len(log):
            yield at_s[at], at


def _by_clock(run: Run) -> TimeSpent | None:
    """From when lines were written; None where lines do not say it."""
    log, kept = run.log, set(run.kept)
    columns = log.columns
    spent = {"useful": 0.0, "stall": 0.0, "slowed": 0.0, "again": 0.0, "stopped": 0.0, "other": 0.0}
    before_s: float | None = None
    for now_s, event in _events(log):
        if math.isnan(now_s):
            if isinstance(event, int):
                return None
            continue
        if before_s is None:
            length_s = columns["iteration_time_s"][event] if isinstance(event, int) else 0.0
            before_s = now_s - (0.0 if math.isnan(length_s) else length_s)
        gap_s = max(0.0, now_s - before_s)
        before_s = max(before_s, now_s)
        if not isinstance(event, int):
            spent["stopped"] += gap_s
            continue
        iteration_s = max(0.0, _or_zero(columns["iteration_time_s"][event]))
        inside_s = min(gap_s, iteration_s)
        spent["other"] += gap_s - inside_s
        _add_iteration(spent, columns, event, inside_s, counts=event in kept)
    return _time_spent(spent, is_by_clock=True) if before_s is not None else None


def _by_sums(run: Run) -> TimeSpent:
    """From what each line says of itself."""
    spent = {"useful": 0.0, "stall": 0.0, "slowed": 0.0, "again": 0.0, "stopped": 0.0, "other": 0.0}
    kept = set(run.kept)
    for at, length_s in enumerate(run.log.columns["iteration_time_s"]):
        _add_iteration(spent, run.log.columns, at, max(0.0, _or_zero(length_s)), counts=at in kept)
    spent["stopped"] = sum(recovery.total_s for recovery in run.log.recoveries)
    return _time_spent(spent, is_by_clock=False)


def _add_iteration(
    spent: dict[str, float], columns: Mapping[str, Sequence[float]], at: int, length_s: float, *, counts: bool
) -> None:
    if not counts:
        spent["again"] += length_s
        return
    stall_s = min(max(0.0, _or_zero(columns["stall_s"][at])), length_s)
    # Of copies that continued beside the passes of this iteration. A noisy machine gives negative ones too, which
    # count.
    slowed_s = _or_zero(columns["slowed_s"][at]) if columns["snapshot_bytes"][at] > 0 else 0.0
    spent["stall"] += stall_s
    spent["slowed"] += slowed_s
    spent["useful"] += length_s - stall_s


def _time_spent(spent: Mapping[str, float], *, is_by_clock: bool) -> TimeSpent:
    slowed_s = min(max(0.0, spent["slowed"]), spent["useful"])
    return TimeSpent(
        spent["useful"] - slowed_s,
        spent["stall"],
        slowed_s,
        spent["again"],
        spent["stopped"],
        spent["other"],
        is_by_clock,
    )


def _or_zero(value: float) -> float:
    return value if value > 0 or value < 0 else 0.0
