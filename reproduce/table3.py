"""MoEvement Table 3: intervals, overhead, recovery and ETTR of four systems, four models and five failure rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from moe_ckpt.report import Fact
from moe_ckpt.simulator.events import Estimate

from .evaluation import AZURE, DURATION_S, SYSTEMS, SystemOutcome, behaviour_of, by_chance, evaluate
from .figure import COLOURS, NAMES, EttrAgreement, Figure, Rows, decimals, lines, minutes, published
from .jobs import MODELS, MTBF_S, azure_job

TOLERANCE = {"checkfreq": 0.03, "gemini": 0.03, "moc": 0.05, "moevement": 0.010}
"""By how much an ETTR may differ from the published one before it is marked."""

INTERVAL_TOLERANCE = 0.10


@dataclass(frozen=True)
class PublishedCell:
    """A cell as the paper has it; None where it was not at hand. Seconds of recovery are those of the whole run."""

    interval: int | None
    overhead_s: float | None
    overhead_share: float | None
    recovery_s: float | None
    ettr: float | None

    @property
    def recomputed_ettr(self) -> float | None:
        """ETTR by App. C from the paper's own overhead and recovery: E[R] / MTBF is recovery over the run's time."""
        if self.overhead_share is None or self.recovery_s is None:
            return None
        return 1 / (1 + self.overhead_share) / (1 + self.recovery_s / DURATION_S)


@dataclass(frozen=True)
class Table3Cell:
    """One system, model and failure rate: what the paper has, and what comes out here."""

    model: str
    mtbf_s: int
    system: str
    published: PublishedCell
    ours: SystemOutcome

    @property
    def difference(self) -> float | None:
        """ETTR, ours less the published."""
        return None if self.published.ettr is None else self.ours.ettr - self.published.ettr

    @property
    def mark(self) -> str:
        """Whether it is within tolerance; empty where nothing is published."""
        if self.difference is None:
            return ""
        return "yes" if abs(self.difference) <= TOLERANCE[self.system] else "NO"

    @property
    def interval_holds(self) -> bool | None:
        """Whether the interval (of MoEvement the window, exactly) is as published; None where that was not at hand."""
        interval = self.published.interval
        if interval is None:
            return None
        slack = 0.0 if self.system == "moevement" else INTERVAL_TOLERANCE * interval
        return abs(self.shown_interval - interval) <= slack

    @property
    def shown_interval(self) -> int:
        """What the table calls the interval: iterations between checkpoints, for MoEvement its window."""
        return self.ours.window if self.system == "moevement" else self.ours.interval


@cache
def cells() -> tuple[Table3Cell, ...]:
    """All cells, in the paper's order."""
    return tuple(
        Table3Cell(model, mtbf_s, system, published_cell(model, mtbf_s, system), outcome)
        for model in MODELS
        for mtbf_s in MTBF_S
        for system, outcome in evaluate(azure_job(model), AZURE, mtbf_s).items()
    )


def chance(cell: Table3Cell) -> Estimate:
    """The cell's ETTR with faults of a Poisson process."""
    job = azure_job(cell.model)
    return by_chance(behaviour_of(cell.system, job, AZURE, cell.mtbf_s), job, cell.mtbf_s)


def published_cell(model: str, mtbf_s: int, system: str) -> PublishedCell:
    """A cell of the table, those that stand for all failure rates in each of the published rows."""
    entry = published()["table3"][model]
    row = next(row for row in entry["rows"] if row["mtbf_s"] == mtbf_s)
    interval = {
        "checkfreq": entry["checkfreq_interval"],
        "gemini": row["gemini_interval"],
        "moc": entry["moc_interval"],
        "moevement": entry["window"],
    }[system]
    of_overhead = entry if system in ("checkfreq", "moevement") else row
    return PublishedCell(
        interval,
        of_overhead[f"{system}_overhead_s"],
        of_overhead[f"{system}_overhead_share"],
        row["recovery_s"][system],
        row["ettr"][system],
    )


