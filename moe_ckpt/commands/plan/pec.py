"""`moe-ckpt plan pec`: which experts partial checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.partial import PEC_SCOPES, SELECTIONS, pec_plan, sequential_selection
from megatron.core.dist_checkpointing.moe.policy.sharding import ShardAssignment, shard_checkpoint
from megatron.core.dist_checkpointing.moe.strategies import Throughput
from megatron.core.dist_checkpointing.moe.types import ModelShape, OperatorId, Part, SnapshotPlan, Topology
from moe_ckpt.report import Fact, Report, Table, table

from ...simulator.driver import Driver
from . import counts_file
from .drive import job_of
from .options import PlannedJob, duration, number, plan_command, rate, shown_checkpoints

HELP = """Show partial experts checkpointing (MoC 3, PEC 3.1): the experts that successive checkpoints hold, what they
weigh, and how evenly the ranks share the work.

\b
    $ moe-ckpt plan pec --model GPT-350M-16E --ep 8 --world-size 16 --pec-k-snapshot 4 --pec-k-persist 1

Checkpoint 0 has all experts, as the first one of a job; the facts are about those after it. All go on to storage.
Bytes are those that a job writes: master weights and moments, and compute weights where these are not the cast of the
master weights.
"""


@plan_command(HELP)
@number("--pec-k-snapshot", "k", default=1, show_default=True, metavar="K", help="Experts per MoE layer.")
@number("--pec-k-persist", "k_persist", default=1, show_default=True, metavar="K", help="Of these, to storage.")
@click.option("--pec-selection", "selection", type=click.Choice(SELECTIONS), default=SELECTIONS[0])
@click.option(
    "--pec-scope",
    "scope",
    type=click.Choice(list(PEC_SCOPES)),
    default="both",
    show_default=True,
    help="What is left out of experts that are not selected: weights, optimizer (moments), or both.",
)
@click.option("--pec-adaptive", is_flag=True, help="As many experts as the two options below have time for (MoC 5.3).")
@rate("--budget-local-gbps", "With --pec-adaptive: from one GPU to its host's memory.", default=25.0)
@duration("--iteration-time", "With --pec-adaptive: of one iteration.", default="1s")
@click.option("--shard", type=click.Choice(["none", "equal", "adaptive"]), default="none", show_default=True)
@shown_checkpoints
@counts_file.option
def pec(
    job: PlannedJob,
    k: int,
    k_persist: int,
    selection: str,
    scope: str,
    pec_adaptive: bool,
    budget_local_gbps: float,
    iteration_time: float,
    shard: str,
    checkpoints: int | None,
    counts: Path | None,
) -> Report:
    shape = job.shape
    if not shape.moe_layers:
        raise UsageError(f"--model {shape.name} has no MoE layers: partial experts need experts")
    check_experts(shape, k, k_persist)
    config = MoECheckpointConfig(
        strategy="pec", persist_dir="storage", persist_interval=1, pec_k_snapshot=k, pec_k_persist=k_persist,
        pec_selection=selection, pec_scope=scope, pec_adaptive=pec_adaptive,
    )  # fmt: skip
    rotation = -(-shape.num_experts // k)
    is_sequential = selection == "sequential"
    shown = 1 + rotation if checkpoints is None else checkpoints
    tokens = counts_file.load_counts(counts, shape)
    pace = Throughput(iteration_time, budget_local_gbps * 1e9) if pec_adaptive else None
    found = [
        tuple(frozenset().union(*map(_experts, plans)) for plans in ((taken.plan,), taken.persisted))
        for taken in Driver(job_of(job, config), tokens.of, pace=pace).snapshots(shown)
    ]
    after_first = [selected for selected, _ in found[1:] or found]
    covered = frozenset[OperatorId]().union(*after_first)
    partial = [_sharded(job, selected, scope, shard) for selected in after_first]
    largest = max(shards.total_bytes for shards in partial)
    whole = _sharded(job, frozenset(op for op in shape.operators if op.is_expert), scope, shard)
    return Report(
        f"Partial experts checkpoints of {shape.name}: {k} of {shape.num_experts} experts per MoE layer",
        (
            Fact("Checkpoint", largest, "bytes"),
            Fact("Full checkpoint", whole.total_bytes, "bytes"),
            Fact("Share of the full checkpoint", largest / whole.total_bytes, "share"),
            Fact("Most bytes of a rank", max(shards.bottleneck_bytes for shards in partial), "bytes"),
            Fact("Most bytes of a rank, full", whole.bottleneck_bytes, "bytes"),
            *((Fact("Checkpoints until all experts are saved", rotation, "count"),) if is_sequential else ()),
            Fact("Experts covered by those shown", len(covered) / (len(shape.moe_layers) * shape.num_experts), "share"),
        ),
        (_selections(shape, found),),
    )


def _sharded(job: PlannedJob, selected: frozenset[OperatorId], scope: str, shard: str) -> ShardAssignment:
    """Who stores a checkpoint with these experts, with the bytes that a job writes."""
    stored = Part.MASTER_AND_MOMENTS if job.precision.exact().recasts else Part.EVERYTHING
    plan = pec_plan(0, job.shape.operators, selected, PEC_SCOPES[scope], stored)
    # A job refuses --moe-ckpt-shard with the distributed optimizer, which leaves nothing to share out.
    sharded = shard == "none"
    return shard_checkpoint(shard, job.shape, job.topology, job.precision, plan.parts, optimizer_sharded=sharded)


def _selections(shape: ModelShape, found: Sequence[Sequence[frozenset[OperatorId]]]) -> Table:
    """A row for each checkpoint and layer: the experts of the snapshot, and those of them that went on to storage."""
    rows = (
        (index, layer, *(sorted(op.expert for op in experts if op.layer == layer) for experts in checkpoint))
        for index, checkpoint in enumerate(found)
        for layer in shape.moe_layers
    )
    return table("Selections", "checkpoint:count | layer:count | snapshot | persist", rows)


def check_experts(shape: ModelShape, k: int, k_persist: int = 1) -> None:
    """Raise UsageError for more experts than there are."""
    if k > shape.num_experts:
        raise UsageError(f"--pec-k-snapshot is {k}, but must be from 1 to num_experts = {shape.num_experts}")
    if k_persist > k:
        raise UsageError(f"--pec-k-persist is {k_persist}, but must be from 1 to --pec-k-snapshot = {k}")


def selected_experts(shape: ModelShape, topology: Topology, k: int, position: int) -> frozenset[OperatorId]:
    """The experts of one checkpoint by sequential selection, each pipeline stage for its own layers."""
    moe = set(shape.moe_layers)
    stages = ([layer for layer in stage if layer in moe] for stage in topology.layers_of_stages(shape.num_layers))
    at = position % shape.num_experts
    return frozenset(
        operator
        for layers in stages
        if layers
        for operator in sequential_selection(layers, shape.num_experts, k, at, ep=topology.ep)
    )


def _experts(plan: SnapshotPlan) -> frozenset[OperatorId]:
    return frozenset(operator for operator in plan.anchored if operator.is_expert)
