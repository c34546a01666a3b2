"""What all strategies do that leave experts out of snapshots: count tokens, come back from the newest copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...errors import UsageError
from ...policy.availability import Everywhere
from ...policy.checks import not_negative
from ...strategies.base import Job, LossReport, Strategy
from ...strategies.interval_policy import ConstantState
from ...types import Inventory, Level, Lost, OperatorId, Piece, RecoveryPlan, SnapshotPlan, Topology
from .dynamic_k import PltLimit
from .ledger import TWO_LEVELS
from .pieces import expert_pieces, kinds_of
from .recovery import PARTS, mlt, plan_lossy_recovery, plt_pec
from .state import LossyState


class Lossy(Strategy):
    """Snapshots the full state of all operators that are no experts, and of some experts; a subclass says which.

    Pieces. Each expert's full state is a piece of its own, on the ranks that own a part of it, and all the rest is one.
    So a newer piece holds all that an older one of its kind holds, as snapshots of `full` do, and it is freed as soon
    as that one is as safe. (A snapshot that a fault left in parts is not agreed on: where the rest has a part of the
    state of experts that are left out, its dense piece pins the one before.)

    Recovery (MoC 5.1, MOETION 6). All ranks go to the newest iteration of which there is all but experts; each expert
    takes its newest copy up to there, in memory of its node, of peers, or in storage. What was routed to it after that
    copy is lost, and counted.
    """

    counts_tokens = True
    selects = True
    plans_by_sizes = True

    def __init__(self, job: Job, *, levels: Collection[Level] = TWO_LEVELS, threshold: float | None = None) -> None:
        """levels: at which copies are told apart. threshold: the PLT that must not be exceeded."""
        super().__init__(job)
        if job.unchanging and all(one in job.unchanging for one in job.operators if one.is_expert):
            raise UsageError(
                f"--moe-ckpt-strategy {job.config.strategy} chooses among experts by their tokens, but none of them"
                " is trained (--freeze-experts): use full or sparse, which save once what training does not change"
            )
        self._constants = ConstantState()  # what else does not change goes with the rest
        self._kinds = kinds_of(job)
        allowed = not_negative("--moe-ckpt-plt-threshold", 1 if threshold is None else threshold)
        self._limit = PltLimit(job.tokens_per_iteration * job.iterations, job.topk, allowed)
        kept = max(2, job.config.persist_keep)
        waits = job.replicas > 0 and Level.REPLICAS not in levels
        self._state = LossyState(job.moe_layers, job.num_experts, kept, frozenset(levels), waits)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot under way is to be persisted."""
        return any(one.persist is not None for one in self._state.flights)

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """`dense`, and one for each expert of which the plan has the full state."""
        flight = next((one for one in self._state.flights if one.iteration == plan.iteration), None)
        return expert_pieces(plan, self._kinds, flight.sent if flight else None)

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """What continues was chosen when the snapshot was planned."""
        ready = self._state.ready
        due, interval_policy = self._interval_policy.persist_due(plan.iteration)
        if ready is None or ready.persist is None or ready.iteration != plan.iteration or not due:
            return ()
        self._interval_policy, self._state = interval_policy, self._state.handed_on()
        return (self._plan_of(plan.iteration, ready.persist),)

    def _plan_of(self, iteration: int, experts: Collection[OperatorId]) -> SnapshotPlan:
        """The full state of these experts, and of all other operators."""
        raise NotImplementedError

    def on_token_counts(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """As `Strategy.on_token_counts`."""
        self._state = self._state.on_token_counts(iteration, counts)

    def lost_before(self, iteration: int, lost_tokens: Sequence[int]) -> None:
        """As `Strategy.lost_before`."""
        self._state = self._state.begun(iteration, lost_tokens)

    def on_commit(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        """As `Strategy.on_commit`."""
        self._state = self._state.on_commit(plan.iteration, level, ok)

    def to_data(self) -> dict[str, Any]:
        planned = [self._limit.tokens, self._limit.topk]
        return {**super().to_data(), **self._state.to_data(), "planned": planned}

    def recover(
        self, inventory: Inventory, lost: Lost, topology: Topology, everywhere: Everywhere | None = None
    ) -> RecoveryPlan:
        """As `Strategy.recover`; the tokens are counted by `resumed`, for the counts are stored with the target."""
        return plan_lossy_recovery(
            inventory,
            lost,
            topology,
            lambda operator, after, upto: 0,
            order=self._job.order,
            everywhere=everywhere,
        )

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """As `Strategy.resumed`: lost are the tokens counted after the copy of each expert, up to the target."""
        plan = super().resumed(plan, data, fault_iteration)
        self._state, lost_tokens = self._state.resumed(data, plan, fault_iteration)
        return replace(plan, lost_tokens=lost_tokens)

    def on_stored(self, plans: Sequence[SnapshotPlan]) -> None:
        """As `Strategy.on_stored`."""
        super().on_stored(plans)
        master, moments = ({one: plan.iteration for plan in plans for one in plan.giving(part)} for part in PARTS)
        newest = {one: min(iteration, moments[one]) for one, iteration in master.items() if one in moments}
        self._state = self._state.on_stored(newest)

    def report(self) -> LossReport:
        """What faults have cost so far, for tables and metrics."""
        layers, ledger, limit = self._job.moe_layers, self._state.ledger, self._limit
        lost = ledger.lost_tokens if ledger else (0,) * len(layers)
        at_risk = ledger.at_risk(Level.SNAPSHOT) if ledger else (0,) * len(layers)
        of_all = lost, limit.tokens, limit.topk
        return LossReport(layers, lost, at_risk, limit.plt(lost), plt_pec(*of_all), mlt(*of_all))

    @cached_property
    def _experts(self) -> frozenset[OperatorId]:
        return frozenset(self._kinds)
