"""What the papers' own rules decide where this project's strategies decide otherwise.

MoEvement's Alg. 1 counts operators, where `sparse` counts bytes; MoC raises K after the fault that broke the budget of
lost tokens (Dynamic-K, MoC 5.3), where `pec` raises it before. The tables and figures need the papers' rules. All else,
costs and recoveries, is that of the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.core.dist_checkpointing.moe.policy.window import Lane, Schedule, hard_count, joint_schedules
from moe_ckpt.simulator.behaviour import Behaviour, Nodes, RecoveryCost
from moe_ckpt.simulator.paper_window import paper_schedule, paper_window
from moe_ckpt.simulator.shards import owned_operators, shard_sizes
from moe_ckpt.simulator.systems import SYSTEMS, CheckpointSystem, Gemini, MoEvement
from moe_ckpt.simulator.systems.links import Replicas, SystemSetting, needs_experts
from moe_ckpt.simulator.systems.lossy import LossyBehaviour
from moe_ckpt.simulator.systems.pec import PecCosts
from moe_ckpt.simulator.systems.sparse import expert_shares
from reproduce.paper_k import Cadence, paper_next_k, worst_case_lost_tokens


@dataclass(frozen=True)
class PaperMoEvement(MoEvement):
    """MoEvement with the windows of its Alg. 1. reorder: popular experts are anchored last; Fig. 13 turns that off."""

    reorder: bool = True

    def schedules(self, setting: SystemSetting, popularity: Sequence[float] | None) -> dict[Lane, Schedule]:
        """The same window size for all lanes; each lane has its own groups where all need as many iterations."""
        job, budget = setting.job, self.budget_bytes(setting)
        sizes = shard_sizes(job.shape, job.topology, job.precision)
        shares = expert_shares(job, popularity) if self.reorder else None
        lanes = {
            lane: operators if shares is None else hard_count(operators, shares)
            for lane, operators in owned_operators(job.shape, job.topology).items()
        }
        if self.window is not None:
            return joint_schedules(lanes, sizes, budget, window=self.window)
        found: dict[tuple[tuple[int, int], ...], int] = {}
        for operators in lanes.values():
            own = {operator: sizes[operator] for operator in operators}
            key = tuple((size.full_bytes, size.weights_bytes) for size in own.values())
            found.setdefault(key, paper_window(own, budget)[0])
        needed = max(found.values())
        counted = {lane: paper_schedule(operators, sizes, budget) for lane, operators in lanes.items()}
        if all(schedule.window.size == needed for schedule in counted.values()):
            return counted
        return joint_schedules(lanes, sizes, budget, window=needed)


@dataclass(frozen=True)
class PaperMoc:
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
        floor = min(max(1, round(share * experts)), experts)
        rules = _PaperPec(
            setting=setting,
            costs=PecCosts(setting, floor / experts),
            experts=experts,
            floor=floor,
            budget=per_hour * constants.planned_s / 3600,
            faults=constants.planned_s / mtbf_s,
            popularity=tuple(popularity or ()),
            replicas=Replicas(setting, constants.replicas),
        )
        return PaperPecBehaviour(self.name, rules)


@dataclass(frozen=True)
class _PaperPec:
    """What does not change during a run. experts, floor: over all layers. budget: in iterations' worth of tokens."""

    setting: SystemSetting
    costs: PecCosts
    experts: int
    floor: int
    budget: float
    faults: float
    popularity: tuple[float, ...]
    replicas: Replicas

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


class PaperPecBehaviour(LossyBehaviour):
    """A run with partial checkpoints; faults raise K."""

    def __init__(self, name: str, rules: _PaperPec) -> None:
        share = rules.floor / rules.experts
        super().__init__(name, rules.setting, rules.replicas, overhead_s=rules.costs.overhead_s(share), k_share=share)
        self._rules = rules
        self._k = rules.floor
        self._faults = 0
        self._restored = -1

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        """See `Behaviour`. A second recovery to the same checkpoint finds all experts as their copies, and costs none.

        Afterwards K is doubled if it would not keep the budget (MoC 5.3): with the faults that are still expected.
        """
        rules = self._rules
        recovery = super().strike(iteration, nodes=nodes, down=down)
        restored = iteration - recovery.iterations_again
        lost = 0.0 if restored in (0, self._restored) else rules.loss(self._k, restored)
        self._restored = restored
        recovery = self._lose(recovery, lost)
        self._faults += 1
        to_come = max(0.0, rules.faults - self._faults)
        foreseen = self._lost_iterations + to_come * rules.expected_loss(self._k)
        self._k = paper_next_k(self._k, rules.experts, Fraction(foreseen), Fraction(rules.budget))
        self.k_share = self._k / rules.experts
        self.overhead_s = rules.costs.overhead_s(self.k_share)
        return recovery

    def fresh(self) -> PaperPecBehaviour:
        """See `Behaviour`."""
        return PaperPecBehaviour(self.name, self._rules)


PAPER_SYSTEMS: dict[str, CheckpointSystem] = {
    **SYSTEMS,
    "gemini": Gemini(),
    "moc": PaperMoc(),
    "moevement": PaperMoEvement(),
}
"""The simulator's systems, with those of the papers' own rules in the place of this project's."""
