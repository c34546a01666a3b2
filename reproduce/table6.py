"""MoEvement Table 6: host memory of Gemini's and MoEvement's checkpoints."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import asdict
from functools import cache
from typing import Any

from moe_ckpt.report import Fact, Table, table
from moe_ckpt.simulator.memory import MemoryUse, memory_of

from .evaluation import AZURE, windows_of
from .figure import Figure, published
from .jobs import MODELS, azure_job

TOLERANCE = 0.05

PARTS = ("gemini_bytes", "sparse_bytes", "log_bytes", "total_bytes")
"""As published.json names the columns: Gemini, X, Y, X + Y."""


@cache
def memory() -> dict[str, MemoryUse]:
    """What each model's checkpoints take in the memory of all hosts together."""
    return {model: memory_of(azure_job(model), windows_of(azure_job(model), AZURE)) for model in MODELS}


def differences(part: str) -> dict[str, float | None]:
    """By model, ours less the published as a share of the published; None where that was not at hand."""
    paper = published()["table6"]
    return {
        model: None if paper[model][part] is None else getattr(use, part) / paper[model][part] - 1
        for model, use in memory().items()
    }


def figure() -> Figure:
    """The table, with the published one beside it."""
    totals = [abs(found) for found in differences("total_bytes").values() if found is not None]
    return Figure(
        "MoEvement Table 6: host memory of checkpoints on 96 GPUs",
        {
            model: {"ours": asdict(use) | {"total_bytes": use.total_bytes}, "published": published()["table6"][model]}
            for model, use in memory().items()
        },
        (_table(),),
        _draw,
        (Fact("Totals within 5 %", f"{sum(total <= TOLERANCE for total in totals)} of {len(totals)} published"),),
        (
            "Gemini: 26 bytes per parameter in all published rows: two checkpoints of 12, one complete and one under"
            " way, and compute weights of 2. X adds the weights that a window's snapshots have of operators not"
            " anchored yet.",
            "Y: the logs that one rank keeps. The published figures are of that size, but do not follow from any one"
            " count of ranks: the logs of all ranks would be hundreds of gigabytes. It is shown as it comes out.",
            "QWen-MoE was not at hand: predicted, not compared.",
        ),
    )


def _table() -> Table:
    paper = published()["table6"]
    rows = (
        (
            model,
            *(value for part in PARTS for value in (paper[model][part], getattr(use, part))),
            differences("total_bytes")[model],
            paper[model]["increase_share"],
            use.total_bytes / use.gemini_bytes - 1,
        )
        for model, use in memory().items()
    )
    columns = (
        "model | Gemini paper:bytes | Gemini:bytes | X paper:bytes | X:bytes | Y paper:bytes | Y:bytes"
        " | X + Y paper:bytes | X + Y:bytes | difference:share | increase paper:share | increase:share"
    )
    return table("Memory", columns, rows)


def _draw(axes: list[Any]) -> None:
    paper = published()["table6"]
    places = range(len(MODELS))
    for shift, (label, part, colour) in enumerate(
        (("Gemini", "gemini_bytes", "tab:orange"), ("MoEvement (X + Y)", "total_bytes", "tab:green"))
    ):
        at = [place + 0.4 * shift - 0.2 for place in places]
        axes[0].bar(at, [getattr(memory()[model], part) / 1e9 for model in MODELS], 0.38, label=label, color=colour)
        known = [(x, paper[model][part] / 1e9) for x, model in zip(at, MODELS, strict=True) if paper[model][part]]
        axes[0].scatter(*zip(*known, strict=True), color="black", marker="x", zorder=3)
    axes[0].set_xticks(list(places), MODELS)
    axes[0].set_ylabel("GB of host memory (crosses: published)")
    axes[0].legend()
