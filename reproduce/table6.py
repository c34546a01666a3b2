"""MoEvement Table 6: host memory of Gemini's and MoEvement's checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from moe_ckpt.report import Fact
from moe_ckpt.simulator.memory import MemoryUse, memory_of

from .evaluation import AZURE, windows_of
from .figure import Figure, bars, published
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
    paper, found, off = published()["table6"], memory(), differences("total_bytes")
    totals = [abs(one) for one in off.values() if one is not None]
    series = {
        "Gemini": [use.gemini_bytes / 1e9 for use in found.values()],
        "MoEvement (X + Y)": [use.total_bytes / 1e9 for use in found.values()],
    }
    return Figure(
        "table6",
        {
            model: {"ours": asdict(use) | {"total_bytes": use.total_bytes}, "published": paper[model]}
            for model, use in found.items()
        },
        (
            ((model, *(value for part in PARTS for value in (paper[model][part], getattr(use, part))), off[model],
                  paper[model]["increase_share"], use.total_bytes / use.gemini_bytes - 1)
                 for model, use in found.items()),
        ),
        lambda axes: bars(axes[0], MODELS, series, ylabel="GB of host memory"),
        (Fact("Totals within 5 %", f"{sum(total <= TOLERANCE for total in totals)} of {len(totals)} published"),),
    )  # fmt: skip
