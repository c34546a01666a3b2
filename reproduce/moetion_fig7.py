"""MOETION Fig. 5 to 7: stalls, checkpoints per 100 iterations, and time wasted by a fault, of MoE-GPT-3.8B-8E.

Bytes, rates and iterations are those of Fig. 9. Time wasted is the paper's sum (7.2): a checkpoint, its retrieval, and
half of the iterations between two. Retrieval is the same for all systems and not published, so differences count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from .figure import Figure, bars, published
from .moetion_fig9 import point

EXPERTS = 8


@dataclass(frozen=True)
class SystemTimes:
    """One system: seconds of a checkpoint, and iterations between two without a stall, or with one in each."""

    name: str
    checkpoint_s: float
    interval: int

    @property
    def stall_s(self) -> float:
        """Added to an iteration that takes a checkpoint."""
        return max(0.0, self.checkpoint_s - iteration_s() * self.interval)

    @property
    def per_100_iterations(self) -> float:
        """Checkpoints."""
        return 100 / self.interval

    @property
    def wasted_s(self) -> float:
        """By a fault, without the retrieval."""
        return self.checkpoint_s + self.interval / 2 * iteration_s()


def iteration_s() -> float:
    """Of training without checkpoints."""
    return point(EXPERTS).iteration_s


@cache
def systems() -> dict[str, SystemTimes]:
    """Those of the figures; CheckFreq writes the whole model to storage."""
    found = point(EXPERTS)
    stored_s = found.gemini_bytes / float(published("moetion")["cluster"]["storage_bytes_per_s"])
    times = {"checkfreq": stored_s, "gemini": found.gemini_s, "moetion": found.moetion_s}
    each = {name: SystemTimes(name, seconds, 1) for name, seconds in times.items()}
    rare = {
        f"{name} without stall": SystemTimes(name, seconds, math.ceil(seconds / iteration_s()))
        for name, seconds in times.items()
    }
    return each | rare


def compared() -> list[tuple[str, float, float]]:
    """What the text says, ours first."""
    given, ours = published("moetion"), systems()
    wasted = given["fig7"]
    return [
        ("Fig. 5: stall of CheckFreq, s", ours["checkfreq"].stall_s, given["fig5"]["checkfreq_stall_s"]),
        ("Fig. 5: stall of Gemini, s", ours["gemini"].stall_s, given["fig5"]["gemini_stall_s"]),
        *(
            (f"Fig. 6: {name} per 100", ours[f"{name} without stall"].per_100_iterations, given["fig6"][name])
            for name in ("checkfreq", "gemini", "moetion")
        ),
        (
            "Fig. 7: Gemini in each iteration, above MOETION, s",
            ours["gemini"].wasted_s - ours["moetion"].wasted_s,
            wasted["gemini_every_iteration_s"] - wasted["moetion_s"],
        ),
        (
            "Fig. 7: Gemini without stall, above MOETION, s",
            ours["gemini without stall"].wasted_s - ours["moetion"].wasted_s,
            wasted["gemini_without_stall_s"] - wasted["moetion_s"],
        ),
    ]


def figure() -> Figure:
    """All three figures as one table."""
    found, rows = systems(), compared()
    wasted = {"": [one.wasted_s for one in found.values()]}
    return Figure(
        "moetion_fig7",
        {
            "iteration_s": iteration_s(),
            "systems": {
                name: {"checkpoint_s": one.checkpoint_s, "stall_s": one.stall_s, "wasted_s": one.wasted_s}
                for name, one in found.items()
            },
            "compared": [{"what": what, "ours": ours, "published": there} for what, ours, there in rows],
        },
        (
            ((name, one.interval, one.checkpoint_s, one.stall_s, one.wasted_s) for name, one in found.items()),
            ((what, f"{ours:.3g}", f"{there:.3g}", ours / there - 1) for what, ours, there in rows),
        ),
        lambda axes: bars(axes[0], list(found), wasted, ylabel="wasted by a fault, without retrieval (s)"),
    )
