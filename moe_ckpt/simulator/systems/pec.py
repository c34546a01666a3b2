"""MoC: some experts in each checkpoint, more of them before faults can use up the budget of lost tokens (`pec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from megatron.core.dist_checkpointing.moe.extensions.lossy.pec import Pec
from megatron.core.dist_checkpointing.moe.types import SnapshotPlan

from ..behaviour import Behaviour, Nodes, RecoveryCost
from ..driver import Driver, layer_job
from ..shards import owned_operators, sharing_ranks
from .links import Replicas, SystemSetting, needs_experts
from .lossy import LossyBehaviour


@dataclass(frozen=True)
class Moc:
    """MoC-System as `pec` runs it: a checkpoint each iteration, at first with an eighth of the experts.

    k_share: share of the experts at first. lost_per_hour: the budget, in iterations' worth of tokens per hour of the
    planned training. replicas: peers that keep snapshots. None: as in the constants.
    """

    k_share: float | None = None
    lost_per_hour: float | None = None
    replicas: int | None = None
    name: str = "moc"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`. Raises UsageError for a model without experts."""
        if self.replicas is not None:
            setting = replace(setting, constants=replace(setting.constants, replicas=self.replicas))
        job, constants = setting.job, setting.constants
        needs_experts(self.name, job)
        experts, topk = job.shape.num_experts, job.shape.moe_router_topk
        share = constants.pec_floor if self.k_share is None else self.k_share
        per_hour = constants.pec_lost_per_hour if self.lost_per_hour is None else self.lost_per_hour
        shares = popularity or (1.0,) * experts
        of_a_layer = layer_job(
            experts,
            topk,
            job.tokens,
            max(1, round(constants.planned_s / setting.iteration_s)),
            strategy="pec",
            pec_k_snapshot=min(max(1, round(share * experts)), experts),
            plt_threshold=min(1.0, per_hour * setting.iteration_s / 3600),
        )
        counts = [[round(job.tokens * topk * share / sum(shares)) for share in shares]]
        costs = PecCosts(setting, of_a_layer.config.pec_k_snapshot / experts)
        rotation = -(-experts // of_a_layer.config.pec_k_snapshot)
        start = SnapshotStretch(Driver(of_a_layer, lambda iteration: counts), experts, sum(counts[0]), rotation, costs)
        return PecBehaviour(self.name, setting, Replicas(setting, constants.replicas), start)


@dataclass(frozen=True)
class PecCosts:
    """What snapshots of partial checkpoints cost. floor: the share of the experts for which the buffers were made."""

    setting: SystemSetting
    floor: float

    @cached_property
    def rank_bytes(self) -> tuple[tuple[float, float], ...]:
        """Bytes of non-experts and of experts whose state a rank owns, for the ranks of each stage."""
        job = self.setting.job
        each = self.setting.copied_parameter_bytes
        found: set[tuple[float, float]] = set()
        for operators in owned_operators(job.shape, job.topology).values():
            parts = [0.0, 0.0]
            for operator in operators:
                parts[operator.is_expert] += (
                    each * job.shape.parameters[operator] / sharing_ranks(operator, job.topology)
                )
            found.add((parts[0], parts[1]))
        return tuple(sorted(found))

    def overhead_s(self, share: float) -> float:
        """Added to an iteration by a snapshot with this share of all experts.

        Up to the floor MoC copies beside training. A larger snapshot is collected and goes to the host and on to the
        peers while training waits. `pec` copies all while training continues, which waits for what has no time there.
        """
        setting, constants = self.setting, self.setting.constants
        rank_bytes = max(dense + share * experts for dense, experts in self.rank_bytes)
        peers_s = rank_bytes / setting.peer_bytes_per_s(constants.replicas)
        if constants.pec_slowdown is None:
            late_s = max(0.0, peers_s - setting.free_s)
            return late_s + setting.slowed_s(rank_bytes, constants.replicas) + setting.persist_overhead_s
        beside_s = constants.pec_slowdown * setting.iteration_s + setting.persist_overhead_s
        if share <= self.floor:
            return beside_s
        return beside_s + constants.pec_blocking_s + rank_bytes / constants.pec_snapshot_bytes_per_s + peers_s


@dataclass
class SnapshotStretch:
    """Training from a state that `pec` came back to, or from its start, until the next fault.

    Layers have the same experts and popularity here, so the strategy of a job with one of them decides for all. With
    the same counts in each iteration what it does repeats after one rotation over its groups. So it is driven for two
    only, and a fault after longer finds the state of the second one at the same place; and stretches that begin in the
    same state are the same one. experts, tokens: of a layer, and what it routes in an iteration.
    """

    start: Driver
    experts: int
    tokens: int
    rotation: int
    costs: PecCosts
    known: dict[object, SnapshotStretch] = field(default_factory=dict, repr=False)
    _after: dict[int, tuple[float, SnapshotStretch]] = field(default_factory=dict, repr=False)

    @cached_property
    def _driven(self) -> tuple[list[Driver], list[SnapshotPlan]]:
        """The drivers after each iteration of two rotations, and their snapshots."""
        drivers, plans = [self.start], []
        for _ in range(2 * self.rotation):
            driver = drivers[-1].fork()
            plan = driver.iterate()
            assert plan is not None, "a snapshot in each iteration"
            drivers.append(driver)
            plans.append(plan)
        return drivers, plans

    @cached_property
    def shares(self) -> list[float]:
        """Of a layer's experts, in each snapshot of a rotation that has settled."""
        plans = self._driven[1][-self.rotation :]
        return [sum(operator.is_expert for operator in plan.parts) / self.experts for plan in plans]

    @cached_property
    def k_share(self) -> float:
        """Their mean."""
        return fmean(self.shares)

    @cached_property
    def overhead_s(self) -> float:
        """Mean seconds that these snapshots add to an iteration."""
        return fmean(map(self.costs.overhead_s, self.shares))

    def fault(self, iterations: int) -> tuple[float, SnapshotStretch]:
        """What a fault after so many iterations loses, in iterations' worth of tokens, and how training continues."""
        if iterations > 2 * self.rotation:
            iterations = self.rotation + 1 + (iterations - self.rotation - 1) % self.rotation
        if iterations not in self._after:
            driver = self._driven[0][iterations].fork()
            if driver.iteration < 2:
                return 0.0, self  # the first snapshot is still being copied: training begins again
            plan = driver.recovered()
            assert isinstance(driver.strategy, Pec)
            kept = driver.strategy.report().lost_tokens, driver.strategy.to_data()["cursor"]
            ages = tuple((plan.target - source.iteration, source.operators) for source in plan.sources)
            following = self.known.setdefault((*kept, ages), replace(self, start=driver, _after={}))
            self._after[iterations] = sum(plan.lost_tokens.values()) / self.tokens, following
        return self._after[iterations]


class PecBehaviour(LossyBehaviour):
    """A run with partial checkpoints; what faults have lost raises K."""

    def __init__(self, name: str, setting: SystemSetting, replicas: Replicas, start: SnapshotStretch) -> None:
        super().__init__(name, setting, replicas, overhead_s=start.overhead_s, k_share=start.k_share)
        self._start = self._stretch = start
        self._restored = 0

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        """See `Behaviour`. A second recovery to the same checkpoint loses nothing: experts are as their copies."""
        recovery = super().strike(iteration, nodes=nodes, down=down)
        lost, self._stretch = self._stretch.fault(max(0, iteration - self._restored))
        self._restored = iteration - recovery.iterations_again
        self.overhead_s, self.k_share = self._stretch.overhead_s, self._stretch.k_share
        return self._lose(recovery, lost)

    def fresh(self) -> PecBehaviour:
        """See `Behaviour`."""
        return PecBehaviour(self.name, self._setting, self._replicas, self._start)
