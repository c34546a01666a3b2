"""MoC Fig. 5: lost tokens (PLT) by K and interval, and validation loss against PLT.

(a) drives the strategy `pec` itself, with one fault halfway, as the paper has it. (b) is real training with SIGKILLs:
docs/results/pec_accuracy.json of `python benchmarks/pec_accuracy.py --write`, and where they are there the runs of
`python examples/accuracy/campaign.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_ckpt.simulator.driver import Driver, layer_job

from .figure import Figure, lines, measured
from .figures import RESULTS
from .machine import where
from .moc_fig14 import told

EXPERTS, TOPK, TOKENS, ITERATIONS = 16, 1, 16_384, 1024
"""Of a layer, tokens of an iteration, and iterations of the training; all experts are alike."""

KS, INTERVALS = (1, 2, 4, 8, 16), (1, 4, 16, 32, 64)
THRESHOLD = 0.0375
"""Below which MoC 3.1.2 finds the loss unchanged; and what K = 2 every 32 iterations gives there."""

FILE, COMMAND = "pec_accuracy.json", "python benchmarks/pec_accuracy.py --write"
CAMPAIGN = "accuracy-campaign.json"


@dataclass(frozen=True)
class LossPoint:
    """One real run. change: of its validation loss against the run without faults from the same seed, a share."""

    seed: int
    name: str
    faults: int
    plt: float
    change: float


@cache
def plt(k: int, interval: int) -> float:
    """Share of all tokens whose updates are lost by a fault in the middle of the training."""
    job = layer_job(EXPERTS, TOPK, TOKENS, ITERATIONS, strategy="pec", pec_k_snapshot=k, interval=interval)
    counts = [[TOKENS * TOPK // EXPERTS] * EXPERTS]
    driver = Driver(job, lambda iteration: counts)
    while driver.iteration < ITERATIONS // 2:
        driver.iterate()
    return sum(driver.recovered().lost_tokens.values()) / (TOKENS * TOPK * ITERATIONS)


@cache
def losses() -> tuple[LossPoint, ...]:
    """Every run with faults that was measured."""
    paired = measured(FILE, COMMAND)["runs"]
    runs = [
        {
            "seed": run["seed"], "name": run["name"], "faults": len(run["recoveries"]),
            "plt": run["recoveries"][-1]["plt"] if run["recoveries"] else 0.0, "loss": run["validation"][-1][1],
        }
        for run in paired
    ]  # fmt: skip
    return (*_points(runs), *_points(campaign()))


@cache
def campaign() -> list[dict[str, Any]]:
    """Runs of the campaign that lose something, and those without faults; none where there was no campaign."""
    lossy = ("fault-free", "pec", "selective")
    found = measured(CAMPAIGN, "")["runs"] if (RESULTS / CAMPAIGN).exists() else []
    return [run for run in found if run["name"].startswith(lossy)]


def _points(runs: list[dict[str, Any]]) -> list[LossPoint]:
    reference = {run["seed"]: run["loss"] for run in runs if run["name"] == "fault-free"}
    return [
        LossPoint(run["seed"], run["name"], run["faults"], run["plt"], run["loss"] / reference[run["seed"]] - 1)
        for run in runs
        if run["name"] != "fault-free"
    ]


def figure() -> Figure:
    """Both panels as tables."""
    below = [abs(one.change) for one in losses() if one.plt <= THRESHOLD]
    shares = {k: [plt(k, interval) for interval in INTERVALS] for k in KS}

    def draw(axes: list[Any]) -> None:
        series = {f"K = {k}": [100 * share for share in shares[k]] for k in KS[:-1]}
        log = {"xscale": "log", "yscale": "log"}
        lines(axes[0], INTERVALS, series, xlabel="iterations between checkpoints", ylabel="lost tokens (%)", **log)
        axes[0].axhline(100 * THRESHOLD, color="tab:red", linestyle=":")
        axes[1].scatter([100 * one.plt for one in losses()], [100 * one.change for one in losses()])
        axes[1].axvline(100 * THRESHOLD, color="tab:red", linestyle=":")
        axes[1].set(xlabel="lost tokens (%)", ylabel="validation loss off fault-free (%)")

    return Figure(
        "moc_fig5",
        {
            "plt": {str(k): dict(zip(map(str, INTERVALS), found, strict=True)) for k, found in shares.items()},
            "losses": [vars(one) for one in losses()],
            "largest_change_below_threshold": max(below, default=None),
        },
        (
            ((k, *found) for k, found in shares.items()),
            ((one.seed, one.name, one.faults, one.plt, f"{one.change:+.2%}") for one in losses()),
        ),
        draw,
        values={
            "where": where(measured(FILE, COMMAND)),
            "runs": told(campaign()),
            "experts": EXPERTS,
            "iterations": ITERATIONS,
            "two_in_32": plt(2, 32),
            "largest": max(below, default=0.0),
        },
    )
