"""`moe-ckpt simulate`: what training would get of each checkpoint system, at one or several failure rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.report import Fact, Report, show, table
from moe_ckpt.report.progress import steps

from ..simulator.closed_form import ettr as closed_form
from ..simulator.constants import predicted_seconds
from ..simulator.events import estimate
from ..simulator.events import simulate as simulated
from ..simulator.faults import Fault, load_trace, poisson
from ..simulator.faults import correlated as correlated_faults
from ..simulator.sources import sourced
from ..simulator.systems import SYSTEMS
from ..simulator.systems.links import SystemSetting
from .job_flags import JobFlags, checked_mtbf, chosen_systems, job_command, number, system_option
from .values import Duration, HoursType

HELP = """Simulate a training run under failures with each checkpoint system, for any model, layout and cluster.

Systems choose their intervals, windows and K as in a real run. Failures strike by chance (`--mtbf`, as often as you
like), or as a CSV file says (`--trace`, with the columns at_s and nodes).

\b
    $ moe-ckpt simulate run --model DeepSeek-MoE --pp 12 --ep 8 --world-size 96 --micro-batch-size 4 \\
          --mtbf 1h --mtbf 10m

Exit codes: 0 printed; 1 a file cannot be read; 2 wrong usage.
"""

Scenarios = dict[float, tuple[tuple[Fault, ...], ...]]
"""The faults of each run, by the mean seconds between them."""

_COLUMNS = (
    "MTBF:seconds | system | interval:count | W:count | overhead:share | recovery:seconds | lost:share | ETTR:share"
    " | ±:share | formula:share"
)

ENDLESS = 10**9
"""Iterations between checkpoints that no run reaches: there are none."""


@job_command(HELP)
@click.option("--mtbf", "mtbfs_s", type=Duration(), multiple=True, metavar="TIME", help="Between faults of the job.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Faults of one run, instead of --mtbf.")
@click.option("--correlated", is_flag=True, help="Faults of racks, repeated nodes and slow nodes too, with --mtbf.")
@system_option
@click.option(
    "--hours", "duration_s", type=HoursType(), default="12h", show_default=True, metavar="TIME", help="Of a run."
)
@number("--seeds", default=20, maximum=1000, show_default=True, help="Runs of which the mean is reported.")
def run(
    flags: JobFlags,
    mtbfs_s: tuple[float, ...],
    trace: Path | None,
    correlated: bool,
    systems: tuple[str, ...],
    duration_s: float,
    seeds: int,
) -> Report:
    """See `HELP`; the option above each parameter explains it."""
    names = chosen_systems(systems)
    if bool(mtbfs_s) == (trace is not None):
        raise click.UsageError("give --mtbf, once or several times, or --trace")
    if correlated and trace is not None:
        raise click.UsageError("--correlated makes faults by chance: give it with --mtbf")
    # Budgets of lost tokens are per planned training, which this one is.
    machine = replace(flags.setting, constants=replace(flags.setting.constants, planned_s=duration_s))
    if trace is not None:
        faults = load_trace(trace, nodes=len(machine.job.topology.ranks_by_node))
        scenarios: Scenarios = {duration_s / max(1, sum(fault.at_s < duration_s for fault in faults)): (faults,)}
    else:
        for mtbf_s in mtbfs_s:
            checked_mtbf(machine, mtbf_s)
        nodes = len(machine.job.topology.ranks_by_node)
        by_chance = correlated_faults if correlated else poisson
        scenarios = {
            mtbf_s: tuple(by_chance(mtbf_s, duration_s, nodes, seed) for seed in range(seeds)) for mtbf_s in mtbfs_s
        }
    impossible: dict[str, str] = {}
    with steps("simulating", len(scenarios) * len(names)) as done:
        rows = tuple(
            row
            for mtbf_s, runs in scenarios.items()
            for row in _rows(machine, names, mtbf_s, runs, duration_s, done, None if systems else impossible)
        )
    return Report(
        f"Checkpoints of {flags.shape.name} under failures",
        (
            Fact("Cluster", machine.cluster.name),
            Fact("Ranks", flags.topology.world_size, "count"),
            Fact("Iteration", machine.cost.iteration_s, "seconds"),
            Fact("Microbatches of a pipeline", machine.job.microbatches, "count"),
            Fact("Hours of a run", duration_s / 3600, "number"),
        ),
        (table("Systems", _COLUMNS, rows),),
        (
            "overhead: per iteration. recovery: of a fault. lost: tokens whose updates experts lost. ETTR: mean over"
            " the runs, ± half of its 95 % confidence interval; formula: by MoEvement App. C.",
            f"Seconds of recovery: {predicted_seconds(machine.constants)}.",
            "Iteration time and bandwidths are estimates unless --from gives what was measured.",
            *(f"Not simulated: {why}." for why in impossible.values()),
            *flags.left_out("replicas"),
        ),
    )


def _rows(
    machine: SystemSetting,
    names: tuple[str, ...],
    mtbf_s: float,
    faults: tuple[tuple[Fault, ...], ...],
    duration_s: float,
    done: Callable[[], None],
    impossible: dict[str, str] | None,
) -> Iterator[tuple[Any, ...]]:
    """One row per system: means over the runs, each with its own faults. impossible: gets the systems that cannot run
    this job, with the reason; None: these raise UsageError."""
    for name in names:
        try:
            behaviour = SYSTEMS[name].behaviour(machine, mtbf_s)
        except UsageError as error:
            if impossible is None:
                raise
            impossible[name] = str(error)
            done()
            continue
        runs = [simulated(behaviour, of_run, duration_s) for of_run in faults]
        struck = sum(run.faults for run in runs)
        found = estimate([run.ettr for run in runs])
        yield (
            mtbf_s,
            name,
            behaviour.interval if behaviour.interval < ENDLESS else None,
            behaviour.window,
            sum(run.overhead_s for run in runs) / (sum(run.useful_s for run in runs) or 1.0),
            sum(run.recovery_s for run in runs) / struck if struck else 0.0,
            sum(run.lost_tokens for run in runs) / (machine.job.tokens * (sum(run.iterations for run in runs) or 1.0)),
            found.mean,
            found.half_width,
            closed_form(behaviour, mtbf_s, duration_s),
        )
        done()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, plain numbers.")
def constants(as_json: bool) -> None:
    """Print each constant of the simulator, and whether it is published, measured, fitted or assumed.

    \b
    $ moe-ckpt simulate constants

    Exit codes: 0 printed; 2 wrong usage.
    """
    found = tuple(sourced())
    kinds = {kind: sum(one.kind == kind for one in found) for kind in ("published", "measured", "fitted", "assumed")}
    rows = ((one.name, "-" if one.value is None else f"{one.value}", one.kind, one.source) for one in found)
    report = Report(
        "Constants of the simulator",
        tuple(Fact(kind.capitalize(), count, "count") for kind, count in kinds.items()),
        (table("Constants", "name | value | kind | source", rows),),
        ("Of clusters and models: `source` and `note` of moe_ckpt/simulator/presets/*.json.",),
    )
    show(report, as_json)


@click.group()
def simulate() -> None:
    """Predict overhead, recovery and ETTR of each checkpoint system, before a run: no GPU, no torch, no job needed.

    The papers' tables and figures are recomputed by `python -m reproduce`.

    \b
    $ moe-ckpt simulate run --model DeepSeek-MoE --pp 12 --ep 8 --mtbf 30m --mtbf 10m
    """


simulate.add_command(run)
simulate.add_command(constants)
