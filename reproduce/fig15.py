"""MoEvement Fig. 15: experts of DeepSeek-MoE that get at least one token in an iteration, by skewness of popularity."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

import random
from dataclasses import dataclass
from functools import cache
from statistics import quantiles
from typing import Any

from moe_ckpt.report import table

from .figure import Figure, published
from .jobs import azure_job
from .skewness import dirichlet

UNIFORM = "0.0"
LEVELS = (UNIFORM, *published()["fig16"]["alpha"])
"""S by appendix D, as published.json has them."""

DRAWS, ITERATIONS = 20, 20
"""Popularities of each level, and iterations with each of them."""


@dataclass(frozen=True)
class Active:
    """Experts of a layer with at least one token, over all iterations of a level."""

    level: str
    least: int
    lower_quartile: float
    median: float
    upper_quartile: float
    most: int


@cache
def counts(level: str) -> tuple[int, ...]:
    """Active experts of a layer in each iteration.

    An expert with share p gets none of n routed tokens with probability (1 - p) ** n; n are those of one iteration of
    DeepSeek-MoE's published batch.
    """
    job = azure_job("DeepSeek-MoE")
    experts, routed = job.shape.num_experts, job.tokens * job.shape.moe_router_topk
    found = []
    for draw in range(DRAWS):
        alpha = None if level == UNIFORM else published()["fig16"]["alpha"][level]
        shares = (1 / experts,) * experts if alpha is None else dirichlet(alpha, experts, draw)
        chance = random.Random(draw)
        found += [sum(chance.random() < 1 - (1 - share) ** routed for share in shares) for _ in range(ITERATIONS)]
    return tuple(found)


@cache
def boxes() -> tuple[Active, ...]:
    """One box per level."""
    return tuple(_box(level, counts(level)) for level in LEVELS)


def _box(level: str, found: tuple[int, ...]) -> Active:
    lower, median, upper = quantiles(found, n=4, method="inclusive")
    return Active(level, min(found), lower, median, upper, max(found))


def figure() -> Figure:
    """The boxes as a table."""
    experts = azure_job("DeepSeek-MoE").shape.num_experts
    return Figure(
        "MoEvement Fig. 15: experts with at least one token in an iteration, DeepSeek-MoE",
        {"experts": experts, "boxes": [vars(one) for one in boxes()]},
        (
            table(
                "Active experts of a layer",
                "skewness | least:count | lower quartile | median | upper quartile | most:count",
                ((one.level, one.least, *(f"{value:g}" for value in _quartiles(one)), one.most) for one in boxes()),
            ),
        ),
        _draw,
        (),
        (
            f"{DRAWS} popularities of each skewness from the Dirichlet distributions of appendix D, {ITERATIONS}"
            " iterations with each; the tokens of an iteration are independent draws.",
            'The text says that "most experts remain active" at all levels. With independent tokens and these'
            f" distributions that holds at S = {', '.join(most_active())} only: at 0.99 they leave {_median('0.99'):g}"
            f" of {experts} active. Boxes are not published as numbers.",
        ),
    )


def most_active() -> tuple[str, ...]:
    """Levels at which more than half of the experts have a token in the median iteration."""
    experts = azure_job("DeepSeek-MoE").shape.num_experts
    return tuple(one.level for one in boxes() if one.median > experts / 2)


def _quartiles(one: Active) -> tuple[float, float, float]:
    return one.lower_quartile, one.median, one.upper_quartile


def _median(level: str) -> float:
    return next(one.median for one in boxes() if one.level == level)


def _draw(axes: list[Any]) -> None:
    axes[0].boxplot([counts(level) for level in LEVELS], tick_labels=list(LEVELS))
    axes[0].set(xlabel="skewness S", ylabel="experts with a token")
