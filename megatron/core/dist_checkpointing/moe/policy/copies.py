"""What a token ledger is made of: levels, saved copies of experts, points to restore, losses."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Counts = tuple[tuple[int, ...], ...]
"""Whole numbers by MoE layer (in the order of the ledger's `layers`) and expert."""


class Level(enum.Enum):
    """Where copies go in two-level checkpointing (MoC 5.1)."""

    SNAPSHOT = "snapshot"  # the memory tier
    PERSIST = "persist"  # storage


class Saved(NamedTuple):
    """One saved copy of an expert: the iteration it is of, and the tokens whose updates it holds."""

    iteration: int
    tokens: int


History = tuple[Saved, ...]


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The counts at an iteration that training can go back to.

    `meant_for` are the levels that a copy of this iteration goes to, `sealed` those where it is complete.
    """

    iteration: int
    tokens: Counts = field(repr=False)
    meant_for: frozenset[Level]
    sealed: frozenset[Level]

    def to_data(self) -> list[Any]:
        """The point as lists, strings and ints."""
        levels = [[level.value for level in Level if level in some] for some in (self.meant_for, self.sealed)]
        return [self.iteration, *levels, [list(row) for row in self.tokens]]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> RestorePoint:
        """The point that `to_data` described."""
        iteration, meant_for, sealed, tokens = data
        return cls(iteration, counts_of(tokens), frozenset(map(Level, meant_for)), frozenset(map(Level, sealed)))


@dataclass(frozen=True, slots=True)
class LossRecord:
    """What one fault cost: L_i,j of MoC eq. 7, tokens per MoE layer.

    Tokens trained after `restored_iteration` are not among them, because they are trained again.
    """

    fault_iteration: int
    restored_iteration: int
    lost_tokens: tuple[int, ...]


_NEVER = Saved(-1, 0)


def newest_copy(history: History) -> Saved:
    """The newest copy; one of iteration -1 that holds nothing where there is none."""
    return history[-1] if history else _NEVER


def pruned_history(history: History, points: Sequence[int]) -> History:
    """The newest copy, and for each restorable iteration the newest that is not after it."""
    kept = {history[-1].iteration: history[-1]}
    for point in points:
        usable = [copy for copy in history if copy.iteration <= point]
        if usable:
            kept[usable[-1].iteration] = usable[-1]
    return tuple(kept[iteration] for iteration in sorted(kept))


def pruned_points(points: Sequence[RestorePoint], kept: int) -> tuple[RestorePoint, ...]:
    """Those still needed: a point goes once `kept` newer ones are sealed at each level that it is meant for."""
    newer = dict.fromkeys(Level, 0)
    needed = []
    for point in sorted(points, key=lambda point: -point.iteration):
        if any(newer[level] < kept for level in point.meant_for):
            needed.append(point)
        for level in point.sealed:
            newer[level] += 1
    return tuple(reversed(needed))


def counts_of(rows: Sequence[Sequence[int]]) -> Counts:
    """Rows of any kind as Counts."""
    return tuple(map(tuple, rows))
