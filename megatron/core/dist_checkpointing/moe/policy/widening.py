"""Why a recovery reaches further than the stages that lost their state, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Inventory, Part, RecoveryPlan, Scope, Topology
from .availability import rank_states, stage_states
from .recovery import pipeline_at
from .rollback import Pipeline


def widened(plan: RecoveryPlan, inventory: Inventory, topology: Topology, *, tied: bool = False) -> str:
    """Why stages with parked state roll back, or an older iteration than the newest parked one is recovered.

    Empty where neither is so.
    """
    states = rank_states(inventory, plan.lost, topology, (Part.MASTER_AND_MOMENTS, Part.COMPUTE))
    newest = max((iteration for state in states.values() for iteration in state.parked), default=-1)
    if newest < plan.target:
        return "no rank has parked its state" if plan.scope is Scope.GLOBAL else ""
    pipeline, _ = pipeline_at(inventory, plan.lost, topology, states, stage_states(states, topology), newest, tied)
    kept = {stage for stage in range(topology.pp) if pipeline.parked[stage]}
    moving = {stage for segment in plan.segments if segment.replayed for stage in segment.stages}
    if plan.target == newest and not kept & moving:
        return ""
    failed = sorted(set(range(topology.pp)) - kept)
    return _hindrance(pipeline, failed) or f"{_stages(failed)} cannot come to iteration {newest} alone"


def _hindrance(pipeline: Pipeline, failed: Sequence[int]) -> str:
    """What a replay of the `failed` stages alone lacks, as far as one look tells."""
    stages = len(pipeline.parked)
    if len(failed) == stages:
        return "ranks of every stage lost their state"
    if pipeline.tied and len({0, stages - 1} & set(failed)) == 1:
        return "the first and the last stage share embeddings, and one of them lost its state"
    for stage in failed:
        if not pipeline.bases[stage]:
            return f"no intact copies of stage {stage} lead to iteration {pipeline.target}"
        base = max(pipeline.bases[stage])
        unknown = sorted(set(range(base + 1, pipeline.target + 1)) - pipeline.journal)
        if unknown:
            return f"nobody knows how iteration {unknown[0]} came out"
        for neighbour, way in pipeline.neighbours(stage, 1):
            since = pipeline.logs_since[way][neighbour]
            if neighbour not in failed and since > base + 1:
                have = f"begin with iteration {since}" if since <= pipeline.target else "do not reach the target"
                return f"the logs of stage {neighbour} {have}; stage {stage} replays from iteration {base + 1} on"
    return ""


def _stages(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