def agreements() -> dict[str, EttrAgreement]:
    """How near the ETTRs of each system come."""
    return {
        system: EttrAgreement.of([cell.difference for cell in cells() if cell.system == system], TOLERANCE[system])
        for system in SYSTEMS
    }


def figure() -> Figure:
    """The table, with the published one and its recomputation beside it."""
    missing = "; ".join(missing_intervals()) or "none"
    return Figure(
        "table3",
        {"cells": [_as_data(cell) for cell in cells()], "agreement": {k: asdict(v) for k, v in agreements().items()}},
        (_agreement(), *(_table(model) for model in MODELS)),
        _draw,
        tuple(Fact(f"{NAMES[system]} ETTR", found.sentence) for system, found in agreements().items()),
        {"missing": missing},
    )


def _table(model: str) -> Rows:
    rows = []
    for cell in cells():
        if cell.model == model:
            paper, ours, random = cell.published, cell.ours, chance(cell)
            shown = (paper.interval, cell.shown_interval, paper.overhead_share, ours.overhead_share, paper.recovery_s)
            ettrs = map(decimals, (paper.ettr, paper.recomputed_ettr, ours.ettr))
            off = "-" if cell.difference is None else f"{cell.difference:+.3f}"
            by_chance = f"{random:.3f}"
            head = (minutes(cell.mtbf_s), NAMES[cell.system], *shown, ours.recovery_s)
            rows.append((*head, *ettrs, off, cell.mark, by_chance))
    return rows


def _agreement() -> Rows:
    """What the tolerances are held against; the last column is the paper against itself."""
    rows = []
    for system, found in agreements().items():
        own = [cell for cell in cells() if cell.system == system and cell.published.recomputed_ettr is not None]
        itself = EttrAgreement.of(
            [(cell.published.recomputed_ettr or 0) - (cell.published.ettr or 0) for cell in own], found.tolerance
        )
        holding = f"{sum(bool(cell.interval_holds) for cell in own)} of {len(own)}"
        ours, theirs = ((decimals(one.mean_absolute), decimals(one.largest)) for one in (found, itself))
        rows.append((NAMES[system], found.tolerance, f"{found.within} of {found.cells}", *ours, holding, *theirs))
    return rows


def missing_intervals() -> tuple[str, ...]:
    """The cells whose interval is off by more than the tolerance, in words."""
    return tuple(
        f"{cell.model} {NAMES[cell.system]} at {minutes(cell.mtbf_s)}: {cell.shown_interval} instead of"
        f" {cell.published.interval}"
        for cell in cells()
        if cell.interval_holds is False
    )


def _as_data(cell: Table3Cell) -> dict[str, Any]:
    return {
        "model": cell.model,
        "mtbf_s": cell.mtbf_s,
        "system": cell.system,
        "published": asdict(cell.published) | {"recomputed_ettr": cell.published.recomputed_ettr},
        "ours": asdict(cell.ours) | {"ettr_by_chance": asdict(chance(cell))},
        "ettr_difference": cell.difference,
        "interval_holds": cell.interval_holds,
    }


def _draw(axes: list[Any]) -> None:
    at = [mtbf_s / 60 for mtbf_s in MTBF_S]
    for axis, model in zip(axes, MODELS, strict=True):
        own = [cell for cell in cells() if cell.model == model]
        series = {NAMES[name]: [cell.ours.ettr for cell in own if cell.system == name] for name in COLOURS}
        known = [(cell.mtbf_s / 60, cell.published.ettr) for cell in own if cell.published.ettr is not None]
        if known:
            axis.scatter(*zip(*known, strict=True), color="black", marker="x")
        lines(axis, at, series, title=model, xlabel="MTBF (minutes)", xscale="log", ylim=(0, 1), ylabel="x: published")
