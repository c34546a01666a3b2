"""MoEvement Fig. 16: ETTR by the skewness of expert popularity, DeepSeek-MoE at 10 minutes between failures."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.report import Fact
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.events import estimate

from .evaluation import AZURE, SYSTEMS, behaviour_of, one_run
from .figure import COLOURS, NAMES, Figure, decimals, published
from .jobs import azure_job
from .skewness import dirichlet, skewness

MTBF_S = 600
UNIFORM = "0.0"
LEVELS = (UNIFORM, *published()["fig16"]["alpha"])
"""S by appendix D, as published.json has them."""

DRAWS = range(12)
"""Of the popularity, each with faults of its own."""


def shares(level: str, draw: int) -> tuple[float, ...] | None:
    """Popularity of the experts of every layer; None where all are alike."""
    if level == UNIFORM:
        return None
    return dirichlet(published()["fig16"]["alpha"][level], azure_job("DeepSeek-MoE").shape.num_experts, draw)


@cache
def behaviour(system: str, level: str, draw: int) -> Behaviour:
    """What a system does with the popularity of this draw."""
    return behaviour_of(system, azure_job("DeepSeek-MoE"), AZURE, MTBF_S, shares(level, draw))


@cache
def ettrs() -> dict[str, dict[str, tuple[float, float]]]:
    """By system and skewness, the mean ETTR and half of its 95 % confidence interval."""
    return {system: {level: _mean(system, level) for level in LEVELS} for system in SYSTEMS}


def _mean(system: str, level: str) -> tuple[float, float]:
    job = azure_job("DeepSeek-MoE")
    found = estimate([one_run(behaviour(system, level, draw), job, MTBF_S, draw).ettr for draw in DRAWS])
    return found.mean, found.half_width


@cache
def recovery_s() -> dict[str, float]:
    """MoEvement's E[R] by skewness."""
    return {level: fmean(behaviour("moevement", level, draw).expected_recovery_s for draw in DRAWS) for level in LEVELS}


def figure() -> Figure:
    """The figure as a table, with what the text says of it."""
    paper, found = published()["fig16"], ettrs()
    speedup = found["moevement"]["0.99"][0] / found["moc"]["0.99"][0]
    rows = []
    for level in LEVELS:
        drawn = [skewness(of) for draw in DRAWS if (of := shares(level, draw)) is not None]
        ours = ("{:.3f} ± {:.3f}".format(*found[system][level]) for system in SYSTEMS)
        theirs = (paper["checkfreq"], paper["gemini"], paper["moc"].get(level))
        rows.append((level, f"{fmean(drawn or [0]):.2f}", *ours, *map(decimals, theirs), recovery_s()[level]))

    def draw(axes: list[Any]) -> None:
        for system, of in found.items():
            means, halves = zip(*of.values(), strict=True)
            axes[0].errorbar(list(map(float, LEVELS)), means, halves, color=COLOURS[system], label=NAMES[system])
        axes[0].set(xlabel="skewness S", ylabel="ETTR", ylim=(0, 1))
        axes[0].legend()

    return Figure(
        "fig16",
        {
            "ettr": {
                system: {level: {"mean": mean, "half_width": half} for level, (mean, half) in of.items()}
                for system, of in found.items()
            },
            "moevement_recovery_s": recovery_s(),
            "published": paper,
        },
        (rows,),
        draw,
        (
            Fact("MoEvement by MoC at 0.99", f"{speedup:.1f} x"),
            Fact("Published, largest", f"{paper['largest_speedup']} x"),
        ),
        {"draws": len(DRAWS)},
    )
