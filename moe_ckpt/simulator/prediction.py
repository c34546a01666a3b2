"""How long each part of a recovery will take, from its plan and from figures of the machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.core.dist_checkpointing.moe.policy.checks import not_negative, positive, whole
from megatron.core.dist_checkpointing.moe.types import OperatorId, RecoveryPlan, ReplaySegment, Tier, Topology


@dataclass(frozen=True)
class Figures:
    """What a prediction depends on beside the plan; a timeline of a recovery that was measured has them.

    iteration_time_s: of training. microbatches: of one iteration on a data-parallel rank. The bandwidths are those of
    one rank. detect_s: until the last survivor has heard of the fault. restart_s: until all processes run again, have
    met, and have built the model. frozen_saves: which share of an iteration is saved where all operators are frozen
    (MoEvement 3.3 expects a third: weight gradients and the optimizer's step).
    Raises UsageError for figures that no machine has.
    """

    iteration_time_s: float
    microbatches: int
    memory_bytes_per_s: float
    peer_bytes_per_s: float
    storage_bytes_per_s: float
    detect_s: float = 0.1
    restart_s: float = 10.0
    frozen_saves: float = 1 / 3

    def __post_init__(self) -> None:
        for name in ("iteration_time_s", "memory_bytes_per_s", "peer_bytes_per_s", "storage_bytes_per_s"):
            positive(name, getattr(self, name))
        whole("microbatches", self.microbatches, 1)
        for name in ("detect_s", "restart_s", "frozen_saves"):
            not_negative(name, getattr(self, name))

    def bytes_per_s(self, tier: Tier) -> float:
        """How fast a rank reads from there."""
        return {
            Tier.PARKED: self.memory_bytes_per_s,
            Tier.OWN_MEMORY: self.memory_bytes_per_s,
            Tier.PEER_MEMORY: self.peer_bytes_per_s,
            Tier.PERSISTENT: self.storage_bytes_per_s,
        }[tier]


def predicted_parts(
    plan: RecoveryPlan,
    topology: Topology,
    figures: Figures,
    read: Mapping[int, Mapping[Tier, int]],
    parked: Collection[int],
    work: Mapping[int, Mapping[OperatorId, float]],
) -> dict[str, float]:
    """Seconds by part, named as those of a timeline that is measured; the slowest rank counts.

    read: bytes that each rank reads from each tier. parked: bytes that each survivor puts aside. work: by stage, what
    an iteration costs for each operator, in any unit.
    """
    fetches = [sum(count / figures.bytes_per_s(tier) for tier, count in tiers.items()) for tiers in read.values()]
    replays = [replay_s(segment, topology, figures, work) for segment in plan.segments]
    return {
        "detect": figures.detect_s,
        "park": max(parked, default=0) / figures.memory_bytes_per_s,
        "restart": figures.restart_s,
        "fetch": max(fetches, default=0.0),
        "replay": max(replays, default=0.0),
    }


def replay_s(
    segment: ReplaySegment, topology: Topology, figures: Figures, work: Mapping[int, Mapping[OperatorId, float]]
) -> float:
    """Seconds that a segment replays: as iterations of a pipeline of its own, without the bubbles that the other stages
    cause (MoEvement 3.4), cheaper by what is frozen.

    With M microbatches, p stages and v virtual stages an iteration takes M + (p - 1) / v turns; a segment of s stages
    that waits for nobody outside takes M + (s - 1) / v.
    """
    turns = [figures.microbatches + (stages - 1) / topology.vpp for stages in (len(segment.stages), topology.pp)]
    costs = {operator: cost for stage in segment.stages for operator, cost in work[stage].items()}
    total = sum(costs.values())
    active = [
        1 - figures.frozen_saves * sum(costs.get(one, 0.0) for one in frozen) / total for frozen in segment.frozen
    ]
    return figures.iteration_time_s * turns[0] / turns[1] * sum(active)
