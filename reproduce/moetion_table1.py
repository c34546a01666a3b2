"""MOETION Table 1: validation loss by the share of tokens that experts were not given.

From real training: docs/results/dropped-tokens.json, which `python examples/accuracy/dropped_tokens.py` makes.
"""

from __future__ import annotations

from functools import cache
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
    """The table, ours and the published one."""
    given = {float(share): loss for share, loss in published("moetion")["table1"]["losses"].items()}
    changes = {share: given[share] / given[0.0] - 1 for share in given}
    rows = []
    for share in shares():
        found = off(share)
        mean = sum(losses(share).values()) / len(losses(share))
        rows.append((share, f"{mean:.4f}", f"{found.mean:+.2%} ± {found.half_width:.2%}", f"{changes[share]:+.2%}"))
    made = training()
    series = {
        "here": [100 * off(share).mean for share in shares()],
        "published": [100 * changes[share] for share in shares()],
    }
    beyond = [share for share in shares()[1:] if abs(off(share).mean) > off(share).half_width]
    return Figure(
        "moetion_table1",
        {"runs": made["runs"], "off": {str(share): off(share).mean for share in shares()}, "published": given},
        (rows,),
        lambda axes: lines(
            axes[0], [100 * share for share in shares()], series, xlabel="dropped tokens (%)",
            ylabel="validation loss off (%)", yscale="symlog",
        ),
        values={
            "made": made, "seeds": len(losses(0.0)), "given": published("moetion")["table1"],
            "beyond": ", ".join(f"{share:.0%}" for share in beyond) or "no share", "last": off(shares()[-1]).mean,
            "there": changes[shares()[-1]],
        },
    )  # fmt: skip
