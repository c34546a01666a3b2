"""MOETION Table 1: validation loss by the share of tokens that experts were not given.

From real training: docs/results/dropped-tokens.json, which `python examples/accuracy/dropped_tokens.py` makes.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.simulator.events import Estimate, estimate

from .figure import Figure, lines, measured, published

FILE, COMMAND = "dropped-tokens.json", "python examples/accuracy/dropped_tokens.py"


@cache
def training() -> dict[str, Any]:
    """All of it. Raises UsageError where there was none."""
    return measured(FILE, COMMAND)


def shares() -> list[float]:
    """What was dropped, ascending; nothing first."""
    return sorted({run["dropped"] for run in training()["runs"]})


def losses(share: float) -> dict[int, float]:
    """By seed."""
    return {run["seed"]: run["loss"] for run in training()["runs"] if run["dropped"] == share}


def off(share: float) -> Estimate:
    """By how much the loss is off that of the same seed without drops, as a share: the mean over seeds."""
    without = losses(0.0)
    return estimate([loss / without[seed] - 1 for seed, loss in losses(share).items()])


def figure() -> Figure:
    """The table, with the published changes."""
    given = {float(share): loss for share, loss in published("moetion")["table1"]["losses"].items()}
    changes = {share: given[share] / given[0.0] - 1 for share in given}
    found = {share: off(share) for share in shares()}
    rows = [
        (share, f"{fmean(losses(share).values()):.4f}", f"{one:+.2%}", f"{changes[share]:+.2%}")
        for share, one in found.items()
    ]
    made, most = training(), max(found)
    series = {
        "here": [100 * one.mean for one in found.values()],
        "published": [100 * changes[share] for share in found],
    }
    beyond = [share for share, one in found.items() if abs(one.mean) > one.half_width]
    return Figure(
        "moetion_table1",
        {"runs": made["runs"], "off": {str(share): one.mean for share, one in found.items()}, "published": given},
        (rows,),
        lambda axes: lines(
            axes[0], [100 * share for share in found], series, xlabel="dropped tokens (%)",
            ylabel="validation loss off (%)", yscale="symlog",
        ),
        values={
            "made": made, "seeds": len(losses(0.0)), "given": published("moetion")["table1"],
            "beyond": ", ".join(f"{share:.0%}" for share in beyond) or "no share", "last": found[most],
            "there": changes[most], "count": len(found) - 1,
        },
    )  # fmt: skip
