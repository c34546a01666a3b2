"""`moe-ckpt plan selective`: how many experts the links carry in each iteration, and which."""

from __future__ import annotations

from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.policy.selective import Budgets, Selection, SelectivePlan, selective_plan
from moe_ckpt.report import Fact, Report, Table, table

from ...simulator.shards import owned_operators, shard_sizes
from . import counts_file
from .options import PlannedJob, plan_command, positive

HELP = """Show selective expert checkpointing (MOETION 4): the experts that fit into one iteration beside everything
else, to the host's memory and on to a peer, shared among the layers by the tokens at risk.

\b
    $ moe-ckpt plan selective --model DeepSeek-MoE --pp 12 --ep 8 --iteration-time 2.9 \\
          --budget-local-gbps 25 --budget-remote-gbps 5

The table of layers is that of the ranks that save the fewest experts.
"""


@plan_command(HELP)
@positive("--budget-local-gbps", "GB/S", "From one GPU to its host's memory.")
@positive("--budget-remote-gbps", "GB/S", "From one rank to its peers.")
@positive("--iteration-time", "S", "Seconds of one iteration.")
@click.option("--counts", type=click.Path(path_type=Path), default=None, metavar="FILE", help=counts_file.HELP)
def selective(
    job: PlannedJob, budget_local_gbps: float, budget_remote_gbps: float, iteration_time: float, counts: Path | None
) -> Report:
    budgets = Budgets(budget_local_gbps * 1e9, budget_remote_gbps * 1e9, iteration_time)
    tokens = counts_file.load_counts(counts, job.shape).by_expert()
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    plans = {
        lane: selective_plan(0, {operator: sizes[operator] for operator in operators}, tokens, tokens, budgets)
        for lane, operators in owned_operators(job.shape, job.topology).items()
    }
    fewest = min(plans, key=lambda lane: (_count(plans[lane].local), lane))
    experts = max(1, len(job.shape.moe_layers) * job.shape.num_experts)
    return Report(
        f"Selective expert checkpoints of {job.shape.name}",
        (
            Fact("Local budget", budgets.local_bytes, "bytes"),
            Fact("Remote budget", budgets.remote_bytes, "bytes"),
            Fact("Experts saved, of all", sum(_count(plan.local) for plan in plans.values()) / experts, "share"),
            Fact("Experts replicated, of all", sum(_count(plan.remote) for plan in plans.values()) / experts, "share"),
            Fact("Fits", all(plan.fits for plan in plans.values())),
            Fact("Stall", max(plan.stall_s for plan in plans.values()), "seconds"),
            Fact("Lag of replication", max(plan.lag_s for plan in plans.values()), "seconds"),
        ),
        (_layers(plans[fewest]), _ranks(plans)),
    )


def _count(chosen: Selection) -> int:
    return sum(chosen.experts_per_layer.values())


def _layers(plan: SelectivePlan) -> Table:
    rows = (
        (
            layer,
            count,
            [op.expert for op in plan.local.plan.parts if op.is_expert and op.layer == layer],
            plan.remote.experts_per_layer.get(layer, 0),
        )
        for layer, count in plan.local.experts_per_layer.items()
    )
    return table("Layers", "layer:count | saved:count | experts | replicated:count", rows)


def _ranks(plans: dict[tuple[int, int], SelectivePlan]) -> Table:
    rows = (
        (*lane, _count(local), _count(remote), local.snapshot_bytes, remote.snapshot_bytes, plan.stall_s)
        for lane, plan in plans.items()
        for local, remote in [(plan.local, plan.remote)]
    )
    columns = (
        "stage:count | ep rank:count | saved:count | replicated:count | local:bytes | remote:bytes | stall:seconds"
    )
    return table("Ranks", columns, rows)
