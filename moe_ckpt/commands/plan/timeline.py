"""How long the parts of a planned recovery will take, for `moe-ckpt plan recovery`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.moe.types import (
    CopySource,
    Inventory,
    OperatorId,
    OperatorSize,
    Part,
    RecoveryPlan,
    Tier,
)
from moe_ckpt.report import Table, table

from ...simulator.prediction import Figures, predicted_parts
from ...simulator.shards import owned_operators
from .options import PlannedJob


def taken(job: PlannedJob, given: dict[str, Any]) -> Figures:
    """Take the figures of the timeline out of what was given."""
    memory, peer = given.pop("memory_gbps") * 1e9, given.pop("peer_gbps") * 1e9
    microbatches = given.pop("microbatches") or 4 * job.topology.pp
    return Figures(given.pop("iteration_time"), microbatches, memory, peer, peer, restart_s=given.pop("restart"))


def without_survivors(inventory: Inventory) -> Inventory:
    """What a rollback of all stages has: no parked state and no logs."""
    kept = {
        rank: tuple(copy for copy in copies if copy.tier is not Tier.PARKED)
        for rank, copies in inventory.copies.items()
    }
    return replace(inventory, copies=kept, logs={})


def predicted(
    plan: RecoveryPlan, job: PlannedJob, figures: Figures, sizes: dict[OperatorId, OperatorSize], *, parks: bool
) -> dict[str, float]:
    """Seconds by part. parks: whether the survivors put their state aside."""
    read: dict[int, Counter[Tier]] = {}
    for source in plan.sources:
        read.setdefault(source.rank, Counter())[source.tier] += source_bytes(source, sizes)
    stages = job.shape.operators_of_stages(job.topology)
    used = job.shape.moe_router_topk / max(1, job.shape.num_experts)
    work = {
        stage: {op: job.shape.parameters[op] * (used if op.is_expert else 1.0) for op in operators}
        for stage, operators in enumerate(stages)
    }
    owned = owned_operators(job.shape, job.topology).values() if parks else ()
    parked = [sum(sizes[op].full_bytes for op in operators) for operators in owned]
    return predicted_parts(plan, job.topology, figures, read, parked, work)


def source_bytes(source: CopySource, sizes: dict[OperatorId, OperatorSize]) -> int:
    """What a rank reads of one copy."""
    is_full = source.part is Part.MASTER_AND_MOMENTS
    return sum(sizes[op].full_bytes if is_full else sizes[op].weights_bytes for op in source.operators)


def timelines_table(timelines: list[dict[str, float]]) -> Table:
    """A row for each part: of the plan and, where there is a second one, of a rollback of all stages."""
    rows = [(part, *(parts[part] for parts in timelines)) for part in timelines[0]]
    rows.append(("all", *(sum(parts.values()) for parts in timelines)))
    second = " | rollback of all stages:seconds" if len(timelines) > 1 else ""
    return table("Timeline", f"part | predicted:seconds{second}", rows)
