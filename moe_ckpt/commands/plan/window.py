"""`moe-ckpt plan window`: the schedule of a sparse checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import budget_bytes
from megatron.core.dist_checkpointing.moe.policy.memory_limit import MemoryLimit
from megatron.core.dist_checkpointing.moe.policy.ordering import ORDERINGS
from megatron.core.dist_checkpointing.moe.policy.window import Lane, Schedule, load_of, schedule_of
from megatron.core.dist_checkpointing.moe.strategies import Job, Strategy, Throughput
from megatron.core.dist_checkpointing.moe.strategies.memory_report import memory_report
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorSize, Part
from moe_ckpt.report import Fact, Report, Table, table

from ...simulator.driver import ENDLESS, Driver, Taken
from ...simulator.paper_window import paper_window
from ...simulator.shards import owned_operators, shard_sizes
from . import counts_file
from .drive import job_of
from .options import PlannedJob, duration, number, plan_command, rate

HELP = """Show the sparse checkpointing window (MoEvement 3.5): in how many iterations every operator is snapshotted
once, what each iteration copies from a rank, and whether training would have to wait for it.

\b
    $ moe-ckpt plan window --model DeepSeek-MoE --pp 12 --ep 8 --budget-local-gbps 25 --iteration-time 2.9

The window is the second one that the strategy `sparse` begins, the first whose order knows the tokens of experts; it is
chosen for 80 % of what the link carries. Bytes are those of one rank with the distributed optimizer. The table of steps
is that of the ranks that copy most.
"""

_LIMIT_HELP = "Most that snapshots and replicas may take of a node, such as 200GiB; the rest is given up as in a job."


@plan_command(HELP)
@rate("--budget-local-gbps", "From one GPU to its host's memory.")
@duration("--iteration-time", "Of one iteration.")
@click.option("--window", default="auto", show_default=True, metavar="auto|N", help="Iterations of a window.")
@click.option("--ordering", type=click.Choice(list(ORDERINGS)), default="popularity", show_default=True)
@click.option("--ordering-decay", type=float, default=0.9, show_default=True, help="With --ordering time-decayed.")
@click.option(
    "--ordering-capacities", default="", metavar="C,C,...", help="Of each expert, with --ordering capacity-aware."
)
@counts_file.option
@click.option("--freeze-experts", is_flag=True, help="Of a job with this flag: experts are saved once, in no window.")
@click.option("--memory-limit", default=None, metavar="BYTES", help=_LIMIT_HELP)
@number("--replicas", default=1, minimum=0, show_default=True, metavar="R", help="Copies in peers' memory.")
def window(
    job: PlannedJob,
    budget_local_gbps: float,
    iteration_time: float,
    window: str,
    ordering: str,
    ordering_decay: float,
    ordering_capacities: str,
    counts: Path | None,
    freeze_experts: bool,
    memory_limit: str | None,
    replicas: int,
) -> Report:
    if freeze_experts and not job.shape.moe_layers:
        raise UsageError(f"--freeze-experts: --model {job.shape.name} has no experts to freeze")
    tokens = counts_file.load_counts(counts, job.shape)
    sizes = shard_sizes(job.shape, job.topology, job.precision, frozen_experts=freeze_experts)
    budget = budget_bytes(budget_local_gbps * 1e9, iteration_time)
    config = MoECheckpointConfig(
        strategy="sparse", window=window, ordering=ordering, **_ordering(ordering_decay, ordering_capacities)
    )
    bandwidth = budget_local_gbps * 1e9
    planned = job_of(job, config, frozen_experts=freeze_experts)
    node = partial(_node_bytes, planned, job.topology.ranks_per_node, replicas)
    limit_bytes = _limit_bytes(memory_limit)
    driver = Driver(
        planned,
        tokens.of,
        pace=Throughput(iteration_time, bandwidth),
        fits=lambda strategy: limit_bytes is None or node(strategy) <= limit_bytes,
    )
    groups = _second_window(driver.snapshots(ENDLESS))
    if driver.strategy.gave_up:
        raise UsageError(
            f"--memory-limit {memory_limit} is less than snapshots of everything at once and their replicas take: a job"
            " would train unprotected"
        )
    schedules = _schedules(job, groups, sizes, budget)
    busiest = max(schedules, key=lambda lane: (schedules[lane].peak_bytes, [-number for number in lane]))
    peak = schedules[busiest]
    own = {operator: sizes[operator] for group in peak.window.groups for operator in group}
    by_count, _ = paper_window(own, budget)
    return Report(
        f"Sparse checkpointing window of {job.shape.name}",
        (
            Fact("Operators", len(job.shape.operators), "count"),
            Fact("Parameters", job.shape.total_parameters, "count"),
            Fact("Budget per iteration", budget, "bytes"),
            Fact("Window", peak.window.size, "count"),
            Fact("Window by counts (MoEvement Alg. 1)", by_count, "count"),
            Fact("Largest snapshot of a rank", peak.peak_bytes, "bytes"),
            Fact("Even share", peak.even_share_bytes, "bytes"),
            Fact("Dense snapshot of a rank", sum(size.full_bytes for size in own.values()), "bytes"),
            Fact("Fits", peak.fits),
            *((Fact("Frozen experts of a rank, saved once", _constant_bytes(planned), "bytes"),) * freeze_experts),
            Fact("Stall per window", _stall_s(schedules, bandwidth), "seconds"),
            Fact("Iterations replayed at most", 2 * peak.window.size - 2, "count"),
            Fact("Snapshots and replicas on a node", node(driver.strategy), "bytes"),
        ),
        (_steps(peak, bandwidth), _lanes(schedules)),
        (*((peak.why,) if peak.why else ()), *(f"--memory-limit {memory_limit}: {one}" for one in driver.given_up)),
    )


def _ordering(decay: float, capacities: str) -> dict[str, Any]:
    try:
        return {"ordering_decay": decay, "ordering_capacities": tuple(map(float, filter(None, capacities.split(","))))}
    except ValueError:
        raise UsageError(f"--ordering-capacities {capacities} must be numbers with commas between them") from None


def _limit_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    limit = MemoryLimit.parse(text).nbytes
    if limit is None:
        raise UsageError(f"--memory-limit {text}: give bytes, such as 200GiB, since what a node has is not known here")
    return limit


def _node_bytes(job: Job, ranks: int, replicas: int, strategy: Strategy) -> int:
    """What all ranks of a node take, each as much as the one that needs most."""
    reports = (memory_report(strategy.buffer_specs(), own, replicas) for own in job.sizes.values())
    return ranks * max(report.own_bytes + report.replica_bytes for report in reports)


def _constant_bytes(job: Job) -> int:
    """Of the rank that has most of what training does not change."""
    return max(sum(own[one].full_bytes for one in own.keys() & job.unchanging) for own in job.sizes.values())


def _second_window(taken: Iterable[Taken]) -> tuple[tuple[OperatorId, ...], ...]:
    """The operators that are saved in full in each iteration of the second window, whose order knows the tokens."""
    snapshots = iter(taken)
    groups: list[tuple[OperatorId, ...]] = []
    for _ in range(2):
        groups = []
        for snapshot in snapshots:
            parts = snapshot.plan.parts.items()
            constant = snapshot.plan.constant
            groups.append(tuple(one for one, part in parts if Part.MASTER_AND_MOMENTS in part and one not in constant))
            if snapshot.plan.iteration == snapshot.pieces[0].span[-1]:
                break
    return tuple(groups)


def _schedules(
    job: PlannedJob, groups: Sequence[Sequence[OperatorId]], sizes: Mapping[OperatorId, OperatorSize], budget: int
) -> dict[Lane, Schedule]:
    """What the ranks at each (pipeline stage, expert-parallel rank) copy of a window of the whole job."""
    step_of = {operator: step for step, group in enumerate(groups) for operator in group}
    order = {operator: at for at, operator in enumerate(step_of)}
    schedules = {}
    for lane, operators in owned_operators(job.shape, job.topology).items():
        ordered = sorted(order.keys() & operators, key=order.__getitem__)
        own: list[list[int]] = [[] for _ in groups]
        for at, operator in enumerate(ordered):
            own[step_of[operator]].append(at)
        schedules[lane] = schedule_of(ordered, load_of(ordered, sizes), own, 0, budget)
    return schedules


def _stall_s(schedules: dict[Lane, Schedule], bandwidth_bytes_per_s: float) -> float:
    """All ranks wait for the one that copies most in an iteration."""
    stalls = [schedule.stall_s(bandwidth_bytes_per_s) for schedule in schedules.values()]
    return math.fsum(max(of_step) for of_step in zip(*stalls, strict=True))


def _steps(schedule: Schedule, bandwidth_bytes_per_s: float) -> Table:
    rows = []
    stalls = schedule.stall_s(bandwidth_bytes_per_s)
    for step, group in enumerate(schedule.window.groups):
        frozen = sum(part is Part.COMPUTE for part in schedule.window.plan(step).parts.values())
        experts = sum(operator.is_expert for operator in group)
        ends = (str(group[0]), str(group[-1])) if group else ("", "")
        rows.append((step, len(group), experts, frozen, schedule.load_bytes[step], stalls[step], *ends))
    counts, of_link = "anchored:count | experts:count | weights only:count", "snapshot:bytes | stall:seconds"
    return table("Steps", f"step:count | {counts} | {of_link} | first | last", rows)


def _lanes(schedules: dict[Lane, Schedule]) -> Table:
    rows = (
        (*lane, sum(map(len, plan.window.groups)), plan.peak_bytes, plan.even_share_bytes, plan.fits)
        for lane, plan in schedules.items()
    )
    return table("Ranks", "stage:count | ep rank:count | operators:count | peak:bytes | even share:bytes | fits", rows)
