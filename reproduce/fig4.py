"""MoEvement Fig. 4: tokens of each expert over iterations, and how many experts of a layer get any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

from .figure import BENCHMARKS, Figure, lines, measured, published
from .machine import where
from .skewness import skewness

FILE, COMMAND = "active_experts.json", "python benchmarks/figure_jobs.py active_experts --write"
FEWEST = (64, 63, 62, 60, 56, 48, 32)
"""Of the CDF, the numbers of experts in the table."""
WINDOW = 15
SETTLED = 1 / 3
"""The last part of the run, in which balancing has had time to act; all of the run begins with random routers."""


@dataclass(frozen=True)
class LayerDynamics:
    """How a layer's experts share its tokens in the last part of the run: the mean over iterations of the largest share
    by that of an even split and of the skewness S; how many experts were the most popular one; most by fewest tokens
    (at least one) of an expert over iterations, the median expert's."""

    layer: int
    largest_by_even: float
    skew: float
    most_popular: int
    fluctuation: float


@cache
def tokens() -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[layers][iterations][experts]. Raises UsageError where nothing was measured."""
    rows = [[tuple(map(int, text.split())) for text in one] for one in measured(FILE, COMMAND, BENCHMARKS)["tokens"]]
    return tuple(zip(*rows, strict=True))


def last(part: float) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Of the tokens, those of the last part of the iterations."""
    return tuple(layer[round((1 - part) * len(layer)) :] for layer in tokens())


def active(part: float = 1.0) -> tuple[int, ...]:
    """Experts with at least one token, of each layer in each iteration of the last part."""
    return tuple(number for layer in last(part) for number in map(_with_tokens, layer))


def _with_tokens(counts: Sequence[int]) -> int:
    return sum(count > 0 for count in counts)


def at_least(experts: int, part: float = 1.0) -> float:
    """Share of the iterations of all layers in which so many are active."""
    return fmean(found >= experts for found in active(part))


def over_time() -> list[float]:
    """Mean of the active experts of a layer over each `WINDOW` iterations."""
    by_layer = [map(_with_tokens, layer) for layer in tokens()]
    each = [fmean(found) for found in zip(*by_layer, strict=True)]
    return [fmean(each[at : at + WINDOW]) for at in range(0, len(each), WINDOW)]


def dynamics() -> tuple[LayerDynamics, ...]:
    """Of each layer."""
    return tuple(_of_layer(number, layer) for number, layer in enumerate(last(SETTLED)))


def _of_layer(number: int, layer: Sequence[Sequence[int]]) -> LayerDynamics:
    shares = [[count / sum(counts) for count in counts] for counts in layer]
    ratios = sorted(max(of) / max(1, min(of)) for of in zip(*layer, strict=True))
    return LayerDynamics(
        number,
        fmean(max(row) * len(row) for row in shares),
        fmean(map(skewness, shares)),
        len({row.index(max(row)) for row in shares}),
        ratios[len(ratios) // 2],
    )


def most_of(experts: int, part: float) -> float:
    """The largest share that so many experts have of a layer's tokens in an iteration of the last part."""
    rows = [counts for layer in last(part) for counts in layer]
    return max(sum(sorted(counts)[-experts:]) / sum(counts) for counts in rows)


def figure() -> Figure:
    """The CDF, and what the text says of it."""
    given, run = published()["fig4"], measured(FILE, COMMAND, BENCHMARKS)
    iterations, routed, means = len(tokens()[0]), sum(tokens()[0][0]), over_time()
    moetion = published("moetion")["fig3"]
    there = {given["active_at_least"]: given["iterations_share"]}

    def draw(axes: list[Any]) -> None:
        layer = tokens()[-1]
        by_expert = [[100 * counts[expert] / sum(counts) for counts in layer] for expert in range(len(layer[0]))]
        axes[0].stackplot(range(1, len(layer) + 1), by_expert)
        axes[0].set(xlabel="iteration", ylabel="tokens by expert, last layer (%)", ylim=(0, 100))
        for part, label in ((1.0, "all"), (SETTLED, "last third")):
            numbers = range(min(active(part)), max(active(part)) + 1)
            shares = [fmean(found <= number for found in active(part)) for number in numbers]
            axes[1].step(numbers, shares, where="post", label=label)
        axes[1].set(xlabel="active experts of a layer", ylabel="share of iterations", ylim=(0, 1.02))
        axes[1].legend()
        label = f"active experts, mean over {WINDOW} iterations"
        lines(axes[2], [WINDOW * at for at in range(len(means))], {"": means}, xlabel="iteration", ylabel=label)

    return Figure(
        "fig4",
        {
            "iterations": iterations,
            "routed_tokens_per_iteration": routed,
            "active": list(active()),
            "active_over_time": means,
            "layers": [vars(one) for one in dynamics()],
            "published": given,
        },
        (
            ((experts, at_least(experts), at_least(experts, SETTLED), there.get(experts)) for experts in FEWEST),
            ((one.layer, f"{one.largest_by_even:.1f}", f"{one.skew:.3f}", one.most_popular,
                  f"{one.fluctuation:.1f}") for one in dynamics()),
        ),
        draw,
        values={
            "command": COMMAND, "where": where(run), "iterations": iterations,
            "run": run, "routed": routed, "given": given,
            "settled": at_least(given["active_at_least"], SETTLED), "window": WINDOW, "means": means,
            "lowest": min(means), "last": means[-1], "moetion": moetion,
            "most": [most_of(moetion["experts"], part) for part in (1.0, SETTLED)],
            "ceiling": moetion["experts"] / run["topk"],
        },
    )  # fmt: skip
