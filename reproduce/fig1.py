"""MoEvement Fig. 1: Gemini's overhead, recovery and ETTR by checkpoint interval, for DeepSeek-MoE."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from moe_ckpt.report import Fact, Table, table
from moe_ckpt.simulator.ettr import ettr, expected_recovery_s

from .evaluation import AZURE, behaviour_of
from .figure import Figure, decimals, minutes, published
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
    paper = published()["fig1"]
    slowdown = 1 + dense().overhead_share(1)
    return Figure(
        "MoEvement Fig. 1: Gemini on DeepSeek-MoE, 96 A100 GPUs",
        {
            "costs": asdict(dense()),
            "slowdown_every_iteration": slowdown,
            "by_interval": [
                {
                    "interval": interval,
                    "overhead_share": dense().overhead_share(interval),
                    "recovery_s": dense().recovery_s(interval),
                    "ettr": {str(mtbf_s): dense().ettr(interval, mtbf_s) for mtbf_s in MTBF_S},
                }
                for interval in INTERVALS
            ],
            "best": {str(mtbf_s): dict(zip(("interval", "ettr"), best(mtbf_s), strict=True)) for mtbf_s in MTBF_S},
            "published": paper,
        },
        (_by_interval(), _best()),
        _draw,
        (
            Fact("Slowdown with a checkpoint in every iteration", f"{slowdown:.2f} x"),
            Fact("Published slowdown", f"{paper['gemini_slowdown_every_iteration']} x"),
        ),
        (
            "The best ETTRs of the figure's text do not agree with Table 3 of the same paper, which gives the same"
            " system and model 0.910 at 2 h, 0.853 at 30 min and 0.728 at 10 min: the constants follow the table.",
        ),
        (1, 2),
        (11, 4),
    )


def _by_interval() -> Table:
    ettrs = " | ".join(f"ETTR at {minutes(mtbf_s)}" for mtbf_s in MTBF_S)
    rows = (
        (
            interval,
            dense().overhead_share(interval),
            dense().recovery_s(interval),
            *(decimals(dense().ettr(interval, mtbf_s)) for mtbf_s in MTBF_S),
        )
        for interval in INTERVALS
    )
    return table("By interval", f"interval:count | overhead:share | recovery:seconds | {ettrs}", rows)


def _best() -> Table:
    """The highest ETTR of each curve, that of the figure's text, and that of Table 3."""
    text = published()["fig1"]["best_ettr"]
    table3 = {row["mtbf_s"]: row["ettr"]["gemini"] for row in published()["table3"]["DeepSeek-MoE"]["rows"]}
    rows = []
    for mtbf_s in MTBF_S:
        interval, highest = best(mtbf_s)
        others = (decimals(text.get(str(mtbf_s))), decimals(table3[mtbf_s]))
        rows.append((minutes(mtbf_s), interval, decimals(highest), *others))
    return table("Best", "MTBF | best interval:count | best ETTR | text of Fig. 1 | Table 3", rows)


def _draw(axes: list[Any]) -> None:
    overheads = [100 * dense().overhead_share(interval) for interval in INTERVALS]
    axes[0].bar([str(interval) for interval in INTERVALS], overheads, color="tab:orange")
    axes[0].set(xlabel="checkpoint interval (iterations)", ylabel="overhead (%)", yscale="log")
    axes[0].tick_params(axis="x", rotation=60)
    right = axes[0].twinx()
    right.plot([str(at) for at in INTERVALS], [dense().recovery_s(at) for at in INTERVALS], color="black")
    right.set(ylabel="recovery (s)", yscale="log")
    for mtbf_s in MTBF_S:
        values = [dense().ettr(interval, mtbf_s) for interval in INTERVALS]
        axes[1].plot(INTERVALS, values, marker=".", label=minutes(mtbf_s))
    axes[1].set(xlabel="checkpoint interval (iterations)", ylabel="ETTR", xscale="log", ylim=(0, 1))
    axes[1].legend(title="MTBF")
