"""MoEvement Fig. 15: experts of DeepSeek-MoE that get at least one token in an iteration, by skewness of popularity."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from statistics import quantiles
from typing import Any

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
    found = []
    for level in LEVELS:
        lower, median, upper = quantiles(counts(level), n=4, method="inclusive")
        found.append(Active(level, min(counts(level)), lower, median, upper, max(counts(level))))
    return tuple(found)


def figure() -> Figure:
    """The boxes as a table."""
    experts = azure_job("DeepSeek-MoE").shape.num_experts
    most_active = [one.level for one in boxes() if one.median > experts / 2]
    (skewed,) = (one.median for one in boxes() if one.level == "0.99")

    def draw(axes: list[Any]) -> None:
        axes[0].boxplot([counts(level) for level in LEVELS], tick_labels=list(LEVELS))
        axes[0].set(xlabel="skewness S", ylabel="experts with a token")

    return Figure(
        "fig15",
        {"experts": experts, "boxes": [vars(one) for one in boxes()]},
        (
            ((one.level, one.least, f"{one.lower_quartile:g}", f"{one.median:g}", f"{one.upper_quartile:g}",
                  one.most) for one in boxes()),
        ),
        draw,
        values={"draws": DRAWS, "iterations": ITERATIONS, "levels": ", ".join(most_active),
                "skewed": skewed, "experts": experts},
    )  # fmt: skip
