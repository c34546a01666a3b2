"""MoC Fig. 14 (a) and Table 3: validation loss over training and downstream accuracy by what PEC leaves out.

From real training under SIGKILLs: docs/results/accuracy-campaign.json, which `python examples/accuracy/campaign.py`
makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import fmean
from typing import Any

from .figure import Figure, measured

FILE, COMMAND = "accuracy-campaign.json", "python examples/accuracy/campaign.py"
SERIES = {"fault-free": "without faults", "full": "baseline", "pec K=1 W": "W", "pec K=1 O": "O", "pec K=1": "WO"}
"""Runs of the campaign, and what the paper calls them."""

TASKS = ("cloze", "original")


@cache
def runs() -> tuple[dict[str, Any], ...]:
    """All of the campaign from the seeds that all strategies have. Raises UsageError where there was none."""
    found = measured(FILE, COMMAND)["runs"]
    seeds: dict[str, set[int]] = {}
    for run in found:
        if run["name"] in (*SERIES, "selective"):
            seeds.setdefault(run["name"], set()).add(run["seed"])
    return tuple(run for run in found if run["seed"] in set.intersection(*seeds.values()))


def curve(name: str) -> list[tuple[int, float]]:
    """Validation loss over iterations, the mean over seeds."""
    own = [dict((at, loss) for at, loss in run["validation"]) for run in runs() if run["name"] == name]
    return [(at, fmean(one[at] for one in own)) for at in sorted(set.intersection(*map(set, own)))]


def means(name: str) -> dict[str, float]:
    """Of the runs of one name: final loss, lost tokens, bytes of a snapshot as a share of a full one, tasks."""
    own = [run for run in runs() if run["name"] == name]
    return {what: fmean(run[what] for run in own) for what in ("loss", "plt", "snapshot", *TASKS)}


def deviation() -> tuple[float, float]:
    """Least and most by which a partial run's mean of both tasks is above the baseline's."""

    def score(name: str) -> float:
        return fmean(means(name)[task] for task in TASKS)

    off = [score(name) - score("full") for name in present() if SERIES[name] in ("W", "O", "WO")]
    return min(off), max(off)


def present() -> Sequence[str]:
    """Of the series, what was trained."""
    known = {run["name"] for run in runs()}
    return [name for name in SERIES if name in known]


def figure() -> Figure:
    """Curves and table."""
    (low, high), found = deviation(), {name: means(name) for name in present()}
    curves = {name: curve(name) for name in found}

    def draw(axes: list[Any]) -> None:
        for name, points in curves.items():
            axes[0].plot(*zip(*points, strict=True), label=SERIES[name])
        axes[0].set(xlabel="iteration", ylabel="validation loss (nats/byte)")
        axes[0].legend()

    return Figure(
        "moc_fig14",
        {"runs": found, "curves": curves, "deviation": [low, high]},
        (
            ((SERIES[name], one["snapshot"], one["plt"], f"{one['loss']:.4f}",
                  *(f"{100 * one[task]:.2f}" for task in TASKS)) for name, one in found.items()),
        ),
        draw,
        values={"low": 100 * low, "high": 100 * high},
    )  # fmt: skip
