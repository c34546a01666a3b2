"""MOETION Fig. 11: share of the tokens at risk in each iteration, experts by risk against experts in turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean

from .figure import Figure, lines, measured, published
from .machine import where

FILE, COMMAND = "tokens_at_risk.json", "python benchmarks/figure_jobs.py tokens_at_risk --write"


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
    share = fmean(one.by_risk < one.in_turn for one in points())
    series = {"in turn": [one.in_turn for one in points()], "by risk": [one.by_risk for one in points()]}
    at, label = [one.iteration for one in points()], "tokens at risk, iterations' worth"
    return Figure(
        "moetion_fig11",
        {"points": [vars(one) for one in points()], "fewer_by_risk": mean, "fewer_at_most": best, "published": given},
        (
            (
                    ("tokens at risk in turn, of those by risk", f"{1 / (1 - mean):.2f}",
                     f"{given['in_turn_over_by_risk']:g}"),
                    ("fewer by risk, at most", f"{best:.0%}", f"{given['fewer_up_to']:.0%}"),
                    ("iterations in which fewer are at risk", f"{share:.0%}", "all"),
                ),
        ),
        lambda axes: lines(axes[0], at, series, xlabel="iteration", ylabel=label, ylim=(0, None)),
        values={"command": COMMAND, "where": where(measured(FILE, COMMAND))},
    )  # fmt: skip
