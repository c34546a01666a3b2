"""MoEvement Fig. 16: ETTR by the skewness of expert popularity, DeepSeek-MoE at 10 minutes between failures."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from functools import cache
from statistics import fmean
from typing import Any

from moe_ckpt.report import Fact, Table, table
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
    paper = published()["fig16"]
    speedup = ettrs()["moevement"]["0.99"][0] / ettrs()["moc"]["0.99"][0]
    return Figure(
        "MoEvement Fig. 16: skewness of expert popularity, DeepSeek-MoE, a mean of 10 minutes between failures",
        {
            "ettr": {
                system: {level: {"mean": mean, "half_width": half} for level, (mean, half) in found.items()}
                for system, found in ettrs().items()
            },
            "moevement_recovery_s": recovery_s(),
            "published": paper,
        },
        (_table(),),
        _draw,
        (
            Fact("MoEvement by MoC at 0.99", f"{speedup:.1f} x"),
            Fact("Published, largest", f"{paper['largest_speedup']} x"),
        ),
        (
            "Popularity is drawn from a Dirichlet distribution, the same in all layers, one draw per run with failures"
            " of a Poisson process.",
            "The paper has MoC at 0.17 with equal popularity, and at 0.134 in Table 3 for the same model and failure"
            " rate: with the popularity of its training data. Its fall with skewness, to 0.13, does not come out here.",
        ),
    )


def _table() -> Table:
    paper = published()["fig16"]
    rows = []
    for level in LEVELS:
        drawn = [skewness(found) for draw in DRAWS if (found := shares(level, draw)) is not None]
        ours = (decimals(ettrs()[system][level][0]) for system in SYSTEMS)
        theirs = map(decimals, (paper["checkfreq"], paper["gemini"], paper["moc"].get(level)))
        rows.append((level, f"{fmean(drawn):.2f}" if drawn else "0.00", *ours, *theirs, recovery_s()[level]))
    names = " | ".join(NAMES[system] for system in SYSTEMS)
    columns = f"S | drawn | {names} | CheckFreq paper | Gemini paper | MoC paper | MoEvement's E[R]:seconds"
    return table("ETTR", columns, rows)


def _draw(axes: list[Any]) -> None:
    at = [float(level) for level in LEVELS]
    for system, found in ettrs().items():
        means, halves = zip(*found.values(), strict=True)
        axes[0].errorbar(at, means, halves, color=COLOURS[system], marker="o", label=NAMES[system])
    axes[0].set(xlabel="skewness S", ylabel="ETTR", ylim=(0, 1))
    axes[0].legend()
