"""MOETION Fig. 11: share of the tokens at risk in each iteration, experts by risk against experts in turn.

From a real run: docs/results/tokens_at_risk.json, which `python benchmarks/tokens_at_risk.py` measures.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.report import table

from .figure import Figure, measured, published

FILE, COMMAND = "tokens_at_risk.json", "python benchmarks/tokens_at_risk.py"


@dataclass(frozen=True)
class AtRisk:
    """One iteration: tokens whose updates a fault would cost, in iterations' worth."""

    iteration: int
    in_turn: float
    by_risk: float


@cache
def points() -> tuple[AtRisk, ...]:
    """Every iteration that was measured."""
    found = measured(FILE, COMMAND)
    routed = found["routed_tokens_per_iteration"]
    return tuple(AtRisk(at, turn / routed, risk / routed) for at, turn, risk in found["by_iteration"])


def lower() -> tuple[float, float]:
    """By what share fewer tokens are at risk when experts are taken by risk: in total, and in the best iteration."""
    turn, risk = (fmean(getattr(one, name) for one in points()) for name in ("in_turn", "by_risk"))
    return 1 - risk / turn, max(1 - one.by_risk / one.in_turn for one in points())


def figure() -> Figure:
    """The curves, and what the text says of them."""
    given, (mean, best) = published("moetion")["fig11"], lower()
    ratio = 1 / (1 - mean)
    rows = (
        ("tokens at risk in turn, of those by risk", f"{ratio:.2f}", f"{given['in_turn_over_by_risk']:g}"),
        ("fewer by risk, at most", f"{best:.0%}", f"{given['fewer_up_to']:.0%}"),
        ("iterations in which fewer are at risk", f"{_share_lower():.0%}", "all"),
    )
    return Figure(
        "MOETION Fig. 11: tokens at risk over iterations of a real run",
        {"points": [vars(one) for one in points()], "fewer_by_risk": mean, "fewer_at_most": best, "published": given},
        (table("Compared", "what | ours | published", rows),),
        _draw,
        (),
        (
            f"Measured by `{COMMAND}` with the driver's own jobs under `pec` and `selective`: a small model with real"
            " routers, at equal bytes. The paper's share is of the tokens of the iterations since the last copy; here"
            " the unit is the tokens of one iteration.",
        ),
        (1, 1),
        (9, 3.8),
    )


def _share_lower() -> float:
    return fmean(one.by_risk < one.in_turn for one in points())


def _draw(axes: list[Any]) -> None:
    at = [one.iteration for one in points()]
    axes[0].plot(at, [one.in_turn for one in points()], label="in turn")
    axes[0].plot(at, [one.by_risk for one in points()], label="by risk")
    axes[0].set(xlabel="iteration", ylabel="tokens at risk, iterations' worth", ylim=(0, None))
    axes[0].legend()
