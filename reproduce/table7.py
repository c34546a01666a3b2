"""MoEvement Table 7: DeepSeek-MoE in five low-precision settings on H100 GPUs, and what section 5.7 says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.types import LOW_PRECISIONS
from moe_ckpt.report import Fact

from .evaluation import H100, SystemOutcome, evaluate
from .figure import COLOURS, NAMES, Figure, Rows, decimals, lines, minutes, published
from .jobs import h100_job

MTBF_S = (3600, 1800, 600)
"""Three rows per setting; the text names an hour and 10 minutes. The one between is taken to be 30 minutes."""

SETTINGS = tuple(precision.name for precision in LOW_PRECISIONS)
INTERVAL_TOLERANCE = 0.10
ETTR_TOLERANCE = 0.01
RECOVERY_TOLERANCE = 0.25
"""The recovery times of Table 3 do not follow from its intervals to better than a factor of two; a quarter is near."""


@dataclass(frozen=True)
class PublishedRange:
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
def outcomes() -> dict[tuple[str, int, str], SystemOutcome]:
    """What comes out, by setting, mean time between failures in seconds, and system."""
    return {
        (precision.name, mtbf_s, system): outcome
        for precision in LOW_PRECISIONS
        for mtbf_s in MTBF_S
        for system, outcome in evaluate(h100_job(precision), H100, mtbf_s).items()
    }


def _ends(system: str, field: str, mtbf_s: Iterable[int] = MTBF_S) -> tuple[float, float]:
    """Least and most of a field of a system's outcomes, over all settings."""
    times = tuple(mtbf_s)
    found = [getattr(of, field) for (_, time, name), of in outcomes().items() if name == system and time in times]
    return min(found), max(found)


_HOUR, _TEN = (3600,), (600,)
_RANGES = (
    ("Gemini interval, 1 h", "gemini_interval_1h", "gemini", "interval", _HOUR, INTERVAL_TOLERANCE, True),
    ("Gemini interval, 10 min", "gemini_interval_10m", "gemini", "interval", _TEN, INTERVAL_TOLERANCE, True),
    ("Gemini overhead, 10 min", "gemini_overhead_share_10m", "gemini", "overhead_share", _TEN, 0.02, False),
    ("MoC overhead", "moc_overhead_share", "moc", "overhead_share", MTBF_S, RECOVERY_TOLERANCE, True),
    ("MoEvement overhead", "moevement_overhead_share", "moevement", "overhead_share", MTBF_S, 0.005, False),
    *((f"{NAMES[system]} recovery, {every}", f"{system}_recovery_{every.replace(' ', '').removesuffix('in')}_s", system,
       "recovery_s", times, RECOVERY_TOLERANCE, True)
      for system in ("checkfreq", "gemini") for every, times in (("1 h", _HOUR), ("10 min", _TEN))),
    ("MoC ETTR, 1 h", "moc_ettr_1h", "moc", "ettr", _HOUR, 0.05, False),
    ("MoC ETTR, 10 min", "moc_ettr_10m", "moc", "ettr", _TEN, 0.05, False),
    ("MoEvement ETTR", "moevement_ettr", "moevement", "ettr", MTBF_S, ETTR_TOLERANCE, False),
)  # fmt: skip
"""Ranges of section 5.7: name, published key, system, field, times between failures, tolerance, and whether that
is a share of each end."""

_INTERVALS = (
    ("fp8-fp8", "checkfreq_interval_least"),
    ("fp8-fp16-fp32", "checkfreq_interval_fp16_master_fp32_moments"),
    ("fp8-fp32", "checkfreq_interval_fp32"),
)


@cache
def claims() -> tuple[PublishedRange, ...]:
    """All ranges of section 5.7."""
    paper, found = published()["table7"], []
    for setting, key in _INTERVALS:
        interval, there = float(outcomes()[setting, 3600, "checkfreq"].interval), paper[key]
        slack = INTERVAL_TOLERANCE * there
        what = f"CheckFreq interval, {setting}"
        found.append(PublishedRange(what, (there, there), (interval, interval), (slack, slack)))
    for what, key, system, field, times, tolerance, is_share in _RANGES:
        low, high = paper[key]
        slacks = (tolerance * low, tolerance * high) if is_share else (tolerance, tolerance)
        found.append(PublishedRange(what, (low, high), _ends(system, field, times), slacks))
    return tuple(found)


def figure() -> Figure:
    """All rows, predicted, and the ranges of the text beside ours."""
    found = outcomes()
    held = sum(claim.verdict != "NO" for claim in claims())
    missed = [claim.what for claim in claims() if claim.verdict == "NO"]
    rows = [
        {"setting": setting, "mtbf_s": mtbf_s, "system": system, **asdict(outcome)}
        for (setting, mtbf_s, system), outcome in found.items()
    ]

    def draw(axes: list[Any]) -> None:
        for axis, setting in zip(axes, SETTINGS, strict=True):
            series = {NAMES[name]: [found[setting, mtbf_s, name].ettr for mtbf_s in MTBF_S] for name in COLOURS}
            at = [mtbf_s / 60 for mtbf_s in MTBF_S]
            lines(axis, at, series, title=setting, xlabel="MTBF (minutes)", ylabel="ETTR", ylim=(0, 1))

    return Figure(
        "table7",
        {"rows": rows, "claims": [asdict(claim) | {"verdict": claim.verdict} for claim in claims()]},
        (
            ((claim.what, _range(claim.paper), _range(claim.ours), claim.verdict) for claim in claims()),
            *(_table(setting) for setting in SETTINGS),
        ),
        draw,
        (Fact("Ranges of section 5.7 that hold, or that ours is within", f"{held} of {len(claims())}"),),
        {"missed": "; ".join(missed) or "none"},
    )


def _range(ends: tuple[float, float]) -> str:
    low, high = (f"{end:.4g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def _table(setting: str) -> Rows:
    rows = (
        (minutes(mtbf_s), NAMES[system], of.window if system == "moevement" else of.interval, of.overhead_s,
         of.overhead_share, of.recovery_s, decimals(of.ettr))
        for (name, mtbf_s, system), of in outcomes().items() if name == setting
    )  # fmt: skip
    return rows
