"""`moe-ckpt plan sharding`: who saves which bytes of state that several ranks hold."""

from __future__ import annotations

import click

from megatron.core.dist_checkpointing.moe.policy.partial import PEC_SCOPES, pec_plan
from megatron.core.dist_checkpointing.moe.policy.sharding import SHARDINGS, shard_checkpoint
from megatron.core.dist_checkpointing.moe.types import Part
from moe_ckpt.report import Fact, Report, table

from ...simulator.paper_sizes import eq_5_full_bytes, eq_6_pec_bytes, is_balanced
from .options import PlannedJob, number, plan_command
from .pec import check_experts, selected_experts

HELP = """Compare how ranks can share the saving of replicated state (MoC 4): the baseline of Megatron-DeepSpeed, equal
shards of experts (EE) and of non-experts (EN), and adaptive ones (AN).

\b
    $ moe-ckpt plan sharding --model GPT-350M-16E --world-size 16 --ep 8
    $ moe-ckpt plan sharding --model GPT-350M-16E --world-size 16 --ep 8 --pec-k-snapshot 1

The rank with the most bytes decides how long a checkpoint takes. Bytes are compute weights, master weights and moments.
"""


@plan_command(HELP)
@click.option(
    "--shard", type=click.Choice(list(SHARDINGS)), default="adaptive", show_default=True, help="For the table of ranks."
)
@number("--pec-k-snapshot", "k", default=None, metavar="K", help="Experts per MoE layer [default: all].")
@click.option("--use-distributed-optimizer/--no-distributed-optimizer", "sharded", default=True, show_default=True)
def sharding(job: PlannedJob, shard: str, k: int | None, sharded: bool) -> Report:
    shape, topology = job.shape, job.topology
    parts = None
    if k is not None:
        check_experts(shape, k)
        selected = selected_experts(shape, topology, k, 0)
        parts = pec_plan(0, shape.operators, selected, PEC_SCOPES["both"], Part.EVERYTHING).parts
    by_name = {
        name: shard_checkpoint(name, shape, topology, job.precision, parts, optimizer_sharded=sharded)
        for name in SHARDINGS
    }
    chosen = by_name[shard]
    baseline = by_name["none"].bottleneck_bytes
    compared = [
        (name, plan.bottleneck_bytes, plan.bottleneck_rank, plan.imbalance, plan.bottleneck_bytes / baseline)
        for name, plan in by_name.items()
    ]
    moe, groups = set(shape.moe_layers), topology.ep * topology.edp
    balanced = all(
        is_balanced(k or shape.num_experts, len(moe.intersection(layers)), topology.ep, groups)
        for layers in topology.layers_of_stages(shape.num_layers)
        if moe.intersection(layers)
    )
    ranks = [(rank, topology.node(rank), count) for rank, count in enumerate(chosen.bytes_by_rank)]
    return Report(
        f"Sharded checkpoints of {shape.name}",
        (
            Fact("Checkpoint", chosen.total_bytes, "bytes"),
            Fact("Eq. 5", eq_5_full_bytes(shape, job.precision), "bytes"),
            *((Fact("Eq. 6", eq_6_pec_bytes(shape, job.precision, k), "bytes"),) if k else ()),
            Fact("Even share of a rank", -(-chosen.total_bytes // topology.world_size), "bytes"),
            Fact("Experts balanced (eq. 9)", balanced),
        ),
        (
            table(
                "Strategies",
                "strategy | most of a rank:bytes | rank:count | of mean:share | of baseline:share",
                compared,
            ),
            table("Ranks", f"rank:count | node:count | {shard}:bytes", ranks),
        ),
    )
