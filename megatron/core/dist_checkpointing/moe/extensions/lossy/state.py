"""What lossy strategies remember: the ledger of tokens, what is under way, and which copies a fault may find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...errors import UsageError
from ...types import Level, OperatorId, RecoveryPlan, Tier, expert
from .ledger import TWO_LEVELS, LossRecord, Saved, TokenLedger

Experts = frozenset[OperatorId]
Captures = Mapping[Level, Mapping[OperatorId, tuple[Saved, ...]]]
_CAPTURES = 4  # newest captures of each expert, per level, whose tokens are remembered, however they were settled
_COUNTED = 256  # newest snapshots and writes by which ages are counted, at least


@dataclass(frozen=True)
class Flight:
    """A snapshot under way: experts with their full state, those of them that peers are sent, where the strategy tells
    them apart (None: it does not), and those that go to storage (None: not due)."""

    iteration: int
    experts: Experts = field(repr=False)
    persist: Experts | None = field(default=None, repr=False)
    sent: Experts | None = field(default=None, repr=False)

    @property
    def meant_for(self) -> dict[Level, Experts]:
        """The experts that are to have a copy at each level."""
        found = {Level.SNAPSHOT: self.experts, Level.REPLICAS: self.sent, Level.PERSIST: self.persist}
        return {level: experts for level, experts in found.items() if experts is not None}


@dataclass(frozen=True)
class LossyState:
    """A value; each method returns the next one.

    levels: at which copies count apart. waits: whether a copy in memory counts from when peers have it, too.
    flights: planned, not settled. sending: sealed, on their way to peers. ready: sealed, to be persisted. writes: being
    persisted. complete: levels at which all experts have a copy.
    captured: newest captures of each expert that were meant for a level. taken, written: iterations of snapshots and
    of writes.
    """

    layers: tuple[int, ...]
    num_experts: int
    kept_points: int = 2
    levels: frozenset[Level] = TWO_LEVELS
    waits: bool = False
    ledger: TokenLedger | None = None
    flights: tuple[Flight, ...] = ()
    sending: tuple[Flight, ...] = ()
    ready: Flight | None = None
    writes: tuple[Flight, ...] = ()
    complete: frozenset[Level] = frozenset()
    captured: Captures = field(default_factory=lambda: {level: {} for level in Level}, repr=False)
    taken: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @cached_property
    def experts(self) -> Experts:
        """All experts."""
        return frozenset(expert(layer, index) for layer in self.layers for index in range(self.num_experts))

    def begun(self, iteration: int, lost_tokens: Sequence[int] = ()) -> LossyState:
        """Whose count of tokens begins.

        Args:
            iteration: After which it does.
            lost_tokens: What faults had cost by then, by MoE layer.
        """
        ledger = TokenLedger.started(
            self.layers, self.num_experts, iteration, kept_points=self.kept_points, levels=self.levels
        )
        before = (LossRecord(iteration, iteration, tuple(lost_tokens)),) if any(lost_tokens) else ()
        return replace(self, ledger=replace(ledger, losses=before))

    def planned(self, flight: Flight) -> LossyState:
        """With one more snapshot under way."""
        taken = (*self.taken, flight.iteration)[-self._counted :]
        return replace(self, flights=(*self.flights, flight), taken=taken)

    def lacks_experts(self, level: Level) -> bool:
        """Whether some experts have no copy at this level, and none of all experts is under way."""
        under_way = (experts for _, experts in self.under_way(level))
        return level not in self.complete and self.experts not in under_way

    def on_token_counts(self, iteration: int, counts: Sequence[Sequence[int]]) -> LossyState:
        """With the tokens of one more iteration; if it was planned, its counts are kept for when it is restored.

        Args:
            iteration: The iteration that was trained.
            counts: Tokens by MoE layer and expert.
        """
        ledger = self.ledger or self.begun(iteration - 1).ledger
        assert ledger is not None
        ledger = ledger.advance(iteration, counts)
        flight = next((one for one in self.flights if one.iteration == iteration), None)
        if flight is None:
            return replace(self, ledger=ledger)
        captured = dict(self.captured)
        for level, experts in flight.meant_for.items():
            captured[level] = _with_captures(captured[level], ledger, experts)
        return replace(self, ledger=ledger.marked(flight.meant_for), captured=captured)

    def on_commit(self, iteration: int, level: Level, ok: bool) -> LossyState:
        """With the outcome of what was under way; what is not under way changes nothing.

        Args:
            iteration: The iteration of the snapshot.
            level: Where copies of it were to go.
            ok: Whether all ranks have them there.
        """
        if level is Level.PERSIST:
            return self._persisted(iteration, ok)
        if level is Level.REPLICAS:
            return self._sent(iteration, ok)
        flight = next((one for one in self.flights if one.iteration == iteration), None)
        if flight is None:
            return self
        state = replace(self, flights=tuple(one for one in self.flights if one is not flight))
        if ok:
            state = state if self.waits else state._saved(flight.experts, iteration, level)
            state = replace(state, sending=(*self.sending, flight))
        else:
            state = state._abandoned(iteration, level)
            state = state if flight.sent is None else state._abandoned(iteration, Level.REPLICAS)
        if flight.persist is None:
            return state
        return state._dropping_ready(flight) if ok else state._abandoned(iteration, Level.PERSIST)

    def handed_on(self) -> LossyState:
        """With what was ready being persisted."""
        assert self.ready is not None
        written = (*self.written, self.ready.iteration)[-self._counted :]
        return replace(self, ready=None, writes=(*self.writes, self.ready), written=written)

    def under_way(self, level: Level) -> list[tuple[int, Experts]]:
        """What will be saved at this level if all goes well, by iteration, ascending."""
        if level is Level.SNAPSHOT:
            waiting = self.sending if self.waits else ()
            return [(flight.iteration, flight.experts) for flight in (*waiting, *self.flights)]
        if level is Level.REPLICAS:
            return [(one.iteration, one.sent) for one in (*self.sending, *self.flights) if one.sent is not None]
        flights = (*self.writes, *((self.ready,) if self.ready else ()), *self.flights)
        return [(flight.iteration, flight.persist) for flight in flights if flight.persist is not None]

    def unsaved(self, level: Level) -> dict[OperatorId, int]:
        """Tokens of each expert since its newest copy at this level, those under way included."""
        if self.ledger is None:
            return dict.fromkeys(sorted(self.experts), 0)
        rows = {layer: row for row, layer in enumerate(self.ledger.layers)}
        unsaved = self.ledger.unsaved(level)
        found = {one: unsaved[rows[one.layer]][one.expert] for one in sorted(self.experts)}
        for iteration, experts in self.under_way(level):
            for one in experts:
                captured = [copy for copy in self.captured[level].get(one, ()) if copy.iteration == iteration]
                if captured:
                    found[one] = self.ledger.tokens[rows[one.layer]][one.expert] - captured[-1].tokens
        return found

    def last(self, level: Level) -> dict[OperatorId, int]:
        """The iteration of each expert's newest copy, those under way included; -1 without any."""
        last: dict[OperatorId, int] = {}
        rows = self.ledger.last_saved(level) if self.ledger else [[-1] * self.num_experts] * len(self.layers)
        for layer, row in zip(self.layers, rows, strict=True):
            last.update((expert(layer, index), iteration) for index, iteration in enumerate(row))
        for iteration, experts in self.under_way(level):
            last.update(dict.fromkeys(experts, iteration))
        return last

    def to_data(self) -> dict[str, Any]:
        """What a resumed run needs; what is under way is known by its captures."""
        return {
            "ledger": self.ledger.to_data() if self.ledger else None,
            "complete": [level.value for level in Level if level in self.complete],
            "captured": {
                level.value: [[op.layer, op.expert, [list(one) for one in found[op]]] for op in sorted(found)]
                for level, found in self.captured.items()
                if level in self.levels
            },
            "taken": list(self.taken),
            "written": list(self.written),
        }

    def resumed(
        self, data: Mapping[str, Any], plan: RecoveryPlan, fault_iteration: int
    ) -> tuple[LossyState, dict[OperatorId, int]]:
        """The state at the target of a recovery, and the tokens that each expert with an older copy lost.

        What was restored from memory is sent to peers again at once, and so counts as if they had it.

        Exact for a copy of the last captures or one that the ledger knows; any older one counts as the newest known one
        before it, so that never fewer tokens are reported than were lost.

        Args:
            data: What `to_data` gave at the target.
            plan: The recovery.
            fault_iteration: The newest iteration that is known to have ended before the fault.
        """
        captured = _captures_of(data)
        used, stored = _used(plan)
        ledger = TokenLedger.from_data(data["ledger"])
        if len(ledger.layers) != len(self.layers) or ledger.num_experts != self.num_experts:
            raise UsageError(
                f"tokens were counted of {ledger.num_experts} experts in {len(ledger.layers)} layers, but this job has"
                f" {self.num_experts} in {len(self.layers)}"
            )
        ledger = replace(ledger.at_levels(self.levels), kept_points=self.kept_points)
        for level in (level for level in Level if level in self.levels):
            tier = Level.SNAPSHOT if level is Level.REPLICAS else level
            wanted = {operator: used[operator] for operator in used if stored[operator] is tier}
            ledger = _knowing(ledger, level, wanted, captured)
        lost = {
            operator: ledger.tokens_between(operator, iteration, plan.target)
            for operator, iteration in sorted(used.items())
            if iteration < plan.target
        }
        in_memory = {Level.SNAPSHOT, Level.REPLICAS}
        complete = {Level(name) for name in data["complete"]} - in_memory
        if Level.PERSIST not in stored.values():
            complete |= in_memory
        state = replace(
            self,
            ledger=ledger.recovered(fault_iteration, plan.target, used),
            flights=(),
            sending=(),
            ready=None,
            writes=(),
            complete=frozenset(complete),
            captured={
                level: {op: tuple(one for one in all_ if one.iteration <= used[op]) for op, all_ in found.items()}
                for level, found in captured.items()
            },
            taken=tuple(data["taken"]),
            written=tuple(data["written"]),
        )
        return state, lost

    def on_stored(self, newest: Mapping[OperatorId, int]) -> LossyState:
        """Storage turned out to have certain copies and no others, whatever was persisted once.

        Args:
            newest: The iteration of each expert's newest one.
        """
        has_all = self.experts <= newest.keys()
        return replace(
            self,
            complete=self.complete if has_all else self.complete - {Level.PERSIST},
            ledger=self.ledger.limited(Level.PERSIST, newest) if self.ledger else None,
        )

    @property
    def _counted(self) -> int:
        """So many that ages reach every limit: below 2 N writes, or 2 N snapshots and N more to be taken in."""
        return max(_COUNTED, 3 * self.num_experts)

    def _persisted(self, iteration: int, ok: bool) -> LossyState:
        write = next((one for one in self.writes if one.iteration == iteration), None)
        if write is None or write.persist is None:
            return self
        state = replace(self, writes=tuple(one for one in self.writes if one is not write))
        if not ok:
            written = tuple(one for one in state.written if one != iteration)
            return replace(state, written=written)._abandoned(iteration, Level.PERSIST)
        return state._saved(write.persist, iteration, Level.PERSIST)

    def _sent(self, iteration: int, ok: bool) -> LossyState:
        flight = next((one for one in self.sending if one.iteration == iteration), None)
        level = Level.SNAPSHOT if self.waits else Level.REPLICAS
        if flight is None:
            # What a recovery found was sent again: without that, peers may lack any expert. Where copies of peers are
            # not counted apart, those of this node have to be taken again to be sent.
            return self if ok else replace(self, complete=self.complete - {level})
        state = replace(self, sending=tuple(one for one in self.sending if one.iteration > iteration))
        experts = flight.experts if self.waits else flight.sent
        if experts is None:
            return state
        return state._saved(experts, iteration, level) if ok else state._abandoned(iteration, level)

    def _saved(self, experts: Experts, iteration: int, level: Level) -> LossyState:
        assert self.ledger is not None
        is_all = len(experts) == len(self.layers) * self.num_experts
        ledger = self.ledger.saved(iteration, sorted(experts), level)
        return replace(self, ledger=ledger, complete=self.complete | {level} if is_all else self.complete)

    def _abandoned(self, iteration: int, level: Level) -> LossyState:
        return replace(self, ledger=self.ledger.abandoned(iteration, level) if self.ledger else None)

    def _dropping_ready(self, flight: Flight) -> LossyState:
        state = self if self.ready is None else self._abandoned(self.ready.iteration, Level.PERSIST)
        return replace(state, ready=flight)


