"""`pec`: all but experts, and K experts per MoE layer in turn (MoC, PEC); lossy, and every lost token is counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from ...config import MoECheckpointConfig
from ...policy.checks import not_negative
from ...policy.dynamic_k import PltLimit, choose_k, k_ladder
from ...policy.lossy_recovery import plan_lossy_recovery
from ...policy.partial import PEC_SCOPES, pec_plan
from ...types import Inventory, Level, Lost, OperatorId, Part, Piece, RecoveryPlan, SnapshotPlan, Topology, full_plan
from ..base import NO_BUFFERS, BufferSpec, Job, Strategy
from .groups import Groups
from .selection import age, by_load, in_turn, overdue, to_persist
from .state import Experts, Flight, PecState


@dataclass(frozen=True)
class PecReport:
    """What faults have cost so far: tokens per MoE layer, PLT (MoC eq. 7), and K of the last snapshot."""

    layers: tuple[int, ...]
    lost_tokens: tuple[int, ...] = field(repr=False)
    plt: Fraction
    k: int


class Pec(Strategy):
    """Snapshots the full state of all operators that are no experts, and of K experts per MoE layer.

    Groups and buffers. Experts are in G = ceil(N / K0) fixed groups (`Groups`, K0 = --moe-ckpt-pec-k-snapshot), and a
    snapshot takes whole groups, each as a piece of its own kind. So a newer piece holds all that an older one of its
    kind holds, as snapshots of `full` do, and each kind needs what these need: own 3, replica 2, segments exactly as
    large as the group's records on each rank. That is enough whatever is selected, fails, or K grows to, while at most
    two snapshots at a time are copied, replicated, persisted or not agreed on: one settled piece of each kind stays.
    (A snapshot that a fault left in parts is not agreed on: with scopes but `all` its dense piece pins the one before.)
    With `load-aware` each expert-parallel rank of each stage has its own choice of groups.

    Everything. Until a snapshot of all experts has settled, and after a recovery that needed storage, the next snapshot
    takes all groups; likewise until storage has all experts the next one that is to be persisted does.

    Storage. A snapshot that will be persisted also takes up to ceil(K / K0) groups with experts that are overdue in
    storage: not persisted in A = ceil(N / K) x ceil(K / K_persist) writes. That is only needed where the writes keep
    meeting the same groups; all experts are then persisted in any 2 x A writes. K_persist grows with K, and is N for N.

    Dynamic-K. With --moe-ckpt-plt-threshold K is the smallest of K0, 2 K0, ..., N with which neither a fault that
    leaves memory (replicas included), nor, where the snapshot will be persisted, one that leaves only storage, can
    bring the PLT above the threshold. Only settled copies count as saved, and tokens of iterations that are not counted
    yet as if all went to experts that are left out. Excepted is a recovery to a snapshot of which some pieces are gone.
    """

    counts_tokens = True
    settings = ("pec_", "plt_")

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        if not num_experts:
            yield "--moe-ckpt-strategy pec needs --num-experts; a dense model is protected with full or sparse"
        elif config.pec_k_snapshot > num_experts:
            yield f"--moe-ckpt-pec-k-snapshot {config.pec_k_snapshot} is above --num-experts {num_experts}"
        if (config.pec_k_persist or 0) > config.pec_k_snapshot:
            yield (
                f"--moe-ckpt-pec-k-persist {config.pec_k_persist} is above --moe-ckpt-pec-k-snapshot "
                f"{config.pec_k_snapshot}: only experts that are in a snapshot can become persistent"
            )
        if (config.plt_threshold or 0) > 1:
            yield (
                f"--moe-ckpt-plt-threshold {config.plt_threshold} is a share of all tokens, from 0 to 1; 0.0375 is"
                " 3.75 %"
            )

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        config = job.config
        self._scope = PEC_SCOPES[config.pec_scope]
        self._groups = Groups.of(job, config.pec_k_snapshot)
        self._threshold = config.plt_threshold
        allowed = not_negative("--moe-ckpt-plt-threshold", 1 if self._threshold is None else self._threshold)
        self._limit = PltLimit(job.tokens_per_iteration * job.iterations, job.topk, allowed)
        kept = max(2, config.persist_keep)
        self._state = PecState(job.moe_layers, job.num_experts, config.pec_k_snapshot, kept)

    def plan(self, iteration: int) -> SnapshotPlan | None:
        due, self._interval_policy = self._interval_policy.due(iteration)
        if not due or self._gave_up:
            return None
        writing = self._interval_policy.persist_due(iteration)[0] and all(
            one.persist is None for one in self._state.flights
        )
        lacking = self._lacks_experts(Level.SNAPSHOT) or (writing and self._lacks_experts(Level.PERSIST))
        k = self._groups.num_experts if lacking or self._keeps_all else self._chosen_k(iteration, writing)
        experts, cursor = self._selected(k, writing)
        persist = self._persisted(k, experts) if writing else None
        self._state = self._state.planned(Flight(iteration, experts, persist), k, cursor)
        return pec_plan(iteration, self._job.operators, experts, self._scope)

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """`dense`, and one for each group of which the plan has experts."""
        return self._groups.pieces(plan)

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """What goes on was chosen when the snapshot was planned."""
        ready = self._state.ready
        due, interval_policy = self._interval_policy.persist_due(plan.iteration)
        if ready is None or ready.persist is None or ready.iteration != plan.iteration or not due:
            return ()
        self._interval_policy, self._state = interval_policy, self._state.handed_on()
        return (pec_plan(plan.iteration, self._job.operators, ready.persist, self._scope),)

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        """Of each kind of piece as many as `full` needs of its snapshots."""
        return NO_BUFFERS if self._gave_up else self._buffer_specs

    @cached_property
    def _buffer_specs(self) -> tuple[BufferSpec, ...]:
        rest = () if self._keeps_all else self._groups.experts
        others = [operator for operator in self._job.operators if not operator.is_expert]
        dense = pec_plan(0, sorted([*others, *rest]), (), self._scope)
        groups = (full_plan(0, sorted(members)) for members in self._groups.members)
        return (
            BufferSpec(dense, own=3, replica=2, trainer=True),
            *(BufferSpec(members, own=3, replica=2, trainer=False) for members in groups),
        )

    def counted(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        self._state = self._state.counted(iteration, counts)

    def settled(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        self._state = self._state.settled(plan.iteration, level, ok)

    def to_data(self) -> dict[str, Any]:
        return {**super().to_data(), **self._state.to_data()}

    def recover(self, inventory: Inventory, lost: Lost, topology: Topology) -> RecoveryPlan:
        """The tokens are counted by `resumed`, for the counts are stored with the target."""
        return plan_lossy_recovery(inventory, lost, topology, lambda operator, after, upto: 0)

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """Lost are the tokens counted after the copy of each expert, up to the target."""
        plan = super().resumed(plan, data, fault_iteration)
        self._state, lost_tokens = self._state.resumed(data, plan, fault_iteration)
        return replace(plan, lost_tokens=lost_tokens)

    @property
    def plt(self) -> float:
        return float(self.report().plt)

    def report(self) -> PecReport:
        """What faults have cost so far, for tables and metrics."""
        layers, ledger = self._job.moe_layers, self._state.ledger
        lost = ledger.lost_tokens if ledger else (0,) * len(layers)
        return PecReport(layers, lost, self._limit.plt(lost), self._state.k)

    @property
    def _keeps_all(self) -> bool:
        """Whether the scope leaves out nothing that snapshots store."""
        return not Part.MASTER_AND_MOMENTS & self._scope.partial

    def _lacks_experts(self, level: Level) -> bool:
        """Whether some experts have no copy at this level, and none of all experts is under way."""
        under_way = (experts for _, experts in self._state.under_way(level))
        return level not in self._state.complete and self._groups.experts not in under_way

    def _selected(self, k: int, writing: bool) -> tuple[Experts, int]:
        """Experts of a snapshot with K per layer, and the group that is next in turn after it."""
        groups, state = self._groups, self._state
        if k == groups.num_experts:
            return groups.experts, state.cursor
        last, count, cursor = state.last(Level.SNAPSHOT), groups.needed(k), state.cursor
        if self._job.config.pec_selection == "load-aware":
            experts = by_load(groups, state, last, k)
        else:
            chosen = in_turn(groups, last, cursor, count)
            experts, cursor = groups.union(chosen), (chosen[-1] + 1) % groups.count
        if writing:
            k_persist = self._k_persist(k)
            patience = -(-groups.num_experts // k) * -(-k // k_persist)
            experts |= groups.union(overdue(groups, self._storage_ages(), patience, count))
        return experts, cursor

    def _persisted(self, k: int, experts: Experts) -> Experts:
        """Which of the experts of a snapshot go on to storage."""
        if self._lacks_experts(Level.PERSIST):
            return experts
        job = self._job
        return to_persist(job.moe_layers, job.num_experts, experts, self._k_persist(k), self._storage_ages())

    def _k_persist(self, k: int) -> int:
        config, num_experts = self._job.config, self._groups.num_experts
        if config.pec_k_persist is None or (k == num_experts and self._threshold is not None):
            return k
        return min(k, config.pec_k_persist * k // config.pec_k_snapshot)

    def _storage_ages(self) -> dict[OperatorId, int]:
        """Writes since each expert was last among what was persisted, or is being persisted."""
        written = self._state.written
        return {operator: age(written, last) for operator, last in self._state.last(Level.PERSIST).items()}

    def _chosen_k(self, iteration: int, writing: bool) -> int:
        """The smallest K with which a fault after this snapshot keeps the PLT below the threshold."""
        floor, num_experts = self._job.config.pec_k_snapshot, self._groups.num_experts
        if self._threshold is None:
            return floor
        for k in k_ladder(floor, num_experts):
            experts, _ = self._selected(k, writing)
            if self._holds(k, experts, Level.SNAPSHOT, iteration) and (
                not writing or self._holds(k, self._persisted(k, experts), Level.PERSIST, iteration)
            ):
                break
        return k

    def _holds(self, k: int, experts: Experts, level: Level, iteration: int) -> bool:
        """Whether saving these experts at this level is enough. A layer may have fewer than K of them."""
        assert self._state.ledger is not None
        topk, left_out = self._job.topk, self._groups.num_experts - k
        scale = -(-topk // min(topk, left_out)) if left_out else 1
        choice = choose_k(
            self._state.ledger,
            lambda at: experts if at == k else (),
            self._limit,
            k,
            level=level,
            iterations_ahead=iteration - self._state.ledger.iteration,
            tokens_per_iteration=scale * self._job.tokens_per_iteration,
        )
        return choice.k == k and choice.holds
