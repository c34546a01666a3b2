"""What a strategy carries on: when a snapshot is due and goes to storage, and where copies of constant state are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any

from ..config import MoECheckpointConfig
from ..policy.interval import checkfreq_interval, daly, in_iterations, young
from ..types import CONSTANT, Level, OperatorId, Part, Piece, RecoveryPlan, SnapshotPlan, Tier, full_plan

AUTO = "auto"
MOST_OVERHEAD = 0.01
"""The share of training that `auto` lets snapshots cost, in waiting and in slower passes."""
MEASURED = 5
"""Snapshots from whose median costs `auto` chooses: one slow iteration decides nothing."""
FIRST = 2
"""The interval of `auto` until it has measured: passes without a copy are needed to tell what a copy costs them."""


@dataclass(frozen=True)
class Costs:
    """What checkpoints cost lately, as measured by the slowest rank.

    iteration_s: an iteration without what it waited for checkpoints. stall_s: that waiting, per checkpoint.
    round_s: from the end of the copy until all replicas were acknowledged. persist_s: of the last write to storage; 0
    before the first. slowed_s: by how much a copy made the passes beside it longer; 0 where that is not known.
    """

    iteration_s: float
    stall_s: float
    round_s: float
    persist_s: float = 0.0
    slowed_s: float = 0.0


@dataclass(frozen=True)
class IntervalPolicy:
    """Snapshots every `interval` iterations, persistent ones every `persist_interval` (None: never).

    `adapting` names the rule that changes the interval with each measurement; `mtbf_s` is for Young's and Daly's. By
    `auto` it follows the median of some measurements, and shrinks only where half of it would do. With
    `persist_adapts` the persistent interval is the smallest in which a write ends before the next begins. A snapshot
    that could not be taken when it was due is taken as soon as it can be.
    """

    interval: int
    persist_interval: int | None = None
    adapting: str = "fixed"
    mtbf_s: float = 0.0
    last: int = 0
    last_persistent: int = 0
    persist_adapts: bool = False
    measured: tuple[Costs, ...] = ()
    choice: str = ""
    choice_made: bool = False

    @classmethod
    def of(cls, config: MoECheckpointConfig) -> IntervalPolicy:
        """The interval_policy that the flags ask for; an adapting one begins with `--moe-ckpt-interval`."""
        persist = config.persist_interval if config.persist_dir else None
        adapts = config.interval_policy == "checkfreq" or config.pec_adaptive
        if config.interval == "auto":
            return cls(FIRST, persist, AUTO, persist_adapts=adapts)
        return cls(config.interval, persist, config.interval_policy, config.mtbf_s or 0.0, persist_adapts=adapts)

    def due(self, iteration: int) -> tuple[bool, IntervalPolicy]:
        """Whether a snapshot is due after `iteration`, and the interval_policy once it is taken."""
        if self.adapting == "fixed":
            due = iteration // self.interval > self.last // self.interval
        else:
            due = iteration >= self.last + self.interval
        return due, replace(self, last=iteration) if due else self

    def persist_due(self, iteration: int) -> tuple[bool, IntervalPolicy]:
        """Whether the snapshot of `iteration` goes to persistent storage, and the interval_policy after that."""
        every = self.persist_interval
        if every is None:
            return False, self
        if self.persist_adapts:
            due = iteration >= self.last_persistent + every
        else:
            due = iteration // every > self.last_persistent // every
        return due, replace(self, last_persistent=iteration) if due else self

    def on_costs(self, costs: Costs) -> IntervalPolicy:
        """The interval_policy with the interval that these costs call for (CheckFreq's 3 %, Young 1974, Daly 2006).

        What a checkpoint costs is its stall; the next one begins at the earliest when its round has ended, and is
        persisted at the earliest when the write before has (CheckFreq; the lower bound of I_ckpt in MoC 5.3).
        """
        if costs.iteration_s <= 0:
            return self
        if self.persist_adapts and self.persist_interval is not None and costs.persist_s > 0:
            lower_bound = checkfreq_interval(costs.iteration_s, 0.0, costs.persist_s)
            return replace(self, persist_interval=lower_bound)._snapshots_measured(costs)
        return self._snapshots_measured(costs)

    def _snapshots_measured(self, costs: Costs) -> IntervalPolicy:
        if self.adapting == "fixed":
            return self
        if self.adapting == AUTO:
            return self._after(costs)
        shortest = checkfreq_interval(costs.iteration_s, costs.stall_s, costs.round_s)
        if self.adapting != "checkfreq":
            estimate_s = (young if self.adapting == "young" else daly)(costs.stall_s, self.mtbf_s)
            by_round = checkfreq_interval(costs.iteration_s, 0.0, costs.round_s)
            shortest = max(in_iterations(estimate_s, costs.iteration_s), by_round)
        return replace(self, interval=shortest)

    def _after(self, costs: Costs) -> IntervalPolicy:
        """As `auto` has it, a measurement later; all ranks are given the same ones."""
        measured = (*self.measured, costs)
        if len(measured) < MEASURED:
            return replace(self, measured=measured)
        typical = Costs(*map(median, zip(*map(astuple, measured), strict=True)))
        cost_s = typical.stall_s + typical.slowed_s
        needed = checkfreq_interval(typical.iteration_s, cost_s, typical.round_s, MOST_OVERHEAD)
        kept = replace(self, measured=())
        if self.choice_made and self.interval / 2 < needed <= self.interval:
            return kept
        choice = (
            f"interval: {needed} (auto; iteration={typical.iteration_s:.3g} s stall={typical.stall_s * 1000:.3g} ms"
            f" slowdown={typical.slowed_s * 1000:.3g} ms replication={typical.round_s:.3g} s"
            f" overhead={cost_s / typical.iteration_s / needed:.2%})"
        )
        return replace(kept, interval=needed, choice=choice, choice_made=True)

    def taken(self) -> tuple[str, IntervalPolicy]:
        """What was chosen since this was called last, in words, and the interval_policy after that."""
        return self.choice, replace(self, choice="") if self.choice else self

    def to_data(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        persist = {"persist_interval": self.persist_interval} if self.persist_adapts else {}
        return {"interval": self.interval, "last": self.last, "last_persistent": self.last_persistent, **persist}

    def from_data(self, data: Mapping[str, Any]) -> IntervalPolicy:
        """This interval_policy as it stood when `to_data` was called; a fixed interval is that of the flags."""
        interval = self.interval if self.adapting == "fixed" else data["interval"]
        if self.adapting == AUTO:
            interval = max(FIRST, interval)
        persist = self.persist_interval
        if self.persist_adapts and persist is not None:
            persist = data.get("persist_interval") or persist
        return replace(
            self,
            interval=interval,
            persist_interval=persist,
            last=data["last"],
            last_persistent=data["last_persistent"],
        )


# What training does not change is saved once at each level, not in every snapshot: frozen experts (MoC 6.3.4).

_REMEMBERED = 8  # newest snapshots with constant operators, of which one may still go to storage

_PART = Part.MASTER_AND_MOMENTS | Part.CONSTANT


@dataclass(frozen=True)
class ConstantState:
    """Which levels have a copy of the operators that never change; each method returns the next value.

    Attributes:
        operators: Those operators.
        saved: Levels at which all ranks have sealed a copy.
        flights: Iterations of snapshots with a copy that is not sealed yet.
        holding: Iterations of the newest snapshots with a copy.
        writes: Iterations of snapshots whose copy is on its way to storage.
    """

    operators: frozenset[OperatorId] = frozenset()
    saved: frozenset[Level] = frozenset()
    flights: frozenset[int] = frozenset()
    holding: tuple[int, ...] = field(default=(), repr=False)
    writes: frozenset[int] = frozenset()

    def planned(self, plan: SnapshotPlan, *, writing: bool) -> ConstantState:
        """A snapshot is planned: it holds a copy where some level lacks one.

        Args:
            plan: The snapshot.
            writing: Whether it will go to storage.
        """
        lacks = Level.SNAPSHOT not in self.saved and not self.flights
        lacks_stored = writing and Level.PERSIST not in self.saved and not self.writes
        if not self.operators or not (lacks or lacks_stored):
            return self
        iteration = plan.iteration
        return replace(self, flights=self.flights | {iteration}, holding=(*self.holding, iteration)[-_REMEMBERED:])

    def added_to(self, plan: SnapshotPlan) -> SnapshotPlan:
        """The plan with the copy that its snapshot holds."""
        if plan.iteration not in self.holding:
            return plan
        return SnapshotPlan(plan.iteration, {**plan.parts, **dict.fromkeys(sorted(self.operators), _PART)})

    def handed_on(self, plans: tuple[SnapshotPlan, ...]) -> ConstantState:
        """These plans go to storage together; their round is that of the last one."""
        if not any(plan.constant for plan in plans):
            return self
        return replace(self, writes=self.writes | {plans[-1].iteration})

    def on_commit(self, plan: SnapshotPlan, level: Level, ok: bool) -> ConstantState:
        """As `Strategy.on_commit`. A copy that some peer lacks is made again."""
        iteration = plan.iteration
        if level is Level.PERSIST:
            written = ok and iteration in self.writes
            saved = self.saved | {level} if written else self.saved
            return replace(self, saved=saved, writes=self.writes - {iteration})
        if not plan.constant:
            return self
        saved = self.saved - {Level.SNAPSHOT}
        if ok:
            saved = self.saved | {Level.SNAPSHOT} if level is Level.SNAPSHOT else self.saved
        return replace(self, saved=saved, flights=self.flights - {iteration})

    def given_up(self, iterations: range) -> ConstantState:
        """All that snapshots of these iterations held is freed."""
        if not any(iteration in iterations for iteration in self.holding):
            return self
        return replace(
            self,
            saved=self.saved - {Level.SNAPSHOT},
            flights=frozenset(iteration for iteration in self.flights if iteration not in iterations),
            holding=tuple(iteration for iteration in self.holding if iteration not in iterations),
        )

    def to_data(self) -> dict[str, Any]:
        """What a resumed run continues from; nothing where all operators change."""
        if not self.operators:
            return {}
        operators = [[one.layer, one.kind.value, one.expert] for one in sorted(self.operators)]
        levels = sorted(level.value for level in self.saved)
        return {"constants": {"operators": operators, "levels": levels, "under_way": bool(self.flights)}}

    def resumed(self, data: Mapping[str, Any], plan: RecoveryPlan) -> ConstantState:
        """The value at the target of a recovery.

        Args:
            data: What `to_data` gave there.
            plan: The recovery.
        """
        known = data.get("constants") or {"operators": (), "levels": (), "under_way": False}
        fresh = ConstantState(self.operators)
        if {tuple(row) for row in known["operators"]} != {(one.layer, one.kind, one.expert) for one in self.operators}:
            return fresh
        levels = {Level(name) for name in known["levels"]}
        stored = any(source.tier is Tier.PERSISTENT and source.operators & self.operators for source in plan.taken)
        if stored:
            levels -= {Level.SNAPSHOT}
        elif known["under_way"]:
            levels |= {Level.SNAPSHOT}
        return replace(fresh, saved=frozenset(levels))

    def on_stored(self, plans: Sequence[SnapshotPlan]) -> ConstantState:
        """As `Strategy.on_stored`."""
        has_all = self.operators <= frozenset[OperatorId]().union(*(plan.constant for plan in plans))
        return self if has_all else replace(self, saved=self.saved - {Level.PERSIST})


def constant_plan(operators: frozenset[OperatorId]) -> SnapshotPlan:
    """What the piece of constant operators holds."""
    return full_plan(0, sorted(operators), _PART)


def cut(piece: Piece) -> tuple[Piece, ...]:
    """What changes, and what does not change as a piece of its own, if there is any."""
    constant = piece.plan.constant
    if not constant:
        return (piece,)
    parts = piece.plan.parts
    changing = SnapshotPlan(piece.plan.iteration, {one: part for one, part in parts.items() if one not in constant})
    held = SnapshotPlan(piece.plan.iteration, {one: parts[one] for one in sorted(constant)})
    return replace(piece, plan=changing), Piece(CONSTANT, held, piece.span)
