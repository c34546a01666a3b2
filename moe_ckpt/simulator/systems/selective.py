"""MOETION: each iteration the experts that the links have time for, those with the most tokens at risk first.

`extensions/lossy/selection` decides here as in training, for layers that are all alike. One difference:
where the links have no time for a single expert, a job sends one of each rank all the same, and here none is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.core.dist_checkpointing.moe.extensions.lossy.selection import Budgets, select, selective_plan
from megatron.core.dist_checkpointing.moe.types import expert

from ..behaviour import Behaviour, Nodes, RecoveryCost
from ..shards import owned_operators, shard_sizes
from .links import Replicas, SystemSetting, needs_experts
from .lossy import LossyBehaviour
from .pec import PecCosts

_UNIT = 1_000_000
"""Tokens of a layer in one iteration, where only shares matter: selection counts whole ones."""


@dataclass(frozen=True)
class Moetion:
    """MOETION: each iteration a snapshot of all non-experts and of some experts, at r peers.

    replicas: None as in the constants.
    """

    replicas: int | None = None
    name: str = "moetion"

    def behaviour(
        self, setting: SystemSetting, mtbf_s: float, *, popularity: Sequence[float] | None = None
    ) -> Behaviour:
        """See `CheckpointSystem`. Raises UsageError for a model without experts."""
        needs_experts(self.name, setting.job)
        count = setting.constants.replicas if self.replicas is None else self.replicas
        share, stall_s = _tightest(setting, count)
        losses = SelectiveLosses(setting, share, stall_s, tuple(popularity or ()), Replicas(setting, count))
        return SelectiveBehaviour(self.name, losses)


def _tightest(setting: SystemSetting, replicas: int) -> tuple[float, float]:
    """Share of its experts that the rank which can save least of them sends, and how long training waits for any."""
    job = setting.job
    free = max(setting.free_s / setting.iteration_s, 1e-9)
    remote = setting.peer_bytes_per_s(replicas) * free
    budgets = Budgets(setting.host_bytes_per_s, remote, setting.iteration_s)
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    share, stall_s = 1.0, 0.0
    alike = {}
    for operators in owned_operators(job.shape, job.topology).values():
        alike[tuple((one.layer, one.kind) for one in operators)] = operators
    for operators in alike.values():
        plan = selective_plan(0, {one: sizes[one] for one in operators}, {}, {}, budgets)
        experts = sum(one.is_expert for one in operators)
        if experts:
            share = min(share, sum(plan.remote.experts_per_layer.values()) / experts)
        stall_s = max(stall_s, plan.stall_s + plan.lag_s)
    return share, stall_s


@dataclass(frozen=True)
class SelectiveLosses:
    """What a fault costs a run in tokens, and what does not change during it."""

    setting: SystemSetting
    share: float
    stall_s: float
    popularity: tuple[float, ...]
    replicas: Replicas

    @property
    def copied_bytes(self) -> float:
        """Of the busiest rank in an iteration: the non-experts, and the selected share of the experts."""
        return max(dense + self.share * experts for dense, experts in PecCosts(self.setting, self.share).rank_bytes)

    @cached_property
    def mean(self) -> float:
        """Iterations' worth of tokens that a fault costs on average: those that experts have not saved.

        Found by selecting again and again in one layer until each expert's turn has come several times.
        """
        experts = self.setting.job.shape.num_experts
        shares = self.popularity or (1.0,) * experts
        gains = [round(_UNIT * share / sum(shares)) for share in shares]
        unsaved = {expert(0, index): 0 for index in range(experts)}
        rounds = 16 * round(1 / self.share)
        credit, lost = 0.0, 0
        for number in range(2 * rounds):
            credit += self.share * experts
            for one, gain in zip(unsaved, gains, strict=True):
                unsaved[one] += gain
            for one in select(unsaved, {0: int(credit)}):
                unsaved[one] = 0
            credit -= int(credit)
            lost += sum(unsaved.values()) if number >= rounds else 0
        return lost / rounds / _UNIT


class SelectiveBehaviour(LossyBehaviour):
    """A run with selective snapshots."""

    def __init__(self, name: str, losses: SelectiveLosses) -> None:
        setting = losses.setting
        overhead_s = losses.stall_s + setting.slowed_s(losses.copied_bytes, losses.replicas.count)
        overhead_s += setting.persist_overhead_s
        super().__init__(name, setting, losses.replicas, overhead_s=overhead_s, k_share=losses.share)
        self._losses = losses
        self._restored = 0

    def strike(self, iteration: int, *, nodes: Nodes, down: Nodes | None = None) -> RecoveryCost:
        """See `Behaviour`. Where no expert is ever sent, all tokens since the recovery before are lost."""
        recovery = super().strike(iteration, nodes=nodes, down=down)
        restored = iteration - recovery.iterations_again
        since_then = max(0, restored - self._restored)
        self._restored = restored
        return self._lose(recovery, min(self._losses.mean, since_then) if self._losses.share else since_then)

    def fresh(self) -> SelectiveBehaviour:
        """See `Behaviour`."""
        return SelectiveBehaviour(self.name, self._losses)
