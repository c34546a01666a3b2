"""MoC: some experts in each checkpoint, more of them as faults use up the budget of lost tokens (Dynamic-K)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from ....policy.dynamic_k import Cadence, paper_next_k, worst_case_lost_tokens
from ....policy.shards import owned_operators, sharing_ranks
from ....types import Part
from ..behaviour import Behaviour, Nodes, RecoveryCost
from .links import Replicas, SystemSetting, needs_experts


@dataclass(frozen=True)
class Moc:
    """MoC-System as MoEvement 5.2 runs it: a checkpoint each iteration, at first with an eighth of the experts.

    k_share: share of the experts at first. lost_per_hour: the budget, in iterations' worth of tokens per hour of the
    planned training. None: as in the constants.
    """

    k_share: float | None = None
    lost_per_hour: float | None = None
    name: str = "moc"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`. Raises UsageError for a model without experts."""
        job, constants = setting.job, setting.constants
        needs_experts(self.name, job)
        experts = len(job.shape.moe_layers) * job.shape.num_experts
        share = constants.pec_floor if self.k_share is None else self.k_share
        per_hour = constants.pec_lost_per_hour if self.lost_per_hour is None else self.lost_per_hour
        plan = _Plan(
            setting=setting,
            experts=experts,
            floor=min(max(1, round(share * experts)), experts),
            budget=per_hour * constants.planned_s / 3600,
            faults=constants.planned_s / mtbf_s,
            popularity=tuple(popularity or ()),
            replicas=Replicas(setting, constants.replicas),
        )
        return PecBehaviour(self.name, plan)


@dataclass(frozen=True)
class _Plan:
    """What does not change during a run. experts, floor: over all layers. budget: in iterations' worth of tokens."""

    setting: SystemSetting
    experts: int
    floor: int
    budget: float
    faults: float
    popularity: tuple[float, ...]
    replicas: Replicas

    @cached_property
    def rank_bytes(self) -> tuple[tuple[float, float], ...]:
        """Bytes of non-experts and of experts whose state a rank owns, for the ranks of each stage."""
        job = self.setting.job
        each = job.precision.bytes_per_parameter(Part.EVERYTHING)
        found: set[tuple[float, float]] = set()
        for operators in owned_operators(job.shape, job.topology).values():
            parts = [0.0, 0.0]
            for one in operators:
                parts[one.is_expert] += each * job.shape.parameters[one] / sharing_ranks(one, job.topology)
            found.add((parts[0], parts[1]))
        return tuple(sorted(found))

    def overhead_s(self, k: int) -> float:
        """Added to each iteration by a checkpoint with k of all experts.

        Up to the first K, for which its buffers were made, MoC copies beside training. A larger snapshot is collected
        and goes to the host and on to the peers while training waits.
        """
        setting, constants = self.setting, self.setting.constants
        beside_s = constants.pec_slowdown * setting.iteration_s
        if k <= self.floor:
            return beside_s
        rank_bytes = max(dense + k / self.experts * experts for dense, experts in self.rank_bytes)
        peers_s = rank_bytes / setting.peer_bytes_per_s(constants.replicas)
        return beside_s + constants.pec_blocking_s + rank_bytes / constants.pec_snapshot_bytes_per_s + peers_s

    def expected_loss(self, k: int) -> float:
        """Iterations' worth of tokens that a fault costs on average, with experts saved in rotation.

        That is what the worst case counts, if each expert gets its share of the tokens.
        """
        every = Cadence(self.experts, self.experts, 1, 1)
        return worst_case_lost_tokens(every, k) / self.experts

    def loss(self, k: int, checkpoint: int) -> float:
        """Iterations' worth of tokens lost by a recovery to the checkpoint of this number, which ended a rotation's
        turn wherever its number says; experts that got more than their share of tokens count for more."""
        if not self.popularity:
            return self.expected_loss(k)
        experts = len(self.popularity)
        per_layer = k * experts / self.experts
        position = checkpoint * per_layer
        ages = [(position - 1 - index) % experts // per_layer for index in range(experts)]
        return sum(share * age for share, age in zip(self.popularity, ages, strict=True)) / sum(self.popularity)


class PecBehaviour:
    """A run with partial checkpoints; faults raise K."""

    window = 1
    interval = 1
    _LATENCY = 1

    def __init__(self, name: str, plan: _Plan) -> None:
        self.name = name
        self._plan = plan
        self._k = plan.floor
        self._lost = 0.0
        self._faults = 0
        self._restored = -1

    @property
    def iteration_s(self) -> float:
        """See `Behaviour`."""
        return self._plan.setting.iteration_s

    @property
    def overhead_s(self) -> float:
        """See `Behaviour`."""
        return self._plan.overhead_s(self._k)

    @property
    def k_share(self) -> float:
        """See `Behaviour`."""
        return self._k / self._plan.experts

    @property
    def lost_tokens(self) -> float:
        """See `Behaviour`."""
        return self._lost * self._plan.setting.job.tokens

    @property
    def expected_recovery_s(self) -> float:
        """See `Behaviour`."""
        lost_s = (self.interval / 2 + self._LATENCY) * self.iteration_s
        return self._plan.setting.restart(self._plan.setting.load_s, 0, lost_s).total_s

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        """See `Behaviour`. A second recovery to the same checkpoint finds all experts as their copies, and costs none.

        Afterwards K is doubled if it would not keep the budget (MoC 5.3): with the faults that are still expected.
        """
        plan, setting = self._plan, self._plan.setting
        recovery = setting.rewind(iteration, self.interval, self._LATENCY, setting.load_s)
        if not plan.replicas.survive(nodes if down is None else down):
            recovery = setting.from_storage(iteration)
        restored = iteration - recovery.iterations_again
        lost = 0.0 if restored in (0, self._restored) else plan.loss(self._k, restored)
        self._restored = restored
        self._lost += lost
        self._faults += 1
        self._recalibrate()
        return replace(recovery, lost_tokens=lost * setting.job.tokens)

    def restarts(self, ongoing: Nodes, nodes: Nodes) -> bool:
        """See `Behaviour`: the whole job is in it."""
        return True

    def fresh(self) -> PecBehaviour:
        """See `Behaviour`."""
        return PecBehaviour(self.name, self._plan)

    def _recalibrate(self) -> None:
        to_come = max(0.0, self._plan.faults - self._faults)
        foreseen = self._lost + to_come * self._plan.expected_loss(self._k)
        self._k = paper_next_k(self._k, self._plan.experts, Fraction(foreseen), Fraction(self._plan.budget))
