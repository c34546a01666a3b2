"""MoEvement Table 7: DeepSeek-MoE in five low-precision settings on H100 GPUs, and what section 5.7 says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from moe_ckpt.report import Columns, Fact, Report, Table

from ....types import LOW_PRECISIONS
from .evaluation import H100, Outcome, evaluate
from .jobs import h100_job
from .plots import COLOURS, NAMES, plot
from .published import published
from .result import PaperResult
from .table3 import decimals

MTBF_S = (3600, 1800, 600)
"""Three rows per setting; the text names an hour and 10 minutes. The one between is taken to be 30 minutes."""

SETTINGS = tuple(precision.name for precision in LOW_PRECISIONS)
INTERVAL_TOLERANCE = 0.10
ETTR_TOLERANCE = 0.01
RECOVERY_TOLERANCE = 0.25
"""The recovery times of Table 3 do not follow from its intervals to better than a factor of two; a quarter is near."""


@dataclass(frozen=True)
class Claim:
    """A range that the text gives, of one setting or over all, and ours. slack: what an end may differ by."""

    what: str
    paper: tuple[float, float]
    ours: tuple[float, float]
    slack: tuple[float, float]

    @property
    def holds(self) -> bool:
        """Whether both ends are where the paper has them."""
        return all(abs(a - b) <= slack for a, b, slack in zip(self.ours, self.paper, self.slack, strict=True))

    @property
    def inside(self) -> bool:
        """Whether ours lies in the paper's range, ends included."""
        return self.ours[0] >= self.paper[0] - self.slack[0] and self.ours[1] <= self.paper[1] + self.slack[1]

    @property
    def verdict(self) -> str:
        """For a person."""
        return "yes" if self.holds else "within" if self.inside else "NO"


@cache
def outcomes() -> dict[tuple[str, int, str], Outcome]:
    """What comes out, by setting, mean time between failures in seconds, and system."""
    return {
        (precision.name, mtbf_s, system): outcome
        for precision in LOW_PRECISIONS
        for mtbf_s in MTBF_S
        for system, outcome in evaluate(h100_job(precision), H100, mtbf_s).items()
    }


def _of(system: str, value: Callable[[Outcome], float], mtbf_s: Iterable[int] = MTBF_S) -> tuple[float, float]:
    """Least and most over all settings."""
    times = tuple(mtbf_s)
    found = [value(one) for (_, time, name), one in outcomes().items() if name == system and time in times]
    return min(found), max(found)


def _interval(outcome: Outcome) -> float:
    return outcome.interval


def _share(outcome: Outcome) -> float:
    return outcome.overhead_share


def _recovery(outcome: Outcome) -> float:
    return outcome.recovery_s


def _ettr(outcome: Outcome) -> float:
    return outcome.ettr


@cache
def claims() -> tuple[Claim, ...]:
    """All ranges of section 5.7. Intervals and recovery times may differ by a share, shares by so much."""
    paper, hour, ten = published()["table7"], (3600,), (600,)

    def relative(what: str, key: str, ours: tuple[float, float], tolerance: float) -> Claim:
        low, high = paper[key] if isinstance(paper[key], list) else (paper[key], paper[key])
        return Claim(what, (low, high), ours, (tolerance * low, tolerance * high))

    def absolute(what: str, key: str, ours: tuple[float, float], tolerance: float) -> Claim:
        low, high = paper[key]
        return Claim(what, (low, high), ours, (tolerance, tolerance))

    def of_setting(what: str, key: str, setting: str) -> Claim:
        interval = float(outcomes()[setting, 3600, "checkfreq"].interval)
        return relative(f"{what}, {setting}", key, (interval, interval), INTERVAL_TOLERANCE)

    intervals, recoveries = INTERVAL_TOLERANCE, RECOVERY_TOLERANCE
    return (
        of_setting("CheckFreq interval", "checkfreq_interval_least", "fp8-fp8"),
        of_setting("CheckFreq interval", "checkfreq_interval_fp16_master_fp32_moments", "fp8-fp16-fp32"),
        of_setting("CheckFreq interval", "checkfreq_interval_fp32", "fp8-fp32"),
        relative("Gemini interval, 1 h", "gemini_interval_1h", _of("gemini", _interval, hour), intervals),
        relative("Gemini interval, 10 min", "gemini_interval_10m", _of("gemini", _interval, ten), intervals),
        absolute("Gemini overhead, 10 min", "gemini_overhead_share_10m", _of("gemini", _share, ten), 0.02),
        relative("MoC overhead", "moc_overhead_share", _of("moc", _share), recoveries),
        absolute("MoEvement overhead", "moevement_overhead_share", _of("moevement", _share), 0.005),
        relative("CheckFreq recovery, 1 h", "checkfreq_recovery_1h_s", _of("checkfreq", _recovery, hour), recoveries),
        relative(
            "CheckFreq recovery, 10 min", "checkfreq_recovery_10m_s", _of("checkfreq", _recovery, ten), recoveries
        ),
        relative("Gemini recovery, 1 h", "gemini_recovery_1h_s", _of("gemini", _recovery, hour), recoveries),
        relative("Gemini recovery, 10 min", "gemini_recovery_10m_s", _of("gemini", _recovery, ten), recoveries),
        absolute("MoC ETTR, 1 h", "moc_ettr_1h", _of("moc", _ettr, hour), 0.05),
        absolute("MoC ETTR, 10 min", "moc_ettr_10m", _of("moc", _ettr, ten), 0.05),
        absolute("MoEvement ETTR", "moevement_ettr", _of("moevement", _ettr), ETTR_TOLERANCE),
    )


