"""`pec`: all but experts, and K experts per MoE layer in turn (MoC, PEC); lossy, and every lost token is counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from ...config import MoECheckpointConfig
from ...policy.partial import PEC_SCOPES, by_load, in_turn, next_position, pec_plan
from ...strategies.base import NO_BUFFERS, BufferSpec, Job, Throughput
from ...types import Level, OperatorId, RecoveryPlan, SnapshotPlan, full_plan
from .dynamic_k import choose_k, k_ladder
from .pec_selection import age, k_within, overdue, to_persist
from .pieces import moe_layers_of_stages
from .state import Experts, Flight
from .strategy import Lossy


class Pec(Lossy):
    """Snapshots the full state of all operators that are no experts, and of K experts per MoE layer.

    Scope. Of the experts that are not selected a snapshot has the moments (`weights`, W of MoC 6.3), the weights
    (`optimizer`, O) or nothing (`both`, WO). Recovery takes the newest of each, and what was routed to an expert since
    the older of the two counts as lost.

    Selection. `sequential` takes experts in turn (MoC 3.2), `load-aware` those with the most tokens since they were
    last saved, within a capacity of each expert-parallel rank (PEC Alg. 1).

    Buffers. Each kind of piece needs what snapshots of `full` need: own 3, replica 2. That is enough whatever is
    selected, fails, or K grows to, while at most two snapshots at a time are copied, replicated, persisted or not
    agreed on: one settled piece of each kind stays.

    Everything. Until peers have taken a snapshot of all experts, and after a recovery that needed storage, the next one
    takes all of them, each where peers never do; likewise until storage has all experts the next one that is to be
    persisted does.

    Storage. A snapshot that will be persisted also takes up to K experts per layer that are overdue in storage: not
    persisted in A = ceil(N / K) x ceil(K / K_persist) writes. That is only needed where the writes keep meeting the
    same experts; all are then persisted in any 2 x A writes. K_persist grows with K, and is N for N.

    Adaptive configuration (MoC 5.3). With --moe-ckpt-pec-adaptive K_snapshot is the largest with which copies end
    within the passes of an iteration, on the rank that has most to copy, but at least --moe-ckpt-pec-k-snapshot;
    K_persist is that of its flag, by default 1, so that storage takes snapshots as often as it can.

    Dynamic-K. With --moe-ckpt-plt-threshold K is the smallest of K0, 2 K0, ..., N with which neither a fault that
    leaves memory (replicas included), nor, where the snapshot will be persisted, one that leaves only storage, can
    bring the PLT above the threshold. Only settled copies count as saved, and tokens of iterations that are not counted
    yet as if all went to experts that are left out. Excepted is a recovery to a snapshot of which some pieces are gone.
    """

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        """As `Strategy.contradictions`."""
        if not num_experts:
            yield "--moe-ckpt-strategy pec needs --num-experts; a dense model is protected with full or sparse"
        elif config.pec_k_snapshot > num_experts:
            yield f"--moe-ckpt-pec-k-snapshot {config.pec_k_snapshot} is above --num-experts {num_experts}"
        if (config.pec_k_persist or 0) > config.pec_k_snapshot:
            yield (
                f"--moe-ckpt-pec-k-persist {config.pec_k_persist} is above --moe-ckpt-pec-k-snapshot "
                f"{config.pec_k_snapshot}: only experts that are in a snapshot can become persistent"
            )
        if config.pec_adaptive and config.pec_scope != "both":
            yield (
                f"--moe-ckpt-pec-adaptive chooses how many experts a snapshot has, but --moe-ckpt-pec-scope"
                f" {config.pec_scope} takes a part of all of them; leave one of the two out"
            )
        if (config.plt_threshold or 0) > 1:
            yield (
                f"--moe-ckpt-plt-threshold {config.plt_threshold} is a share of all tokens, from 0 to 1; 0.0375 is"
                " 3.75 %"
            )

    def __init__(self, job: Job) -> None:
        config = job.config
        super().__init__(job, threshold=config.plt_threshold)
        self._scope = PEC_SCOPES[config.pec_scope]
        self._threshold = config.plt_threshold
        self._stages = tuple(map(tuple, moe_layers_of_stages(job)))
        self._cursor, self._k = 0, config.pec_k_snapshot
        self.needs_throughput = config.pec_adaptive
        self._budget_bytes = 0

    @property
    def k(self) -> int:
        """Experts per MoE layer in the last snapshot."""
        return self._k

    def plan(self, iteration: int) -> SnapshotPlan | None:
        due, self._interval_policy = self._interval_policy.due(iteration)
        if not due or self._gave_up:
            return None
        writing = self._interval_policy.persist_due(iteration)[0] and not self.is_writing
        state = self._state
        lacking = state.lacks_experts(Level.SNAPSHOT) or (writing and state.lacks_experts(Level.PERSIST))
        k = self._job.num_experts if lacking else self._chosen_k(iteration, writing)
        experts, self._cursor = self._selected(k, writing)
        self._k = k
        persist = self._persisted(k, experts) if writing else None
        self._state = state.planned(Flight(iteration, experts, persist))
        return self._plan_of(iteration, experts)

    def _plan_of(self, iteration: int, experts: Collection[OperatorId]) -> SnapshotPlan:
        return pec_plan(iteration, self._job.operators, experts, self._scope)

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        """Of each kind of piece as many as `full` needs of its snapshots."""
        return NO_BUFFERS if self._gave_up else self._buffer_specs

    @cached_property
    def _buffer_specs(self) -> tuple[BufferSpec, ...]:
        dense = pec_plan(0, self._job.operators, (), self._scope)
        return (
            BufferSpec(dense, own=3, replica=2, trainer=True),
            *(BufferSpec(full_plan(0, [one]), own=3, replica=2, trainer=False) for one in sorted(self._experts)),
        )

    def to_data(self) -> dict[str, Any]:
        return {**super().to_data(), "cursor": self._cursor, "k": self._k}

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """As `Strategy.resumed`."""
        plan = super().resumed(plan, data, fault_iteration)
        self._cursor, self._k = data["cursor"] % self._job.num_experts, data["k"]
        return plan

    def throughput_measured(self, throughput: Throughput) -> None:
        if throughput.iteration_s > 0:
            self._budget_bytes = int(throughput.bandwidth_bytes_per_s * throughput.iteration_s)

    @property
    def _floor(self) -> int:
        """K_snapshot before faults raise it: of the flag, or as many as there is time to copy."""
        config = self._job.config
        if not config.pec_adaptive:
            return config.pec_k_snapshot
        return max(config.pec_k_snapshot, k_within(self._job, self._budget_bytes))

    def _selected(self, k: int, writing: bool) -> tuple[Experts, int]:
        """Experts of a snapshot with K per layer, and the position that is next in turn after it."""
        job, state, count = self._job, self._state, self._job.num_experts
        if k == count:
            return self._experts, self._cursor
        last, cursor, ep = state.last(Level.SNAPSHOT), self._cursor, job.topology.ep
        if job.config.pec_selection == "load-aware":
            ages = {operator: age(state.taken, iteration) for operator, iteration in last.items()}
            experts = by_load(self._stages, count, k, state.unsaved(Level.SNAPSHOT), ages, ep)
        else:
            experts, cursor = in_turn(self._stages, count, k, last, cursor, ep), next_position(cursor, k, count)
        if writing:
            patience = -(-count // k) * -(-k // self._k_persist(k))
            experts |= overdue(self._stages, count, self._storage_ages(), patience, k)
        return experts, cursor

    def _persisted(self, k: int, experts: Experts) -> Experts:
        """Which of the experts of a snapshot go to storage."""
        if self._state.lacks_experts(Level.PERSIST):
            return experts
        job = self._job
        return to_persist(job.moe_layers, job.num_experts, experts, self._k_persist(k), self._storage_ages())

    def _k_persist(self, k: int) -> int:
        config, num_experts = self._job.config, self._job.num_experts
        if config.pec_adaptive and (k < num_experts or self._threshold is None):
            return min(k, config.pec_k_persist or 1)
        if config.pec_k_persist is None or (k == num_experts and self._threshold is not None):
            return k
        return min(k, config.pec_k_persist * k // config.pec_k_snapshot)

    def _storage_ages(self) -> dict[OperatorId, int]:
        """Writes since each expert was last among what was persisted, or is being persisted."""
        written = self._state.written
        return {operator: age(written, last) for operator, last in self._state.last(Level.PERSIST).items()}

    def _chosen_k(self, iteration: int, writing: bool) -> int:
        """The smallest K with which a fault after this snapshot keeps the PLT below the threshold."""
        floor, num_experts = self._floor, self._job.num_experts
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
        topk, left_out = self._job.topk, self._job.num_experts - k
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
