"""MoEvement Fig. 1: Gemini's overhead, recovery and ETTR by checkpoint interval, for DeepSeek-MoE."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from moe_ckpt.report import Fact
from moe_ckpt.simulator.ettr import ettr, expected_recovery_s

from .evaluation import AZURE, behaviour_of
from .figure import Figure, bars, decimals, lines, minutes, published
from .jobs import MTBF_S, azure_job

INTERVALS = (1, 2, 5, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000)


@dataclass(frozen=True)
class GeminiCosts:
    """What Gemini's dense checkpoints cost one job. stall_s: one checkpoint's. restart_s: of a recovery but replay."""

    iteration_s: float
    stall_s: float
    restart_s: float

    def overhead_share(self, interval: int) -> float:
        """Of the iteration time."""
        return self.stall_s / self.iteration_s / interval

    def recovery_s(self, interval: int) -> float:
        """E[R]."""
        return expected_recovery_s(self.iteration_s, interval, self.restart_s)

    def ettr(self, interval: int, mtbf_s: float) -> float:
        """By the closed form of App. C."""
        return ettr(self.iteration_s, self.stall_s, interval, self.recovery_s(interval), mtbf_s)


@cache
def dense() -> GeminiCosts:
    """Gemini's costs for DeepSeek-MoE on 96 GPUs; they do not depend on the interval that it chooses."""
    gemini = behaviour_of("gemini", azure_job("DeepSeek-MoE"), AZURE, MTBF_S[0])
    replay_s = gemini.interval * gemini.iteration_s / 2
    stall_s = gemini.overhead_s * gemini.interval
    return GeminiCosts(gemini.iteration_s, stall_s, gemini.expected_recovery_s - replay_s)


def best(mtbf_s: float) -> tuple[int, float]:
    """The interval with the highest ETTR, and that ETTR."""
    found = max(range(1, INTERVALS[-1] + 1), key=lambda interval: dense().ettr(interval, mtbf_s))
    return found, dense().ettr(found, mtbf_s)


def figure() -> Figure:
    """Both panels, and what the text says of them."""
    paper, costs, bests = published()["fig1"], dense(), {mtbf_s: best(mtbf_s) for mtbf_s in MTBF_S}
    slowdown = 1 + costs.overhead_share(1)
    table3 = {row["mtbf_s"]: row["ettr"]["gemini"] for row in published()["table3"]["DeepSeek-MoE"]["rows"]}
    curves = {mtbf_s: [costs.ettr(interval, mtbf_s) for interval in INTERVALS] for mtbf_s in MTBF_S}
    rows: list[dict[str, Any]] = [
        {
            "interval": interval,
            "overhead_share": costs.overhead_share(interval),
            "recovery_s": costs.recovery_s(interval),
            "ettr": {str(mtbf_s): values[at] for mtbf_s, values in curves.items()},
        }
        for at, interval in enumerate(INTERVALS)
    ]

    def draw(axes: list[Any]) -> None:
        names = [str(interval) for interval in INTERVALS]
        overheads = {"overhead": [100 * row["overhead_share"] for row in rows]}
        bars(axes[0], names, overheads, xlabel="checkpoint interval (iterations)", ylabel="overhead (%)", yscale="log")
        axes[0].tick_params(axis="x", rotation=60)
        right = axes[0].twinx()
        lines(right, names, {"recovery": [row["recovery_s"] for row in rows]}, ylabel="recovery (s)", yscale="log")
        named = {minutes(mtbf_s): values for mtbf_s, values in curves.items()}
        lines(axes[1], INTERVALS, named, xlabel="interval, by MTBF", ylabel="ETTR", xscale="log", ylim=(0, 1))

    return Figure(
        "fig1",
        {
            "costs": asdict(costs),
            "slowdown_every_iteration": slowdown,
            "by_interval": rows,
            "best": {str(mtbf_s): {"interval": at, "ettr": highest} for mtbf_s, (at, highest) in bests.items()},
            "published": paper,
        },
        (
            ((row["interval"], row["overhead_share"], row["recovery_s"], *map(decimals, row["ettr"].values()))
                 for row in rows),
            ((minutes(mtbf_s), at, *map(decimals, (highest, paper["best_ettr"].get(str(mtbf_s)), table3[mtbf_s])))
                 for mtbf_s, (at, highest) in bests.items()),
        ),
        draw,
        (
            Fact("Slowdown with a checkpoint in every iteration", f"{slowdown:.2f} x"),
            Fact("Published slowdown", f"{paper['gemini_slowdown_every_iteration']} x"),
        ),
    )  # fmt: skip
