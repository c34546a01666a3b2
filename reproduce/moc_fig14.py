"""MoC Fig. 14 and Table 3, PEC Fig. 6: loss over training and accuracy by what PEC leaves out, of text and of images.

From real training under SIGKILLs: docs/results/accuracy-campaign.json and vision-accuracy.json, which `python
examples/accuracy/campaign.py` and `python examples/accuracy/vision.py` make.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.simulator.events import Estimate, estimate

from .figure import Figure, lines, measured
from .machine import UNKNOWN_COMMIT

FILE, COMMAND = "accuracy-campaign.json", "python examples/accuracy/campaign.py"
SERIES = {"fault-free": "without faults", "full": "baseline", "pec K=1 W": "W", "pec K=1 O": "O", "pec K=1": "WO"}
"""Runs of the campaign, and what the paper calls them."""

TASKS = ("cloze", "original")
VISION_FILE, VISION_COMMAND = "vision-accuracy.json", "python examples/accuracy/vision.py"
VISION = {
    "fault-free": "without faults", "one bit": "without faults, another bit", "sequential": "one expert, in turn",
    "load-aware": "one expert, by load", "stale": "one expert, in turn, rarely",
}  # fmt: skip
"""Runs of the vision model, and what they are."""


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


def of_seeds(name: str) -> dict[int, dict[str, Any]]:
    """The runs of one name."""
    return {run["seed"]: run for run in runs() if run["name"] == name}


def told(some: Iterable[Mapping[str, Any]]) -> str:
    """Of which seeds and commits these runs of the campaign are, for a person."""
    made: dict[str, set[int]] = {}
    for run in some:
        made.setdefault(run.get("made", UNKNOWN_COMMIT), set()).add(run["seed"])
    texts = (f"{', '.join(map(str, sorted(seeds)))}, {commit}" for commit, seeds in made.items())
    return f"[runs of the campaign](accuracy-campaign.md), seeds {'; '.join(texts)}"


def off(name: str) -> tuple[Estimate, Estimate]:
    """How far runs are off the baseline of their seeds: the loss as a share, the mean of both tasks in points."""
    baseline = of_seeds("full")
    pairs = [(run, baseline[seed]) for seed, run in of_seeds(name).items()]
    points = [100 * fmean(one[task] - other[task] for task in TASKS) for one, other in pairs]
    return estimate([one["loss"] / other["loss"] - 1 for one, other in pairs]), estimate(points)


@cache
def vision() -> dict[str, Any]:
    """All of the vision model. Raises UsageError where there was none."""
    return measured(VISION_FILE, VISION_COMMAND)


def seen(name: str) -> list[dict[str, Any]]:
    """The runs of one name of the vision model."""
    return [run for run in vision()["runs"] if run["name"] == name]


def vision_off(name: str) -> Estimate:
    """How far test accuracy is off the runs without faults of the same seeds, in points."""
    baseline = {run["seed"]: run["accuracy"] for run in seen("fault-free")}
    return estimate([100 * (run["accuracy"] - baseline[run["seed"]]) for run in seen(name)])


def present() -> Sequence[str]:
    """Of the series, what was trained."""
    known = {run["name"] for run in runs()}
    return [name for name in SERIES if name in known]


def figure() -> Figure:
    """Curves and table."""
    found = {name: means(name) for name in present()}
    apart = {name: off(name) for name in found}
    partial = [tasks for name, (_, tasks) in apart.items() if SERIES[name] in ("W", "O", "WO")]
    low, high = min(one.mean for one in partial), max(one.mean for one in partial)
    beyond = sum(one.is_beyond() for one in partial)
    curves = {name: curve(name) for name in found}
    images = {name: vision_off(name) for name in VISION}
    clear = [VISION[name] for name, one in images.items() if one.is_beyond()]
    trained = {
        name: [fmean(part) for part in zip(*(run["curve"] for run in seen(name)), strict=True)] for name in VISION
    }

    def draw(axes: list[Any]) -> None:
        for name, points in curves.items():
            axes[0].plot(*zip(*points, strict=True), label=SERIES[name])
        axes[0].set(xlabel="iteration", ylabel="validation loss (nats/byte)", title="(a) text")
        axes[0].legend()
        step = vision()["iterations"] / len(trained["fault-free"])
        at = [round(step * number) for number in range(1, 1 + len(trained["fault-free"]))]
        lines(
            axes[1], at, {VISION[name]: points for name, points in trained.items()}, xlabel="iteration",
            ylabel="training loss (nats/image)", title="(b) images",
        )  # fmt: skip

    return Figure(
        "moc_fig14",
        {"runs": found, "curves": curves, "deviation": [low / 100, high / 100], "vision": vision()["runs"]},
        (
            [(SERIES[name], one["snapshot"], one["plt"], f"{one['loss']:.4f}",
              f"{apart[name][0]:+.2%}",
              *(f"{100 * one[task]:.2f}" for task in TASKS),
              f"{apart[name][1]:+.2f}") for name, one in found.items()],
            [(VISION[name], fmean(run["plt"] for run in seen(name)),
              f"{fmean(run['curve'][-1] for run in seen(name)):.3f}",
              f"{100 * fmean(run['accuracy'] for run in seen(name)):.2f}",
              f"{one:+.2f}") for name, one in images.items()],
        ),
        draw,
        values={
            "low": low, "high": high, "beyond": beyond or "none", "runs": told(runs()), "vision": vision(),
            "vision_seeds": len(seen("fault-free")), "rarely": vision()["iterations"] // 10,
            "clear": ", ".join(clear) or "none",
        },
    )  # fmt: skip
