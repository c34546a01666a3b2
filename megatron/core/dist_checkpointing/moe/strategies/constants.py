"""What training does not change is saved once at each level, not in every snapshot: frozen experts (MoC 6.3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..types import CONSTANT, Level, OperatorId, Part, Piece, RecoveryPlan, SnapshotPlan, Tier, full_plan

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
