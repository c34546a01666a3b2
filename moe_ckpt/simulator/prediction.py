"""How long a replay takes, from its plan."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.dist_checkpointing.moe.types import OperatorId, ReplaySegment, Topology


def replay_s(
    segment: ReplaySegment,
    topology: Topology,
    iteration_s: float,
    microbatches: int,
    work: Mapping[int, Mapping[OperatorId, float]],
    frozen_saves: float = 1 / 3,
) -> float:
    """Seconds that a segment replays: as iterations of a pipeline of its own, without the bubbles that the other stages
    cause (MoEvement 3.4), cheaper by what is frozen.

    With M microbatches, p stages and v virtual stages an iteration takes M + (p - 1) / v turns; a segment of s stages
    that waits for nobody outside takes M + (s - 1) / v.

    Args:
        segment: What is replayed.
        topology: Of the job.
        iteration_s: Of training.
        microbatches: Of one iteration on a data-parallel rank.
        work: By stage, what an iteration costs for each operator, in any unit.
        frozen_saves: The share of an iteration that is saved where all operators are frozen (MoEvement 3.3 expects a
            third: weight gradients and the optimizer's step).
    """
    turns = [microbatches + (stages - 1) / topology.vpp for stages in (len(segment.stages), topology.pp)]
    costs = {operator: cost for stage in segment.stages for operator, cost in work[stage].items()}
    total = sum(costs.values())
    active = [1 - frozen_saves * sum(costs.get(one, 0.0) for one in frozen) / total for frozen in segment.frozen]
    return iteration_s * turns[0] / turns[1] * sum(active)
