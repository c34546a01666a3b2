"""MoEvement Fig. 11: ETTR of Gemini and MoEvement as models and clusters grow."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from moe_ckpt.report import Columns, Fact, Report, Table

from .evaluation import AZURE, Outcome, behaviour_of, outcome
from .jobs import SCALE_OUT, scale_out_job
from .plots import COLOURS, NAMES, plot
from .published import published
from .result import PaperResult
from .table3 import decimals

MTBF_S = (3600, 1800, 600)
SYSTEMS = ("gemini", "moevement")


@cache
def outcomes() -> dict[tuple[str, int, str], Outcome]:
    """What comes out, by model, mean time between failures in seconds, and system."""
    found = {}
    for size in SCALE_OUT:
        job = scale_out_job(size)
        # Its window, and so all of its costs, are the same however often faults come.
        sparse = behaviour_of("moevement", job, AZURE, MTBF_S[0])
        for mtbf_s in MTBF_S:
            found[size, mtbf_s, "gemini"] = outcome(behaviour_of("gemini", job, AZURE, mtbf_s), job, mtbf_s)
            found[size, mtbf_s, "moevement"] = outcome(sparse, job, mtbf_s)
    return found


def least_at_an_hour() -> float:
    """MoEvement's lowest ETTR at a mean time between failures of an hour."""
    return min(outcomes()[size, 3600, "moevement"].ettr for size in SCALE_OUT)


def result() -> PaperResult:
    """The figure, as a table by model and cluster."""
    claim = published()["fig11"]["moevement_ettr_1h_at_least"]
    report = Report(
        "MoEvement Fig. 11: ETTR from 512 to 16,384 GPUs",
        (
            Fact("MoEvement's lowest ETTR at 1 h", decimals(least_at_an_hour())),
            Fact("The paper's text", f"above {claim}"),
        ),
        (_models(), _table()),
        (
            "The figure's own numbers were not at hand. The cluster is taken to be more nodes of the"
            " one of Table 3, with the same constants.",
            *dict.fromkeys(f"{model.shape.name}: {model.shape.note}" for model in SCALE_OUT.values()),
        ),
    )
    rows = [
        {"model": size, "mtbf_s": mtbf_s, "system": system, **asdict(one)}
        for (size, mtbf_s, system), one in outcomes().items()
    ]
    return PaperResult(
        report, {"rows": rows, "published": published()["fig11"]}, plot(_draw, columns=4, size=(14, 3.6))
    )


def _models() -> Table:
    rows = []
    for size, model in SCALE_OUT.items():
        job = scale_out_job(size)
        iteration_s = outcomes()[size, MTBF_S[0], "moevement"].iteration_s
        rows.append(
            (
                size,
                job.shape.total_parameters,
                job.topology.world_size,
                model.stages,
                model.pipelines,
                job.global_batch,
                iteration_s,
                outcomes()[size, MTBF_S[0], "moevement"].window,
            )
        )
    columns: Columns = (
        ("model", "text"),
        ("parameters", "count"),
        ("GPUs", "count"),
        ("stages", "count"),
        ("pipelines", "count"),
        ("batch", "count"),
        ("iteration", "seconds"),
        ("window", "count"),
    )
    return Table("Models", columns, tuple(rows))


def _table() -> Table:
    rows = tuple(
        (
            size,
            f"{mtbf_s // 60} min",
            outcomes()[size, mtbf_s, "gemini"].interval,
            *(decimals(outcomes()[size, mtbf_s, system].ettr) for system in SYSTEMS),
        )
        for size in SCALE_OUT
        for mtbf_s in MTBF_S
    )
    columns: Columns = (
        ("model", "text"),
        ("MTBF", "text"),
        ("Gemini's interval", "count"),
        *((NAMES[system], "text") for system in SYSTEMS),
    )
    return Table("ETTR", columns, rows)


def _draw(axes: list[Any]) -> None:
    minutes = [mtbf_s / 60 for mtbf_s in MTBF_S]
    for axis, size in zip(axes, SCALE_OUT, strict=True):
        for system in SYSTEMS:
            values = [outcomes()[size, mtbf_s, system].ettr for mtbf_s in MTBF_S]
            axis.plot(minutes, values, color=COLOURS[system], marker="o", label=NAMES[system])
        axis.set(title=f"{size}, {scale_out_job(size).topology.world_size:,} GPUs", xlabel="MTBF (min)", ylim=(0, 1))
    axes[0].set_ylabel("ETTR")
    axes[0].legend()
