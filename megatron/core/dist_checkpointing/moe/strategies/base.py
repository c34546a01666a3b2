"""What every strategy answers: what is snapshotted after an iteration, and how training comes back from it.

A strategy is a folder beside this file and one line of the registry in `__init__.py`. It decides and does nothing: the
coordinator of a job (`snapshot/coordinator.py`), `moe-ckpt plan` and the simulator drive the same object through the
same methods, so what is predicted is what runs:

    strategy = STRATEGIES[name](job)
    for each iteration t:
        strategy.counted(t, tokens of each expert)        only if it `counts_tokens`
        strategy.measured(costs)                          what checkpoints cost
        strategy.throughput_measured(throughput)          how fast copies are; only if it `needs_throughput`
        strategy.settled(plan, level, ok)                 what all ranks have sealed or persisted meanwhile
        strategy.plan(t) -> SnapshotPlan | None           what to snapshot; `pieces` cuts it into what is freed together
        strategy.persistent(plan) -> plans                what goes to storage, once a snapshot has settled
    after a fault:
        plan = strategy.recover(inventory, lost, topology)
        strategy.resumed(plan, data, fault_iteration)     data: what `to_data` gave when the target was snapshotted
        strategy.on_stored(plans)                         what storage has of that past, once all have restored it

`Strategy` has the answers of one that snapshots by itself, all in one piece, at the interval of the flags, and that
counts and measures nothing else. A subclass has to give `plan` and `buffer_specs`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from ..config import MoECheckpointConfig
from ..errors import UsageError
from ..policy.availability import Everywhere, OperatorOrder
from ..policy.placement import replica_count
from ..policy.recovery import plan_recovery
from ..policy.tracking import PLACES
from ..types import Inventory, Level, Lost, OperatorId, OperatorSize, Piece, RecoveryPlan, SnapshotPlan, Topology
from .interval_policy import ConstantState, Costs, IntervalPolicy, constant_plan, cut

GATE_UNIT = 2.0**-16
"""The unit in which gating probabilities are summed: whole numbers give the same sum in any order."""


@dataclass(frozen=True)
class Job:
    """What strategies know of the job; the same on all ranks.

    operators: all of the model, ascending. tokens_per_iteration: input tokens of one iteration of the whole job.
    iterations: of the whole training. topk: experts per token. tied_embeddings: first and last stage share them.
    sizes: bytes of what ranks own of each of their operators: of this one, and where the strategy `plans_by_sizes` of
    all, for those with the same of the lowest; empty where they are not known.
    drops_tokens: whether routers drop tokens beyond a capacity that can differ from expert to expert. unchanging:
    operators that training leaves as they are (`--freeze-experts`).
    """

    config: MoECheckpointConfig
    operators: tuple[OperatorId, ...] = field(repr=False)
    topology: Topology
    tokens_per_iteration: int
    iterations: int
    topk: int = 1
    tied_embeddings: bool = False
    sizes: Mapping[int, Mapping[OperatorId, OperatorSize]] = field(default_factory=dict, repr=False, compare=False)
    drops_tokens: bool = False
    unchanging: frozenset[OperatorId] = field(default=frozenset(), repr=False)

    @cached_property
    def changing(self) -> tuple[OperatorId, ...]:
        """The operators that training changes, ascending."""
        return tuple(operator for operator in self.operators if operator not in self.unchanging)

    @cached_property
    def changing_set(self) -> frozenset[OperatorId]:
        """The same, unordered: one object, which is compared with itself at once."""
        return frozenset(self.changing)

    @cached_property
    def changing_sizes(self) -> Mapping[int, Mapping[OperatorId, OperatorSize]]:
        """`sizes` of these."""
        if not self.unchanging:
            return self.sizes
        return {
            rank: {operator: size for operator, size in own.items() if operator not in self.unchanging}
            for rank, own in self.sizes.items()
        }

    @cached_property
    def order(self) -> OperatorOrder:
        """The numbers of all operators."""
        return OperatorOrder(self.operators)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted({operator.layer for operator in self.operators if operator.is_expert}))

    @cached_property
    def replicas(self) -> int:
        """How many peers keep each rank's snapshots."""
        return replica_count(self.config.replicas, self.topology)

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of each MoE layer; 0 for a dense model."""
        return 1 + max((operator.expert for operator in self.operators), default=-1)


@dataclass(frozen=True)
class BufferSpec:
    """Memory that a strategy needs: segments that each hold a piece as large as `largest`.

    own: segments for the rank's own snapshots. replica: segments for each owner whose replicas the rank keeps.
    trainer: whether these pieces have the trainer's random states, as the first piece of each snapshot does.
    also: further pieces that a segment has to hold, where no single one is the largest on all ranks.
    """

    largest: SnapshotPlan
    own: int
    replica: int
    trainer: bool
    also: tuple[SnapshotPlan, ...] = ()


NO_BUFFERS = (BufferSpec(SnapshotPlan(0, {}), own=1, replica=0, trainer=True),)
"""What a strategy asks for that takes no snapshots: it does not know its window yet, or has no memory for any."""


def constant_buffers(job: Job) -> tuple[BufferSpec, ...]:
    """Memory for what never changes: as for other pieces, since a copy that failed is made again beside them."""
    if not job.unchanging:
        return ()
    return (BufferSpec(constant_plan(job.unchanging), own=3, replica=2, trainer=False),)


@dataclass(frozen=True)
class Throughput:
    """What an iteration has time for, as all ranks agree on it.

    iteration_s: from the end of one step to the next optimizer step, the time that a copy has; 0 as long as some rank
    does not know it. bandwidth_bytes_per_s: of the last copy, on the rank where it was slowest. peer_bytes_per_s: of
    the last exchange of replicas, all that a rank sent to its peers, where that was slowest; infinite while nothing was
    sent.
    """

    iteration_s: float
    bandwidth_bytes_per_s: float
    peer_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class LossReport:
    """What faults have cost so far: tokens per MoE layer, and their share of the tokens of the planned training.

    plt: MoC eq. 7, the mean over layers. plt_pec: PEC eq. 4, of all layers together. mlt: MOETION eq. 6, the sum over
    layers. at_risk: tokens per MoE layer that a fault would cost now, if it left the memory of nodes. owed: lost tokens
    that are still to be made up for beyond capacities.
    """

    layers: tuple[int, ...]
    lost_tokens: tuple[int, ...] = field(repr=False)
    at_risk: tuple[int, ...] = field(repr=False)
    plt: Fraction
    plt_pec: Fraction
    mlt: Fraction
    owed: int = 0


class Strategy(ABC):
    """Decides alike on all ranks: they make the same calls with the same values in the same order.

    Sequence of one iteration t: `on_token_counts(t)` (only with `counts_tokens`), `on_commit` for each snapshot that
    all ranks have agreed on since, then `plan(t + 1)`. A plan that fails on one rank is committed as failed on all.
    """

    counts_tokens: bool = False
    """Whether `on_token_counts` is wanted: routed tokens per expert, summed over all ranks."""

    counts_gates: bool = False
    """Whether gating probabilities are wanted in `on_token_counts` in place of tokens, in units of `GATE_UNIT`."""

    needs_throughput: bool = False
    """Whether `throughput_measured` is wanted."""

    makes_up: bool = False
    """Whether `deferred_tokens` may have experts, so that `on_deferred_tokens` is wanted while it has."""

    replays: bool = False
    """Whether a recovery may have to run iterations again with some operators frozen."""

    places: int = PLACES
    """Of how many snapshots memory holds pieces of one kind: the `own` segments of each."""

    plans_by_sizes: ClassVar[bool] = False
    """Whether `Job.sizes` has those of all ranks, some megabytes of 16,384: plans follow from them."""

    selects: ClassVar[bool] = False
    """Whether a snapshot may hold the state of some experts and not that of others."""

    follows_steps: ClassVar[bool] = False
    """Whether peers can make a snapshot from the one before: what both hold of an operator is its whole state."""

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        """A sentence for each setting that makes no sense with this strategy, with its value and what to change.

        Args:
            config: The settings of the job.
            num_experts: Routed experts of each MoE layer; 0 for a dense model.
        """
        return iter(())

    order_changes: int = 0
    """How often this object changed the order in which operators are snapshotted."""

    def __init__(self, job: Job, interval_policy: IntervalPolicy | None = None) -> None:
        """Decide for `job`, snapshotting at `interval_policy`; by default at that of its flags. Raises UsageError."""
        for problem in self.contradictions(job.config, job.num_experts):
            raise UsageError(problem)
        self._job = job
        self._interval_policy = IntervalPolicy.of(job.config) if interval_policy is None else interval_policy
        self._gave_up = False
        self._constants = ConstantState(job.unchanging)

    @property
    def lookback(self) -> int:
        """How many iterations before the newest one a replay may begin, at most; 0 where none is ever needed."""
        return 0

    @property
    def keeps_logs(self) -> bool:
        """Whether boundary logs are kept where a recovery can be local."""
        return True

    @property
    def logged(self) -> int:
        """Of how many iterations: at most `lookback`."""
        return self.lookback if self.keeps_logs else 0

    def report(self) -> LossReport | None:
        """What all faults so far have cost, for tables and metrics; None where nothing can be lost."""
        return None

    @property
    def deferred_tokens(self) -> Mapping[OperatorId, int]:
        """Lost tokens that experts still have to make up for, beyond their capacity (MOETION 6)."""
        return {}

    @property
    def gave_up(self) -> bool:
        """Whether memory has no room for any snapshot, so that none is taken."""
        return self._gave_up

    def due(self, iteration: int) -> bool:
        """Whether `plan` would give a snapshot, where one may begin."""
        return not self._gave_up and self._interval_policy.due(iteration)[0]

    @abstractmethod
    def plan(self, iteration: int) -> SnapshotPlan | None:
        """What to snapshot of the state after `iteration`; None for nothing. Called once per iteration, ascending."""

    def ahead(self) -> Callable[[], None] | None:
        """What the next `plan` needs and takes long, for another thread; asked after each `plan`. None: nothing.

        Whether it has ended by then changes no plan: `plan` computes itself whatever is missing.
        """
        return None

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """The plan cut into what is freed together; the first piece has the trainer state. No kind occurs twice."""
        return cut(Piece("snapshot", plan))

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """What goes to persistent storage now that this snapshot has settled, oldest first; empty if it is not
        due.

        Each one is a part of a snapshot that is still kept; together they restore the state of the last one.
        """
        due, self._interval_policy = self._interval_policy.persist_due(plan.iteration)
        return self._handed_on((plan,)) if due else ()

    def _with_constants(self, plan: SnapshotPlan, *, last_iteration: int) -> SnapshotPlan:
        """The plan with what never changes, if memory lacks a copy, or storage does where the state after
        `last_iteration`, of which this snapshot is a part, is going to be persisted."""
        writing = self._interval_policy.persist_due(last_iteration)[0]
        self._constants = self._constants.planned(plan, writing=writing)
        return self._constants.added_to(plan)

    def _handed_on(self, plans: tuple[SnapshotPlan, ...]) -> tuple[SnapshotPlan, ...]:
        plans = tuple(map(self._constants.added_to, plans))
        self._constants = self._constants.handed_on(plans)
        return plans

    @abstractmethod
    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        """The memory that snapshots need, for as long as they are kept; the same object until that changes.

        It changes only in `plan` and `resumed`, and applies to the snapshots that are planned from then on.
        """

    def buffers_refused(self) -> str:
        """Memory cannot hold what `buffer_specs` and `logged` ask for: ask for less from here on.

        Returns what was given up, in words; empty where nothing is left to give up, since nothing is snapshotted any
        more. `plan` may be called again for the iteration that it was called for last.
        """
        if self._gave_up:
            return ""
        self._gave_up = True
        return "no snapshots are taken: training is not protected"

    def on_token_counts(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """Tokens were routed in an iteration.

        Args:
            iteration: The iteration that was trained.
            counts: Tokens by MoE layer and expert, summed over all ranks; gating probabilities with `counts_gates`.
                With `selects` none of a step that was skipped, in which experts learned nothing.
        """
        return

    def on_deferred_tokens(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """Tokens were processed beyond the capacity in an iteration with a step; called after `on_token_counts`.

        Args:
            iteration: The iteration that was trained.
            counts: Tokens by MoE layer and expert, summed over all ranks.
        """
        return

    def lost_before(self, iteration: int, lost_tokens: Sequence[int]) -> None:
        """Training begins from a dense checkpoint, up to which faults have cost tokens.

        Args:
            iteration: That of the checkpoint.
            lost_tokens: By MoE layer.
        """
        return

    def on_commit(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        """What was under way at a level has ended.

        Args:
            plan: The snapshot.
            level: SNAPSHOT: sealed; PERSIST: persisted; REPLICAS, after SNAPSHOT: acknowledged by the peers that were
                sent it.
            ok: Whether that holds for all ranks, each with what it owns of `plan`.
        """
        self._constants = self._constants.on_commit(plan, level, ok)

    def on_costs(self, costs: Costs) -> None:
        """What the last checkpoint cost."""
        self._interval_policy = self._interval_policy.on_costs(costs)

    def take_choice(self) -> str:
        """The interval that `--moe-ckpt-interval auto` has just chosen and why, as a log line; empty without news."""
        choice, self._interval_policy = self._interval_policy.taken()
        return choice

    def throughput_measured(self, throughput: Throughput) -> None:
        """How an iteration went; once per iteration that all ranks have reported."""
        return

    def take_notes(self) -> tuple[str, ...]:
        """What people should know of what was measured, a sentence each, since the last call."""
        return ()

    def to_data(self) -> dict[str, Any]:
        """What it has to remember, as JSON values; stored with each snapshot."""
        # The name that stored snapshots have for it.
        return {"rhythm": self._interval_policy.to_data(), **self._constants.to_data()}

    def remembered(self) -> Callable[[], dict[str, Any]]:
        """`to_data` of this moment, for another thread to call later."""
        data = self.to_data()
        return lambda: data

    def recover(
        self, inventory: Inventory, lost: Lost, topology: Topology, everywhere: Everywhere | None = None
    ) -> RecoveryPlan:
        """How to come back.

        Args:
            inventory: All that was found after the failure; of some ranks, with `everywhere`.
            lost: Ranks and nodes that failed.
            topology: The rank layout.
            everywhere: Makes of what these ranks can rebuild what all can.

        Raises:
            RecoveryImpossible: No intact copies lead to a state.
        """
        return plan_recovery(
            inventory,
            lost,
            topology,
            tied_embeddings=self._job.tied_embeddings,
            order=self._job.order,
            everywhere=everywhere,
        )

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """Continue from `plan.target` with what was remembered there.

        Args:
            plan: The recovery that was carried out.
            data: What `to_data` gave at its target.
            fault_iteration: The newest iteration that is known to have ended before the fault.

        Returns:
            The plan with the tokens that it loses.
        """
        self._interval_policy = self._interval_policy.from_data(data["rhythm"])
        self._constants = self._constants.resumed(data, plan)
        return plan

    def on_stored(self, plans: Sequence[SnapshotPlan]) -> None:
        """What a recovery found in the storage of this job, of all ranks, oldest first; called after `resumed`.

        It may be less than was stored once: `--moe-ckpt-persist-dir` can name another folder, or was emptied.
        """
        self._constants = self._constants.on_stored(plans)
