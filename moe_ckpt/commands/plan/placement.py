"""`moe-ckpt plan placement`: who keeps whose replicas."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.policy.placement import place_replicas
from megatron.core.dist_checkpointing.moe.types import Part
from moe_ckpt.report import Fact, Report, table

from ...simulator.replicas import coverage, replica_bytes
from .options import PlannedJob, number, plan_command

HELP = """Show which peers keep the replicas of each rank's snapshot in their memory (MOETION 5.1), how many nodes may
be lost, and what it costs in memory and on the network.

\b
    $ moe-ckpt plan placement --model DeepSeek-MoE --pp 12 --ep 8 --replicas 2
"""


@plan_command(HELP)
@number("--replicas", default=2, minimum=0, show_default=True, metavar="R", help="Copies beside the rank's own.")
@number(
    "--zero-stage", default=1, minimum=0, maximum=3, show_default=True, help="What data-parallel peers hold anyway."
)
def placement(job: PlannedJob, replicas: int, zero_stage: int) -> Report:
    placed = place_replicas(job.topology, replicas)
    facts = coverage(placed, job.topology)
    costs = replica_bytes(job.shape, job.topology, job.precision, zero_stage, placed, part=Part.MASTER_AND_MOMENTS)
    ranks = [
        (
            rank,
            placed.nodes[rank],
            list(peers),
            sorted({placed.nodes[peer] for peer in peers}),
            costs.sent_bytes[rank],
            costs.kept_bytes[rank],
        )
        for rank, peers in enumerate(placed.peers)
    ]
    alone = f"{facts.same_node} replicas are on their owner's own node and do not protect from its loss: add nodes."
    return Report(
        f"Replicas of {job.shape.name} on {len(set(placed.nodes))} nodes",
        (
            Fact("Nodes that may be lost at once", facts.fatal_nodes - 1, "count"),
            Fact("Sets of nodes whose loss is fatal", facts.fatal_sets, "count"),
            Fact("Replicas on the owner's node", facts.same_node, "count"),
            Fact("Replicas in the expert-data-parallel group", facts.expert_group, "count"),
            Fact("Replicas in the data-parallel group", facts.dense_group, "count"),
            Fact("Replicas elsewhere", facts.elsewhere, "count"),
            Fact("Fewest kept by a rank", facts.least_kept, "count"),
            Fact("Most kept by a rank", facts.most_kept, "count"),
            Fact("Most sent by a rank", max(costs.sent_bytes), "bytes"),
            Fact("Most memory of a node", max(costs.node_bytes.values()), "bytes"),
        ),
        (table("Ranks", "rank:count | node:count | peers | their nodes | sends:bytes | keeps:bytes", ranks),),
        (alone,) if facts.same_node else (),
    )