def _captures_of(data: Mapping[str, Any]) -> dict[Level, dict[OperatorId, tuple[Saved, ...]]]:
    """The newest captures of each expert, as `to_data` wrote them."""
    return {
        level: {
            expert(row[0], row[1]): tuple(Saved(*one) for one in row[2])
            for row in data["captured"].get(level.value, ())
        }
        for level in Level
    }


def _used(plan: RecoveryPlan) -> tuple[dict[OperatorId, int], dict[OperatorId, Level]]:
    """The iteration that each expert is restored from (the older one of two parts), and whether any is from storage."""
    used: dict[OperatorId, int] = {}
    stored: dict[OperatorId, Level] = {}
    for source in plan.taken:
        level = Level.PERSIST if source.tier is Tier.PERSISTENT else Level.SNAPSHOT
        for operator in source.operators:
            if operator.is_expert:
                used[operator] = min(source.iteration, used.get(operator, source.iteration))
                stored[operator] = level if level is Level.PERSIST else stored.get(operator, level)
    return used, stored


def _with_captures(
    captured: Mapping[OperatorId, tuple[Saved, ...]], ledger: TokenLedger, experts: Iterable[OperatorId]
) -> Mapping[OperatorId, tuple[Saved, ...]]:
    rows = dict(zip(ledger.layers, ledger.tokens, strict=True))
    found = dict(captured)
    for operator in experts:
        now = Saved(ledger.iteration, rows[operator.layer][operator.expert])
        found[operator] = (*found.get(operator, ()), now)[-_CAPTURES:]
    return found


def _knowing(
    ledger: TokenLedger,
    level: Level,
    wanted: Mapping[OperatorId, int],
    captured: Captures,
) -> TokenLedger:
    """The ledger with the copies that were found at this level, though they had not settled when it was stored."""
    rows = {layer: row for row, layer in enumerate(ledger.layers)}
    copies = [list(row) for row in ledger.copies[level]]
    for operator, iteration in wanted.items():
        row, index = rows[operator.layer], operator.expert
        known = {copy for every in ledger.copies.values() for copy in every[row][index]}
        known |= {copy for found in captured.values() for copy in found.get(operator, ())}
        tokens = max((copy.tokens for copy in known if copy.iteration <= iteration), default=0)
        kept = {copy for copy in copies[row][index] if copy.iteration != iteration} | {Saved(iteration, tokens)}
        copies[row][index] = tuple(sorted(kept))
    return replace(ledger, copies={**ledger.copies, level: tuple(map(tuple, copies))})
