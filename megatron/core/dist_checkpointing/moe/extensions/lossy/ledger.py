"""The ledger of tokens whose updates experts hold, and which of them a fault would lose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import add, sub
from typing import Any, NamedTuple

from ...errors import UsageError
from ...types import Level, OperatorId, expert

Counts = tuple[tuple[int, ...], ...]
"""Whole numbers by MoE layer (in the order of the ledger's `layers`) and expert."""


TWO_LEVELS = frozenset({Level.SNAPSHOT, Level.PERSIST})
"""Those of two-level checkpointing (MoC 5.1)."""


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
    """The newest copy, and for each restorable iteration the newest that is not after it.

    Args:
        history: The copies of an expert at one level, oldest first; at least one.
        points: The iterations that can be restored.
    """
    kept = {history[-1].iteration: history[-1]}
    for point in points:
        usable = [copy for copy in history if copy.iteration <= point]
        if usable:
            kept[usable[-1].iteration] = usable[-1]
    return tuple(kept[iteration] for iteration in sorted(kept))


def pruned_points(points: Sequence[RestorePoint], kept: int) -> tuple[RestorePoint, ...]:
    """Those still needed: a point goes once `kept` newer ones are sealed at each level that it is meant for.

    Args:
        points: The restore points that are known.
        kept: How many newer sealed ones make a point superfluous.
    """
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


@dataclass(frozen=True)
class TokenLedger:
    """Tokens per expert since it was last saved, per level, and what faults have cost so far (MoC eq. 7, PEC Alg. 1).

    `tokens[i][e]` counts the tokens, since the ledger began, whose updates the live state of expert e in MoE layer
    `layers[i]` holds: a recovery that gives an expert an older copy lowers its count to that of the copy. So updates
    that are lost once are never counted as lost twice, and what a fault loses is a plain difference of two counts.
    `points` has the counts of the iterations that can still be restored, `copies[level][i][e]` the copies of one
    expert, ascending. Ledgers are values: each method returns a new one that shares what did not change.

    A ledger that travels in the trainer state of its iteration stays exact by itself: `losses` then has the faults on
    the way to the restored state, and nothing that was undone by going back.
    """

    layers: tuple[int, ...]
    iteration: int
    tokens: Counts = field(repr=False)
    points: tuple[RestorePoint, ...] = field(repr=False)
    copies: Mapping[Level, tuple[tuple[History, ...], ...]] = field(repr=False)
    losses: tuple[LossRecord, ...] = ()
    kept_points: int = 2

    @classmethod
    def started(
        cls,
        layers: Sequence[int],
        num_experts: int,
        iteration: int = 0,
        *,
        kept_points: int = 2,
        levels: Collection[Level] = TWO_LEVELS,
    ) -> TokenLedger:
        """A ledger that begins at `iteration`, of which all experts can be restored at all of its levels.

        Args:
            layers: The MoE layers, ascending.
            num_experts: N, experts per MoE layer.
            iteration: The iteration to begin at.
            kept_points: How many of the newest sealed iterations per level stay restorable; 2 allow for a damaged
                newest one.
            levels: The levels at which copies are kept.

        Raises:
            UsageError: There are no MoE layers or experts, layers do not ascend, or `kept_points` is below 1.
        """
        if not layers or any(a >= b for a, b in pairwise(layers)):
            raise UsageError(f"layers is {tuple(layers)}, but must be at least one MoE layer, ascending")
        for name, value, least in (
            ("num_experts", num_experts, 1),
            ("iteration", iteration, 0),
            ("kept_points", kept_points, 1),
        ):
            if value < least:
                raise UsageError(f"{name} is {value}, but must be at least {least}")
        tokens = ((0,) * num_experts,) * len(layers)
        histories = (((Saved(iteration, 0),),) * num_experts,) * len(layers)
        start = RestorePoint(iteration, tokens, frozenset(levels), frozenset(levels))
        copies = {level: histories for level in Level if level in levels}
        return cls(tuple(layers), iteration, tokens, (start,), copies, kept_points=kept_points)

    @property
    def num_experts(self) -> int:
        """Experts per MoE layer."""
        return len(self.tokens[0])

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {layer: row for row, layer in enumerate(self.layers)}

    def advance(self, iteration: int, counts: Sequence[Sequence[int]]) -> TokenLedger:
        """The ledger after one more iteration.

        Args:
            iteration: The iteration that was trained.
            counts: Tokens that were routed to each expert in it, by MoE layer and expert.

        Raises:
            UsageError: It is not the next iteration, or counts are negative, no ints, or too few.
        """
        if iteration != self.iteration + 1:
            raise UsageError(f"iteration is {iteration}, but the ledger is at {self.iteration}: the next must follow")
        if len(counts) != len(self.layers):
            raise UsageError(f"counts has {len(counts)} layers, but must have {len(self.layers)}")
        for layer, row in zip(self.layers, counts, strict=True):
            if len(row) != self.num_experts:
                raise UsageError(f"counts of layer {layer} has {len(row)} experts, but must have {self.num_experts}")
            if set(map(type, row)) != {int} or min(row) < 0:
                wrong = next(count for count in row if type(count) is not int or count < 0)
                raise UsageError(f"counts of layer {layer} has {wrong!r}, but must be whole numbers, at least 0")
        tokens = tuple(tuple(map(add, old, new)) for old, new in zip(self.tokens, counts, strict=True))
        return replace(self, iteration=iteration, tokens=tokens)

    def at_levels(self, levels: Collection[Level]) -> TokenLedger:
        """The ledger of a job that tells these levels apart; of one that is new to it all is known that memory had."""
        memory = self.copies[Level.SNAPSHOT]
        points = (
            replace(one, meant_for=one.meant_for & frozenset(levels), sealed=one.sealed & frozenset(levels))
            for one in self.points
        )
        copies = {level: self.copies.get(level, memory) for level in Level if level in levels}
        return replace(self, points=tuple(points), copies=copies)

    def marked(self, levels: Iterable[Level]) -> TokenLedger:
        """The ledger that keeps the counts of the current iteration, of which a copy for `levels` is captured now."""
        old = self._point(self.iteration)
        sealed = old.sealed if old else frozenset()
        meant_for = frozenset(levels) | (old.meant_for if old else frozenset())
        return self._with_point(RestorePoint(self.iteration, self.tokens, meant_for, sealed))

    def abandoned(self, iteration: int, level: Level) -> TokenLedger:
        """The ledger that no longer waits for the copy of `iteration` at `level`, which failed or was skipped.

        Args:
            iteration: The iteration that the copy is of.
            level: Where the copy was to go.
        """
        point = self._point(iteration)
        return self if point is None else self._with_point(replace(point, meant_for=point.meant_for - {level}))

    def saved(self, iteration: int, experts: Iterable[OperatorId], level: Level) -> TokenLedger:
        """The ledger once a copy is sealed. Counts that no newer restore is going to need are dropped.

        Args:
            iteration: The iteration that the copy is of: the current one, or one that was `marked` when its copy was
                captured.
            experts: The operators that the copy has; other operators than experts are skipped.
            level: Where the copy is sealed.

        Raises:
            UsageError: The iteration is neither, or is older than a sealed one of this level; or an expert is unknown.
        """
        newest = max((point.iteration for point in self.points if level in point.sealed), default=iteration)
        if iteration < newest:
            raise UsageError(f"iteration is {iteration}, but {newest} is {level.value}-sealed: newer ones must follow")
        ledger = self.marked([level]) if iteration == self.iteration else self
        point = ledger._known_point(iteration)
        ledger = ledger._with_point(
            RestorePoint(iteration, point.tokens, point.meant_for | {level}, point.sealed | {level})
        )
        kept = [point.iteration for point in ledger.points]
        rows: dict[int, list[History]] = {}
        for operator in experts:
            if operator.is_expert:
                row = self._row(operator)
                if row not in rows:
                    rows[row] = list(self.copies[level][row])
                histories = rows[row]
                copy = Saved(iteration, point.tokens[row][operator.expert])
                histories[operator.expert] = pruned_history((*histories[operator.expert], copy), kept)
        copies = tuple(tuple(rows[row]) if row in rows else old for row, old in enumerate(self.copies[level]))
        return replace(ledger, copies={**self.copies, level: copies})

    def limited(self, level: Level, newest: Mapping[OperatorId, int]) -> TokenLedger:
        """The ledger once it is known that no newer copies are there than these.

        Args:
            level: Where the copies are.
            newest: The iteration of each expert's newest copy; experts that are not named have none.
        """
        copies = tuple(
            tuple(
                tuple(copy for copy in history if copy.iteration <= newest.get(expert(layer, index), -1))
                for index, history in enumerate(row)
            )
            for layer, row in zip(self.layers, self.copies[level], strict=True)
        )
        return replace(self, copies={**self.copies, level: copies})

    def unsaved(self, level: Level) -> Counts:
        """Tokens of each expert since its last saved copy at `level`: what selection goes by (PEC Alg. 1)."""
        return tuple(
            tuple([count - newest_copy(history).tokens for count, history in zip(counts, histories, strict=True)])
            for counts, histories in zip(self.tokens, self.copies[level], strict=True)
        )

    def last_saved(self, level: Level) -> Counts:
        """Iteration of each expert's newest copy at `level`, -1 where there is none."""
        return tuple(tuple([newest_copy(history).iteration for history in row]) for row in self.copies[level])

    def at_risk(self, level: Level) -> tuple[int, ...]:
        """Tokens per MoE layer that are lost if a fault strikes now and only copies at `level` survive."""
        newest = next((point.tokens for point in reversed(self.points) if level in point.sealed), self.tokens)
        return tuple(
            sum(counts) - sum([newest_copy(history).tokens for history in histories])
            for counts, histories in zip(newest, self.copies[level], strict=True)
        )

    @property
    def lost_tokens(self) -> tuple[int, ...]:
        """Tokens per MoE layer that all faults so far have cost."""
        return tuple(map(sum, zip((0,) * len(self.layers), *(loss.lost_tokens for loss in self.losses), strict=False)))

    def tokens_between(self, operator: OperatorId, after: int, upto: int) -> int:
        """Tokens of an expert in iterations after + 1..upto: lost if its copy of `after` goes with a restore of `upto`.

        Args:
            operator: The expert.
            after: The iteration of its copy.
            upto: The iteration that is restored.

        Raises:
            UsageError: There is no copy of `after` or no restore point `upto`.
        """
        row = self._row(operator)
        if after >= upto:
            return 0
        return self._known_tokens(upto)[row][operator.expert] - self._tokens_of(operator, after)

    def loss(self, restored: int, copies: Mapping[OperatorId, int]) -> tuple[int, ...]:
        """Tokens per MoE layer that are lost if training goes back to `restored`, see `recovered`.

        Args:
            restored: The iteration that training goes back to.
            copies: The iteration of the copy that each expert is restored from, as in `recovered`.
        """
        return tuple(map(sum, self._lost(restored, copies)))

    def recovered(self, fault_iteration: int, restored: int, copies: Mapping[OperatorId, int]) -> TokenLedger:
        """The ledger of the state after iteration `restored`, with one more entry in `losses`.

        Copies newer than the one used are forgotten: they are damaged, gone, or of a future that will not be. Earlier
        losses at points later than `restored` are dropped with it: their tokens are trained again.

        Args:
            fault_iteration: The iteration that the fault hit.
            restored: The iteration that training goes back to.
            copies: The iteration of the copy that each expert was restored from; those not named were restored as of
                `restored`.

        Raises:
            UsageError: Iterations in an impossible order or that the ledger does not know.
        """
        if fault_iteration < restored:
            raise UsageError(f"fault_iteration is {fault_iteration}, but must be at least restored = {restored}")
        lost = self._lost(restored, copies)
        tokens = tuple(
            tuple(map(sub, counts, row)) for counts, row in zip(self._known_tokens(restored), lost, strict=True)
        )
        limit = [[restored] * self.num_experts for _ in self.layers]
        for operator, iteration in copies.items():
            limit[self._row(operator)][operator.expert] = iteration
        kept = {
            level: tuple(
                tuple(
                    tuple(copy for copy in history if copy.iteration <= last)
                    for history, last in zip(histories, limits, strict=True)
                )
                for histories, limits in zip(rows, limit, strict=True)
            )
            for level, rows in self.copies.items()
        }
        points = [
            replace(point, tokens=tokens) if point.iteration == restored else point
            for point in self.points
            if point.iteration <= restored
        ]
        losses = [loss for loss in self.losses if loss.restored_iteration <= restored]
        losses.append(LossRecord(fault_iteration, restored, tuple(map(sum, lost))))
        return replace(self, iteration=restored, tokens=tokens, points=tuple(points), copies=kept, losses=tuple(losses))

    def to_data(self) -> dict[str, Any]:
        """The ledger as lists, strings and ints, for JSON."""
        return {
            "version": 1,
            "layers": list(self.layers),
            "iteration": self.iteration,
            "kept_points": self.kept_points,
            "tokens": [list(row) for row in self.tokens],
            "points": [point.to_data() for point in self.points],
            "copies": {
                level.value: [[[list(copy) for copy in history] for history in row] for row in rows]
                for level, rows in self.copies.items()
            },
            "losses": [[loss.fault_iteration, loss.restored_iteration, list(loss.lost_tokens)] for loss in self.losses],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TokenLedger:
        """The ledger that `to_data` described. Raises UsageError for another version or a missing field."""
        if data.get("version") != 1:
            raise UsageError(f"token ledger: version is {data.get('version')!r}, but must be 1")
        missing = [
            name
            for name in ("layers", "iteration", "kept_points", "tokens", "points", "copies", "losses")
            if name not in data
        ]
        if missing:
            raise UsageError(f"token ledger: {missing[0]} is missing: the data is incomplete")
        return cls(
            tuple(data["layers"]),
            data["iteration"],
            counts_of(data["tokens"]),
            tuple(map(RestorePoint.from_data, data["points"])),
            {
                level: tuple(
                    tuple(tuple(Saved(*copy) for copy in history) for history in row)
                    for row in data["copies"][level.value]
                )
                for level in Level
                if level.value in data["copies"]
            },
            tuple(LossRecord(fault, restored, tuple(lost)) for fault, restored, lost in data["losses"]),
            data["kept_points"],
        )

    def _lost(self, restored: int, copies: Mapping[OperatorId, int]) -> list[list[int]]:
        lost = [[0] * self.num_experts for _ in self.layers]
        for operator, iteration in copies.items():
            if iteration > restored:
                raise UsageError(f"copy of {operator} is of iteration {iteration}, but must be at most {restored}")
            lost[self._row(operator)][operator.expert] = self.tokens_between(operator, iteration, restored)
        return lost

    def _tokens_of(self, operator: OperatorId, iteration: int) -> int:
        row = self._rows[operator.layer]
        histories = [rows[row][operator.expert] for rows in self.copies.values()]
        found = [copy.tokens for history in histories for copy in history if copy.iteration == iteration]
        if found:
            return found[0]
        known = sorted({copy.iteration for history in histories for copy in history})
        raise UsageError(f"copy of {operator} is of iteration {iteration}, but the ledger only knows {known}")

    def _row(self, operator: OperatorId) -> int:
        row = self._rows.get(operator.layer)
        if row is None or not operator.is_expert or not 0 <= operator.expert < self.num_experts:
            raise UsageError(f"operator is {operator}, but must be one of {self.num_experts} experts of {self.layers}")
        return row

    def _point(self, iteration: int) -> RestorePoint | None:
        return next((point for point in self.points if point.iteration == iteration), None)

    def _known_point(self, iteration: int) -> RestorePoint:
        point = self._point(iteration)
        if point is None:
            known = [point.iteration for point in self.points]
            raise UsageError(f"iteration is {iteration}, but the ledger only keeps counts of {known}")
        return point

    def _known_tokens(self, iteration: int) -> Counts:
        return self.tokens if iteration == self.iteration else self._known_point(iteration).tokens

    def _with_point(self, point: RestorePoint) -> TokenLedger:
        others = [old for old in self.points if old.iteration != point.iteration]
        return replace(self, points=pruned_points([*others, point], self.kept_points))
