"""The figures of runs as a report for `--json`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from moe_ckpt.report import Fact, Report, table

from .accounts import Run
from .advice import sayings


def figures_of(runs: Sequence[Run]) -> Report:
    """One row for each run, and one for each stop; what is not known is None."""
    rows = (
        (
            run.name, run.newest, run.time.ettr, *dataclasses.astuple(run.time)[:-1], len(run.stops),
            _known(run.last("protected_iteration")), _known(run.last("persisted_iteration")),
            sum(sum(row.values()) for row in run.lost_tokens.values()), _known(run.last("tokens_per_s")),
            [one.text for one in sayings(run)],
        )
        for run in runs
    )  # fmt: skip
    stops = (
        (
            run.name, stop.after, stop.resumed, stop.what, stop.recovery.scope if stop.recovery else None,
            stop.recovery.total_s if stop.recovery else None, dict(stop.recovery.parts) if stop.recovery else {},
        )
        for run in runs
        for stop in run.stops
    )  # fmt: skip
    spent = "useful:seconds | stall:seconds | slowed:seconds | again:seconds | stopped:seconds | other:seconds"
    return Report(
        "Runs",
        (Fact("Count", len(runs), "count"),),
        (
            table(
                "Figures",
                f"run | newest iteration:count | ETTR:share | {spent} | stops:count | protected iteration:count |"
                " persisted iteration:count | lost tokens:count | tokens per s:number | said",
                rows,
            ),
            table("Restarts", "run | after:count | resumed:count | struck | scope | recovery:seconds | parts", stops),
        ),
    )


def _known(value: float) -> Any:
    return None if math.isnan(value) else value
