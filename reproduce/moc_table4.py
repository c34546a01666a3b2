"""MoC Table 4: accuracy after fine-tuning with a fault at half of it, under full and partial checkpoints and with
frozen experts.

From real training under SIGKILLs: docs/results/fine-tuning.json, which `python examples/accuracy/fine_tuning.py` makes.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from functools import cache
from math import sqrt
from statistics import fmean
from typing import Any

from moe_ckpt.report import Table, table

from .figure import Figure, measured, published

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
    made, given = training(), published("moc")["table4"]
    order = sorted(runs(), key=lambda name: float(runs()[name]["loss"]))
    same = order == sorted(runs(), key=lambda name: float(-given[name]))
    names = ("what", "loss", "accuracy", "published")
    return Figure(
        "MoC Table 4: fine-tuning under a fault, real runs",
        {
            "runs": runs(),
            "average": {name: average(name) for name in runs()},
            "differences": [dict(zip(names, one, strict=True)) for one in differences()],
            "published": given,
        },
        (_runs(), _differences()),
        _draw,
        (),
        (
            f"One small model of one seed: {made['pretrained']} iterations on sources, then {made['iterations']} on"
            " Python's help topics, with a SIGKILL at half of it; FT-PEC snapshots 1 of 8 experts. The paper fine-tunes"
            " OLMoE.",
            f"Validation losses from the lowest one: {', '.join(order)}; {'' if same else 'not '}in the order of the"
            f" paper's averages. FT-PEC is {differences()[-1][1]:+.2%} off FT-Full.",
            f"With {made['questions']} questions of each task (25 % and 50 % right by chance) differences of accuracy"
            f" up to {200 * noise():.1f} points are within chance; the largest is"
            f" {max(100 * abs(one[2]) for one in differences()):.1f}. The paper's is over seven tasks.",
        ),
    )


def _runs() -> Table:
    given = published("moc")["table4"]
    rows = (
        (name, run["plt"], round(run["mean_snapshot_bytes"]) or None, f"{run['loss']:.4f}",
         *(f"{100 * run[task]:.1f}" for task in TASKS), f"{100 * average(name):.2f}", f"{100 * given[name]:.2f}")
        for name, run in runs().items()
    )  # fmt: skip
    columns = "model | lost tokens:share | snapshot:bytes | validation loss | cloze, % | original, % | average, %"
    return table("Models", f"{columns} | published average, %", rows)


def _differences() -> Table:
    rows = (
        (what, f"{loss:+.2%}", f"{100 * ours:+.2f}", f"{100 * there:+.2f}") for what, loss, ours, there in differences()
    )
    return table("Differences", "what | validation loss | accuracy, points | published, points", rows)


def _draw(axes: list[Any]) -> None:
    names = list(runs())
    axes[0].bar(names, [runs()[name]["loss"] for name in names], color=["tab:gray", "tab:green", "tab:blue", "tab:red"])
    axes[0].set(ylabel="validation loss (nats/byte)")
