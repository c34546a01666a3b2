"""MoEvement Fig. 11: ETTR of Gemini and MoEvement as models and clusters grow."""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import asdict
from functools import cache
from typing import Any

from moe_ckpt.report import Fact, Table, table

from .evaluation import AZURE, SystemOutcome, behaviour_of, outcome
from .figure import COLOURS, NAMES, Figure, decimals, minutes, published
from .jobs import SCALE_OUT, scale_out_job

MTBF_S = (3600, 1800, 600)
SYSTEMS = ("gemini", "moevement")


@cache
def outcomes() -> dict[tuple[str, int, str], SystemOutcome]:
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


def figure() -> Figure:
    """The figure, as a table by model and cluster."""
    rows = [
        {"model": size, "mtbf_s": mtbf_s, "system": system, **asdict(found)}
        for (size, mtbf_s, system), found in outcomes().items()
    ]
    return Figure(
        "MoEvement Fig. 11: ETTR from 512 to 16,384 GPUs",
        {"rows": rows, "published": published()["fig11"]},
        (_models(), _ettrs()),
        _draw,
        (
            Fact("MoEvement's lowest ETTR at 1 h", decimals(least_at_an_hour())),
            Fact("The paper's text", f"above {published()['fig11']['moevement_ettr_1h_at_least']}"),
        ),
        (
            "The figure's own numbers were not at hand. The cluster is taken to be more nodes of the"
            " one of Table 3, with the same constants.",
            *dict.fromkeys(f"{model.shape.name}: {model.shape.note}" for model in SCALE_OUT.values()),
        ),
        (1, 4),
        (14, 3.6),
    )


def _models() -> Table:
    columns = (
        "model | parameters:count | GPUs:count | stages:count | pipelines:count | batch:count | iteration:seconds"
        " | window:count"
    )
    rows = []
    for size, model in SCALE_OUT.items():
        job, sparse = scale_out_job(size), outcomes()[size, MTBF_S[0], "moevement"]
        layout = (job.topology.world_size, model.stages, model.pipelines)
        rows.append((size, job.shape.total_parameters, *layout, job.global_batch, sparse.iteration_s, sparse.window))
    return table("Models", columns, rows)


def _ettrs() -> Table:
    rows = (
        (
            size,
            minutes(mtbf_s),
            outcomes()[size, mtbf_s, "gemini"].interval,
            *(decimals(outcomes()[size, mtbf_s, system].ettr) for system in SYSTEMS),
        )
        for size in SCALE_OUT
        for mtbf_s in MTBF_S
    )
    columns = " | ".join(("model", "MTBF", "Gemini's interval:count", *(NAMES[system] for system in SYSTEMS)))
    return table("ETTR", columns, rows)


def _draw(axes: list[Any]) -> None:
    at = [mtbf_s / 60 for mtbf_s in MTBF_S]
    for axis, size in zip(axes, SCALE_OUT, strict=True):
        for system in SYSTEMS:
            values = [outcomes()[size, mtbf_s, system].ettr for mtbf_s in MTBF_S]
            axis.plot(at, values, color=COLOURS[system], marker="o", label=NAMES[system])
        axis.set(title=f"{size}, {scale_out_job(size).topology.world_size:,} GPUs", xlabel="MTBF (min)", ylim=(0, 1))
    axes[0].set_ylabel("ETTR")
    axes[0].legend()
