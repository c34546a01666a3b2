"""MoC Table 4: accuracy after fine-tuning with a fault at half of it, under full and partial checkpoints and with
frozen experts.

From real training under SIGKILLs: docs/results/fine-tuning.json, which `python examples/accuracy/fine_tuning.py` makes.
"""

from __future__ import annotations

from functools import cache
from math import sqrt
from statistics import fmean
from typing import Any

from .figure import Figure, bars, measured, published
from .machine import where

FILE, COMMAND = "fine-tuning.json", "python examples/accuracy/fine_tuning.py"
BASE, FROZEN, FULL, PARTIAL = "Base", "FT-w.o.E", "FT-Full", "FT-PEC"
TASKS = ("cloze", "original")


@cache
def training() -> dict[str, Any]:
    """All of it. Raises UsageError where there was none."""
    return measured(FILE, COMMAND)


def runs() -> dict[str, dict[str, Any]]:
    """By the paper's names."""
    return {run["name"]: run for run in training()["runs"]}


def average(name: str) -> float:
    """Accuracy over tasks."""
    return fmean(runs()[name][task] for task in TASKS)


def noise() -> float:
    """Standard error of the difference of two averages, of models that answer independently with even chances."""
    return sqrt(2 * 0.25 / (len(TASKS) * training()["questions"]))


def differences() -> list[tuple[str, float, float, float]]:
    """What the text compares: validation loss as a share, accuracy ours and as published."""
    given = published("moc")["table4"]
    pairs = ((FULL, BASE), (FROZEN, BASE), (FROZEN, FULL), (PARTIAL, FULL))
    return [
        (f"{one} against {other}", runs()[one]["loss"] / runs()[other]["loss"] - 1, average(one) - average(other),
         given[one] - given[other])
        for one, other in pairs
    ]  # fmt: skip


def figure() -> Figure:
    """The table, and the differences that its text is about."""
    made, given, found = training(), published("moc")["table4"], runs()
    order = sorted(found, key=lambda name: float(found[name]["loss"]))
    same = order == sorted(found, key=lambda name: float(-given[name]))
    names = ("what", "loss", "accuracy", "published")
    losses = {"": [run["loss"] for run in found.values()]}
    return Figure(
        "moc_table4",
        {
            "runs": found,
            "average": {name: average(name) for name in found},
            "differences": [dict(zip(names, one, strict=True)) for one in differences()],
            "published": given,
        },
        (
            ((name, run["plt"], round(run["mean_snapshot_bytes"]) or None, f"{run['loss']:.4f}",
                  *(f"{100 * run[task]:.1f}" for task in TASKS), f"{100 * average(name):.2f}",
                  f"{100 * given[name]:.2f}")
                 for name, run in found.items()),
            ((what, f"{loss:+.2%}", f"{100 * ours:+.2f}", f"{100 * there:+.2f}")
                 for what, loss, ours, there in differences()),
        ),
        lambda axes: bars(axes[0], list(found), losses, ylabel="validation loss (nats/byte)"),
        values={
            "made": made, "where": where(made), "order": ", ".join(order), "negation": "" if same else "not ",
            "partial": differences()[-1][1], "chance": 200 * noise(),
            "largest": max(100 * abs(one[2]) for one in differences()),
        },
    )  # fmt: skip
