"""MOETION Fig. 10: what each technique takes off a checkpoint, added one after the other.

From real jobs: benchmarks/results/selective_ablation.json, which `python benchmarks/selective_ablation.py --write`
measures. The paper tells seconds of a checkpoint on 64 GPUs; what four ranks on CPUs can tell as well is which bytes a
checkpoint copies and sends, and what it adds to an iteration. Techniques are in the order of that benchmark.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

from moe_ckpt.report import Table, table

from .figure import BENCHMARKS, Figure, measured, published

FILE, COMMAND = "selective_ablation.json", "python benchmarks/selective_ablation.py --write"
NONE, FULL, SELECTION, REDUNDANCY, GRADIENTS, BUBBLES = (
    "none",
    "full",
    "selection",
    "redundancy",
    "gradients",
    "bubbles",
)
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


def in_bubbles() -> float:
    """Bytes per rank and iteration whose copy began while the stage waited for another one."""
    return fmean(row[JOBS[BUBBLES]]["copied_in_waits"] for row in rounds())


def compared() -> list[tuple[str, float, float | None]]:
    """What a technique leaves of what was before it, or all of selection alone: ours of bytes sent, the paper's of
    seconds."""
    given = published("moetion")["fig10"]
    redundant, bubbles, full = (given[f"{name}_s"] for name in ("redundancy_aware", "bubble_aware", "full"))
    others = (one["full_s"] / one["selective_s"] for one in given["others"].values())
    whole = full / given["selective_s"]
    return [
        (SELECTION, left(SELECTION, FULL), None),
        (REDUNDANCY, left(REDUNDANCY, SELECTION), redundant / bubbles),
        (GRADIENTS, left(GRADIENTS, REDUNDANCY), full / redundant),
        ("all, of selection", left(GRADIENTS, SELECTION), whole),
        *((f"all, of selection: {name}", left(GRADIENTS, SELECTION), share)
          for name, share in zip(given["others"], others, strict=True)),
    ]  # fmt: skip


def figure() -> Figure:
    """The breakdown, and what the text says of it."""
    given = published("moetion")["fig10"]
    return Figure(
        "MOETION Fig. 10: what each technique saves, real jobs",
        {
            "techniques": {name: vars(one) for name, one in techniques().items()},
            "left": [{"what": what, "ours": ours, "published": there} for what, ours, there in compared()],
            "copies_begun_in_bubbles_bytes": in_bubbles(),
            "published": given,
        },
        (_techniques(), _compared()),
        _draw,
        (),
        (
            f"Measured by `{COMMAND}`; [its page](selective-ablation.md) tells the jobs and the spread between rounds."
            " Ours are bytes that one rank sends to its peer for a snapshot, the paper's are seconds of a checkpoint:"
            " their shares agree as far as sending is what a checkpoint waits for.",
            f"Bubbles take no bytes away. The paper's checkpoint of MoE-GPT-3.8B-8E takes {given['bubble_aware_s']:g}"
            f" instead of {given['selective_s']:g} s with them; here the copies of {in_bubbles() / 1e6:.1f} MB per"
            " rank and iteration began in one. Four ranks share two cores, on which a wait of one stage is time of"
            " another, so that iterations do not show what bubbles hide on GPUs.",
        ),
        (1, 2),
        (11, 4),
    )


def _techniques() -> Table:
    full = techniques()[FULL].sent_bytes
    rows = (
        (name if name in (FULL, SELECTION) else f"+ {name}", round(one.copied_bytes), round(one.sent_bytes),
         one.sent_bytes / full, "-" if name == REDUNDANCY else f"{median(one.by_full):.3f}")
        for name, one in techniques().items()
    )  # fmt: skip
    columns = "technique | copied:bytes | sent:bytes | sent, of full:share | iteration, of that with full"
    return table("Per snapshot of one rank", columns, rows)


def _compared() -> Table:
    title = "What is left by each technique: ours of bytes sent, published of seconds"
    return table(title, "technique | ours:share | published:share", compared())


def _draw(axes: list[Any]) -> None:
    names = [name if name in (FULL, SELECTION) else f"+ {name}" for name in techniques()]
    for axis, what in zip(axes, ("copied_bytes", "sent_bytes"), strict=True):
        axis.bar(names, [getattr(one, what) / 1e6 for one in techniques().values()])
        axis.set(title=what.removesuffix("_bytes"), ylabel="MB of a snapshot of one rank")
        axis.tick_params(axis="x", rotation=20)
