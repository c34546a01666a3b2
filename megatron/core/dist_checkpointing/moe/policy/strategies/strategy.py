"""What every strategy answers: what is snapshotted after an iteration, and how training comes back from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ...config import MoECheckpointConfig
from ...types import Inventory, Lost, OperatorId, OperatorSize, RecoveryPlan, SnapshotPlan, Topology
from ..copies import Level

GATE_UNIT = 2.0**-16
"""The unit in which gating probabilities are summed: whole numbers give the same sum in any order."""


@dataclass(frozen=True)
class Job:
    """What strategies know of the job; the same on all ranks.

    operators: all of the model, ascending. tokens_per_iteration: input tokens of one iteration of the whole job.
    iterations: of the whole training. topk: experts per token. tied_embeddings: first and last stage share them.
    sizes: bytes of what each rank owns of each of its operators; empty where nobody has told.
    """

    config: MoECheckpointConfig
    operators: tuple[OperatorId, ...] = field(repr=False)
    topology: Topology
    tokens_per_iteration: int
    iterations: int
    topk: int = 1
    tied_embeddings: bool = False
    sizes: Mapping[int, Mapping[OperatorId, OperatorSize]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending."""
        return tuple(sorted({operator.layer for operator in self.operators if operator.is_expert}))

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of each MoE layer; 0 for a dense model."""
        return 1 + max((operator.expert for operator in self.operators), default=-1)


@dataclass(frozen=True)
class Piece:
    """A part of a snapshot that is stored, sealed, replicated and freed on its own, under `kind` (see SnapshotId).

    span: the iterations whose pieces of this kind together restore a state, its own among them; by itself if empty.
    """

    kind: str
    plan: SnapshotPlan
    span: range = range(0)

    def __post_init__(self) -> None:
        if not self.span:
            object.__setattr__(self, "span", range(self.plan.iteration, self.plan.iteration + 1))


@dataclass(frozen=True)
class Room:
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


@dataclass(frozen=True)
class Costs:
    """What checkpoints cost lately, as measured by the slowest rank.

    iteration_s: an iteration without what it waited for checkpoints. stall_s: that waiting, per checkpoint.
    round_s: from the end of the copy until all replicas were acknowledged.
    """

    iteration_s: float
    stall_s: float
    round_s: float


@dataclass(frozen=True)
class Pace:
    """What an iteration has time for, as all ranks agree on it.

    iteration_s: from the end of one step to the next optimizer step, the time that a copy has. bandwidth_bytes_per_s:
    of the last copy, on the rank where it was slowest.
    """

    iteration_s: float
    bandwidth_bytes_per_s: float


class Strategy(Protocol):
    """Decides alike on all ranks: they make the same calls with the same values in the same order.

    Sequence of one iteration t: `counted(t)` (only with `counts_tokens`), then `settled` for what the ranks agreed on
    meanwhile, then `plan(t + 1)`. A plan that cannot be carried out on some rank is settled as failed on all.
    """

    counts_tokens: bool
    """Whether `counted` is wanted: routed tokens per expert, summed over all ranks."""

    counts_gates: bool
    """Whether gating probabilities are wanted in `counted` in place of tokens, in units of `GATE_UNIT`."""

    needs_pace: bool
    """Whether `paced` is wanted."""

    replays: bool
    """Whether a recovery may have to run iterations again with some operators frozen."""

    @property
    def lookback(self) -> int:
        """How many iterations before the newest one a replay may begin, at most; 0 where none is ever needed."""

    def due(self, iteration: int) -> bool:
        """Whether `plan` would give a snapshot; asked where none may begin."""

    def plan(self, iteration: int) -> SnapshotPlan | None:
        """What to snapshot of the state after `iteration`; None for nothing. Called once per iteration, ascending."""

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """The plan cut into what is freed together; the first piece has the trainer state. No kind occurs twice."""

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """What goes on to persistent storage now that this snapshot has settled, oldest first; empty if it is not due.

        Each one is a part of a snapshot that is still kept; together they restore the state of the last one.
        """

    def rooms(self) -> tuple[Room, ...]:
        """The memory that snapshots need, for as long as they are kept; the same object until that changes.

        It changes only in `plan` and `resumed`, and applies to the snapshots that are planned from then on.
        """

    def no_room(self) -> None:
        """Memory cannot hold what `rooms` asks for now: from the next `plan` on, what it held before has to do."""

    def counted(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """Tokens routed in `iteration`, per MoE layer and expert."""

    def settled(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        """All ranks have sealed (SNAPSHOT) or persisted (PERSIST) what they own of `plan`; not `ok`: some have not."""

    def measured(self, costs: Costs) -> None:
        """What the last checkpoint cost."""

    def paced(self, pace: Pace) -> None:
        """How an iteration went; once per iteration that all ranks have told of."""

    @property
    def plt(self) -> float | None:
        """Proportion of lost tokens (MoC eq. 7) that all faults so far have cost; None where nothing can be lost."""

    def to_data(self) -> dict[str, Any]:
        """What it has to remember, as JSON values; stored with each snapshot."""

    def recover(self, inventory: Inventory, lost: Lost, topology: Topology) -> RecoveryPlan:
        """How to come back. Raises RecoveryImpossible."""

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """Go on from `plan.target` with what was remembered there; returns the plan with the tokens that it loses.

        `fault_iteration` is the newest iteration that is known to have ended before the fault.
        """
