"""MoEvement Fig. 11: ETTR of Gemini and MoEvement as models and clusters grow."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

from moe_ckpt.report import Fact

from .evaluation import AZURE, SystemOutcome, behaviour_of, outcome
from .figure import NAMES, Figure, decimals, lines, minutes, published
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
    found = outcomes()
    rows = [
        {"model": size, "mtbf_s": mtbf_s, "system": system, **asdict(one)}
        for (size, mtbf_s, system), one in found.items()
    ]
    jobs = {size: (scale_out_job(size), found[size, MTBF_S[0], "moevement"]) for size in SCALE_OUT}

    def draw(axes: list[Any]) -> None:
        for axis, (size, (job, _)) in zip(axes, jobs.items(), strict=True):
            series = {NAMES[name]: [found[size, mtbf_s, name].ettr for mtbf_s in MTBF_S] for name in SYSTEMS}
            title = f"{size}, {job.topology.world_size:,} GPUs"
            lines(axis, [mtbf_s / 60 for mtbf_s in MTBF_S], series, title=title, xlabel="MTBF (min)", ylim=(0, 1))

    return Figure(
        "fig11",
        {"rows": rows, "published": published()["fig11"]},
        (
            ((size, job.shape.total_parameters, job.topology.world_size, SCALE_OUT[size].stages,
                  SCALE_OUT[size].pipelines, job.global_batch, sparse.iteration_s, sparse.window)
                 for size, (job, sparse) in jobs.items()),
            ((size, minutes(mtbf_s), found[size, mtbf_s, "gemini"].interval,
                  *(decimals(found[size, mtbf_s, system].ettr) for system in SYSTEMS))
                 for size in SCALE_OUT for mtbf_s in MTBF_S),
        ),
        draw,
        (
            Fact("MoEvement's lowest ETTR at 1 h", decimals(least_at_an_hour())),
            Fact("The paper's text", f"above {published()['fig11']['moevement_ettr_1h_at_least']}"),
        ),
        {"shapes": "; ".join(dict.fromkeys(f"{model.shape.name}: {model.shape.note}" for model in SCALE_OUT.values()))},
    )  # fmt: skip
