"""`selective`: all but experts, and those experts that the links have time for, by tokens at risk (MOETION); lossy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...config import MoECheckpointConfig
from ...errors import UsageError
from ...policy.tracking import PLACES
from ...strategies.base import NO_BUFFERS, BufferSpec, Job, LossReport, Throughput
from ...types import Level, OperatorId, RecoveryPlan, SnapshotPlan, expert, full_plan
from .expert_lanes import lanes_of, selected
from .ledger import TWO_LEVELS
from .link_budgets import LOCAL_FLAG, REMOTE_FLAG, LinkBudgets, parse_budget
from .state import Flight
from .strategy import Lossy


class Selective(Lossy):
    """Snapshots the full state of all operators that are no experts, and of the experts with the most tokens at risk.

    Selection (MOETION 4.3, Alg. 1). How many a snapshot has follows from what the bus to host memory carries in one
    iteration (`LinkBudgets`), how many of each layer from the tokens routed there since each expert was last copied. Of
    these, peers are sent those with the most tokens since they were last sent, as many as the network carries. Both are
    decided for each lane, the ranks that own the same experts. The paper selects for both budgets independently; here
    what is sent is among what is copied, as no other state of that iteration is there to be sent. At least one expert
    of each lane is copied and sent.

    Everything. Until a snapshot of all experts has settled, on its nodes and at the peers, and after a recovery that
    needed storage, the next snapshot takes and sends all of them; until storage has all, the next one that is to be
    persisted does. While the links are not measured, a snapshot takes everything too.

    Storage. A snapshot that is persisted ranks experts by the tokens since they were last in storage.

    Capacity boost (MOETION 6). Experts that lost tokens owe them until they have processed as many beyond their
    capacity. What is owed goes with the snapshots.

    Buffers. As `pec`, and one more of its own for each piece: a copy that only its node has leaves the newest one that
    peers have in place.
    """

    needs_throughput = True
    follows_steps = True

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        """As `Strategy.contradictions`."""
        if not num_experts:
            yield "--moe-ckpt-strategy selective needs --num-experts; a dense model is protected with full or sparse"
        for flag, text in ((LOCAL_FLAG, config.budget_local), (REMOTE_FLAG, config.budget_remote)):
            try:
                parse_budget(flag, text)
            except UsageError as error:
                yield str(error)
        if config.capacity_boost > 100:
            yield f"--moe-ckpt-capacity-boost {config.capacity_boost} is a share of the capacity in percent: 0 to 100"

    def __init__(self, job: Job) -> None:
        config = job.config
        sends = job.replicas > 0
        super().__init__(job, levels=TWO_LEVELS | {Level.REPLICAS} if sends else TWO_LEVELS)
        local = parse_budget(LOCAL_FLAG, config.budget_local)
        self._budgets = LinkBudgets(local, parse_budget(REMOTE_FLAG, config.budget_remote), job.replicas)
        self._lanes = lanes_of(job)
        self._sends = sends
        self._told, self._notes = set[str](), tuple[str, ...]()
        self.makes_up = job.drops_tokens and config.capacity_boost > 0
        self._owed: dict[OperatorId, int] = {}
        self.places = PLACES + 1 if sends else PLACES

    @property
    def budgets(self) -> LinkBudgets:
        """What the next snapshot may take of the links."""
        return self._budgets

    def plan(self, iteration: int) -> SnapshotPlan | None:
        due, self._interval_policy = self._interval_policy.due(iteration)
        if not due or self._gave_up:
            return None
        state, writing = self._state, self._interval_policy.persist_due(iteration)[0] and not self.is_writing
        wanted = state.levels if writing else state.levels - {Level.PERSIST}
        experts = sent = self._experts
        if self._lanes and not any(map(state.lacks_experts, wanted)):
            at_risk = state.unsaved(Level.PERSIST if writing else Level.SNAPSHOT)
            unsent = state.unsaved(Level.REPLICAS) if self._sends else at_risk
            experts, sent = selected(self._lanes, self._budgets, at_risk, unsent)
        flight = Flight(iteration, experts, experts if writing else None, sent if self._sends else None)
        self._state = state.planned(flight)
        return self._plan_of(iteration, experts)

    def _plan_of(self, iteration: int, experts: Collection[OperatorId]) -> SnapshotPlan:
        return full_plan(iteration, (one for one in self._job.operators if not one.is_expert or one in experts))

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        return NO_BUFFERS if self._gave_up else self._buffer_specs

    @cached_property
    def _buffer_specs(self) -> tuple[BufferSpec, ...]:
        dense = full_plan(0, (operator for operator in self._job.operators if not operator.is_expert))
        replica = self.places - 1
        return (
            BufferSpec(dense, self.places, replica, trainer=True),
            *(BufferSpec(full_plan(0, [one]), self.places, replica, trainer=False) for one in sorted(self._experts)),
        )

    def throughput_measured(self, throughput: Throughput) -> None:
        self._budgets = self._budgets.after(throughput)
        for flag, (given, carried) in self._budgets.beyond_links.items():
            if flag not in self._told:
                self._told.add(flag)
                self._notes += (
                    f"{flag} {given} is more than the {carried} bytes that the link was measured to carry in one"
                    " iteration: training waits for what is beyond that; give at most that, or auto",
                )

    def take_notes(self) -> tuple[str, ...]:
        """Budgets beyond their links, each flag once."""
        taken, self._notes = self._notes, ()
        return taken

    @property
    def deferred_tokens(self) -> Mapping[OperatorId, int]:
        return self._owed

    def on_deferred_tokens(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """As `Strategy.on_deferred_tokens`."""
        rows = dict(zip(self._job.moe_layers, counts, strict=True))
        left = {one: tokens - rows[one.layer][one.expert] for one, tokens in self._owed.items()}
        self._owed = {one: tokens for one, tokens in left.items() if tokens > 0}

    def report(self) -> LossReport:
        return replace(super().report(), owed=sum(self._owed.values()))

    def to_data(self) -> dict[str, Any]:
        owed = [[one.layer, one.expert, tokens] for one, tokens in sorted(self._owed.items())]
        return {**super().to_data(), "links": self._budgets.to_data(), "owed": owed}

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """As `Strategy.resumed`."""
        plan = super().resumed(plan, data, fault_iteration)
        self._budgets = self._budgets.from_data(data["links"])
        self._owe(plan.lost_tokens, data["owed"])
        return plan

    def _owe(self, lost: Mapping[OperatorId, int], before: Sequence[Sequence[int]]) -> None:
        """Experts make up for what they lost now, and for what they still owed at the target."""
        owed = Counter({expert(layer, index): tokens for layer, index, tokens in before})
        owed.update(lost)
        self._owed = {one: tokens for one, tokens in sorted(owed.items()) if tokens and self.makes_up}
        boost = self._job.config.capacity_boost
        if boost and any(lost.values()) and not self._job.drops_tokens:
            self._notes += (
                f"--moe-ckpt-capacity-boost {boost} has no effect: routers drop no tokens that experts could take in"
                f" place of the {sum(lost.values())} lost ones; --moe-expert-capacity-factor, without"
                " --moe-pad-expert-input-to-capacity, lets them",
            )
