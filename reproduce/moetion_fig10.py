"""MOETION Fig. 10: what each technique takes off a checkpoint, added one after the other.

The paper tells seconds of a checkpoint on 64 GPUs; what four ranks on CPUs can tell as well is which bytes a
checkpoint copies and sends, and what it adds to an iteration. Techniques are in the order of that benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.simulator.events import estimate

from .figure import BENCHMARKS, Figure, bars, measured, published
from .machine import where

FILE, COMMAND = "selective_ablation.json", "python benchmarks/figure_jobs.py selective_ablation --write"
FULL, SELECTION, REDUNDANCY, GRADIENTS, BUBBLES = "full", "selection", "redundancy", "gradients", "bubbles"
STEPS = (FULL, SELECTION, REDUNDANCY, GRADIENTS, BUBBLES)
JOBS = {FULL: FULL, SELECTION: SELECTION, REDUNDANCY: SELECTION, GRADIENTS: "+ gradients", BUBBLES: "+ bubbles"}
"""Which job shows a technique. That what peers hold is not sent cannot be switched off: without redundancy is what the
job of `selection` sent and what its peers made of what they had."""


@dataclass(frozen=True)
class Technique:
    """Bytes of a snapshot of one rank, to its own memory and to peers, and iteration times by that of `full`, one of
    each round."""

    name: str
    copied_bytes: float
    sent_bytes: float
    by_full: tuple[float, ...]

    @property
    def iteration(self) -> str:
        """By that of `full`, with half of the 95 % interval; nothing for what no job shows alone."""
        found = estimate(self.by_full)
        return "-" if self.name == REDUNDANCY else f"{found:.3f}"

    @property
    def is_shorter(self) -> bool:
        """Whether iterations are shorter than with `full` beyond their interval."""
        found = estimate(self.by_full)
        return found.runs > 1 and found.mean + found.half_width < 1


@cache
def rounds() -> tuple[dict[str, Any], ...]:
    """All of the benchmark. Raises UsageError where it has not run."""
    return tuple(measured(FILE, COMMAND, BENCHMARKS)["rounds"])


@cache
def techniques() -> dict[str, Technique]:
    """By name."""
    found = {}
    for step in STEPS:
        own = [row[JOBS[step]] for row in rounds()]
        copied, sent, spared = (fmean(one[what] for one in own) for what in ("copied", "sent", "spared"))
        by_full = tuple(row[JOBS[step]]["iteration_s"] / row[FULL]["iteration_s"] for row in rounds())
        found[step] = Technique(step, copied, sent + spared if step in (FULL, SELECTION) else sent, by_full)
    return found


def left(technique: str, before: str) -> float:
    """Of the bytes that were sent before a technique, the share that is sent with it."""
    return techniques()[technique].sent_bytes / techniques()[before].sent_bytes


def state_sent() -> float:
    """Share of the bytes sent with gradients that are state, of experts which the snapshot before had not; gradients
    have 2 bytes where state has 12."""
    found = techniques()
    followed = (found[REDUNDANCY].sent_bytes - found[GRADIENTS].sent_bytes) * 2 / (12 - 2)
    return 1 - followed / found[GRADIENTS].sent_bytes


def _by_its_job(step: str) -> str:
    """What the job of a technique sent, of that with `full`."""
    sent, full = (fmean(row[JOBS[one]]["sent"] for row in rounds()) for one in (step, FULL))
    return "-" if step == REDUNDANCY else f"{100 * sent / full:.1f} %"


def in_bubbles() -> float:
    """Bytes per rank and iteration whose copy began while the stage waited for another one."""
    return fmean(row[JOBS[BUBBLES]]["copied_in_waits"] for row in rounds())


def compared() -> list[tuple[str, float | None, float | None]]:
    """What a technique leaves of what was before it, or all of selection alone: ours of bytes sent, None for a model
    that was not run, the paper's of seconds."""
    given = published("moetion")["fig10"]
    redundant, bubbles, full = (given[f"{name}_s"] for name in ("redundancy_aware", "bubble_aware", "full"))
    others = (one["full_s"] / one["selective_s"] for one in given["others"].values())
    whole = full / given["selective_s"]
    return [
        (SELECTION, left(SELECTION, FULL), None),
        (REDUNDANCY, left(REDUNDANCY, SELECTION), redundant / bubbles),
        (GRADIENTS, left(GRADIENTS, REDUNDANCY), full / redundant),
        ("all, of selection", left(GRADIENTS, SELECTION), whole),
        *((f"all, of selection: {name}", None, share) for name, share in zip(given["others"], others, strict=True)),
    ]  # fmt: skip


def figure() -> Figure:
    """The breakdown, and what the text says of it."""
    given, found = published("moetion")["fig10"], techniques()
    named = {name if name in (FULL, SELECTION) else f"+ {name}": one for name, one in found.items()}
    series = {what: [getattr(one, f"{what}_bytes") / 1e6 for one in found.values()] for what in ("copied", "sent")}
    return Figure(
        "moetion_fig10",
        {
            "techniques": {name: vars(one) for name, one in found.items()},
            "left": [{"what": what, "ours": ours, "published": there} for what, ours, there in compared()],
            "copies_begun_in_bubbles_bytes": in_bubbles(),
            "published": given,
        },
        (
            ((name, round(one.copied_bytes), round(one.sent_bytes), one.sent_bytes / found[FULL].sent_bytes,
              _by_its_job(one.name), one.iteration) for name, one in named.items()),
            compared(),
        ),
        lambda axes: bars(axes[0], list(named), series, ylabel="MB of a snapshot of one rank"),
        values={
            "command": COMMAND,
            "where": where(measured(FILE, COMMAND, BENCHMARKS)), "given": given,
            "state": state_sent(), "in_bubbles_mb": in_bubbles() / 1000000.0, "rounds": len(rounds()),
            "shorter": ", ".join(one.name for one in found.values() if one.is_shorter) or "no technique",
        },
    )  # fmt: skip