def result() -> PaperResult:
    """All rows, predicted, and the ranges of the text beside ours."""
    held = [claim.what for claim in claims() if claim.holds or claim.inside]
    missed = [claim.what for claim in claims() if claim.verdict == "NO"]
    report = Report(
        "MoEvement Table 7: DeepSeek-MoE in low precision, 12 hours on 128 H100 GPUs",
        (Fact("Ranges of section 5.7 that hold, or that ours is within", f"{len(held)} of {len(claims())}"),),
        (_claims(), *(_table(setting) for setting in SETTINGS)),
        (
            "The rows were not at hand: all are predicted with the systems' constants of Table 3. Only"
            " the ranges that the text gives can be compared.",
            "Ranges that do not hold: " + ("; ".join(missed) if missed else "none") + ".",
        ),
    )
    rows = [
        {"setting": setting, "mtbf_s": mtbf_s, "system": system, **asdict(outcome)}
        for (setting, mtbf_s, system), outcome in outcomes().items()
    ]
    data = {"rows": rows, "claims": [asdict(claim) | {"verdict": claim.verdict} for claim in claims()]}
    return PaperResult(report, data, plot(_draw, columns=len(SETTINGS), size=(15, 3.6)))


def _claims() -> Table:
    columns: Columns = (("range", "text"), ("paper", "text"), ("ours", "text"), ("holds", "text"))
    rows = tuple((claim.what, _range(claim.paper), _range(claim.ours), claim.verdict) for claim in claims())
    return Table("Section 5.7", columns, rows)


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.4g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _table(setting: str) -> Table:
    rows = tuple(
        (
            f"{mtbf_s // 60} min",
            NAMES[system],
            outcome.window if system == "moevement" else outcome.interval,
            outcome.overhead_s,
            outcome.overhead_share,
            outcome.recovery_s,
            decimals(outcome.ettr),
        )
        for (name, mtbf_s, system), outcome in outcomes().items()
        if name == setting
    )
    columns: Columns = (
        ("MTBF", "text"),
        ("system", "text"),
        ("interval", "count"),
        ("overhead", "seconds"),
        ("overhead share", "share"),
        ("recovery", "seconds"),
        ("ETTR", "text"),
    )
    return Table(setting, columns, rows)


def _draw(axes: list[Any]) -> None:
    minutes = [mtbf_s / 60 for mtbf_s in MTBF_S]
    for axis, setting in zip(axes, SETTINGS, strict=True):
        for system, colour in COLOURS.items():
            ettrs = [outcomes()[setting, mtbf_s, system].ettr for mtbf_s in MTBF_S]
            axis.plot(minutes, ettrs, color=colour, marker="o", label=NAMES[system])
        axis.set(title=setting, xlabel="MTBF (minutes)", ylim=(0, 1))
    axes[0].set_ylabel("ETTR")
    axes[0].legend()
