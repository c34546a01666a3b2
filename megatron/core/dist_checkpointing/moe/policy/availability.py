"""What the copies that were found can rebuild: per rank, and per pipeline stage."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError
from ..types import (
    Copy,
    CopySource,
    Direction,
    Inventory,
    Lost,
    OperatorId,
    Part,
    Refusal,
    RefusalReason,
    Tier,
    Topology,
)

Operators = frozenset[OperatorId]
NONE: Operators = frozenset()

_Shared = tuple[
    int, Mapping[Part, Mapping[int, Operators]], Mapping[int, int], "tuple[ConstantCopy, ...]"
]  # what ranks with the same copies have in common

Record = tuple[int, Part, Operators]
"""Which copy of a rank, by its index, gives which part of which operators."""


@dataclass(frozen=True)
class ConstantCopy:
    """A copy, by its index, of operators that training does not change: it counts from iteration `first` on.

    `changed` gives for operators that training changed later the first iteration of which there is another copy.
    """

    index: int
    first: int
    operators: Operators
    changed: Mapping[OperatorId, int]

    def until(self, iteration: int) -> Operators:
        """The operators whose state after this iteration it is."""
        if not self.changed:
            return self.operators
        return frozenset(one for one in self.operators if self.changed.get(one, iteration + 1) > iteration)


@dataclass(frozen=True)
class RankState:
    """What was found of one rank's state. Ranks of the same `kind` can rebuild the same things.

    `copies` are the usable ones, in order of iteration, then preference; `refused` those that are damaged or out of
    reach, some of them usable in part. `lacks` gives for a part, and for each iteration with any usable copy, which of
    the required operators have no intact record of that part there. `parked` gives for each iteration at which the rank
    parked its complete state the index of that copy. `constant` are copies of operators that training does not change,
    the preferred ones first, each with the iterations for which it counts.
    """

    rank: int
    kind: int
    required: Operators
    copies: tuple[Copy, ...]
    refused: tuple[tuple[Copy, RefusalReason], ...]
    lacks: Mapping[Part, Mapping[int, Operators]]
    parked: Mapping[int, int]
    constant: tuple[ConstantCopy, ...] = ()

    def constants_at(self, iteration: int) -> Iterator[tuple[int, Operators]]:
        """Copies, by index, of another iteration that count for this one, and of which operators."""
        for copy in self.constant:
            if copy.first <= iteration:
                yield copy.index, copy.until(iteration)


def rank_states(
    inventory: Inventory, lost: Lost, topology: Topology, parts: tuple[Part, ...], *, constants: bool = False
) -> dict[int, RankState]:
    """What the intact copies of each rank of the inventory give of each of the `parts`; what ranks have in common is
    computed once.

    Args:
        inventory: All that was found after the failure.
        lost: Ranks and nodes that failed; copies on lost nodes are refused.
        topology: The rank layout.
        parts: The components of the state to look for.
        constants: Count copies of what training does not change for later iterations too.

    Returns:
        The state of each of these ranks, by rank.
    """
    shared: dict[tuple[object, ...], _Shared] = {}
    states = {}
    for rank in sorted(set(inventory.required).intersection(range(topology.world_size))):
        required = inventory.required[rank]
        usable, refused = [], []
        for copy in _in_order(inventory.copies.get(rank, ())):
            reason = _damage(copy, lost)
            if reason is not None:
                refused.append((copy, reason))
            if reason is None or (reason is RefusalReason.CORRUPT and not copy.corrupt.issuperset(copy.plan.parts)):
                usable.append(copy)
        alike = (id(required), *((id(copy.plan), copy.tier, copy.corrupt) for copy in usable))
        if alike not in shared:
            constant = tuple(_constant_copies(usable, refused)) if constants else ()
            shared[alike] = (
                len(shared),
                {part: _lacking(required, usable, part, constant) for part in parts},
                {copy.plan.iteration: index for index, copy in enumerate(usable) if _is_parked(copy, required)},
                constant,
            )
        kind, lacks, parked, constant = shared[alike]
        states[rank] = RankState(rank, kind, required, tuple(usable), tuple(refused), lacks, parked, constant)
    return states


def refusals(states: Mapping[int, RankState], target: int) -> Iterator[Refusal]:
    """Copies that cannot be used, or not for all of their records, with the reason, by rank.

    Args:
        states: What was found of each rank's state, by rank.
        target: The iteration to recover; copies of later ones are refused as newer.
    """
    for rank, state in states.items():
        refused = state.refused
        if state.copies and state.copies[-1].plan.iteration > target:
            refused += tuple((copy, RefusalReason.NEWER) for copy in state.copies if copy.plan.iteration > target)
        for copy, reason in refused:
            yield Refusal(rank, copy.plan.iteration, copy.tier, copy.holder, reason)


def _damage(copy: Copy, lost: Lost) -> RefusalReason | None:
    if copy.holder is not None and copy.holder in lost.nodes:
        return RefusalReason.HOLDER_LOST
    if not copy.sealed:
        return RefusalReason.TORN
    return RefusalReason.CORRUPT if copy.corrupt else None


def _is_parked(copy: Copy, required: Operators) -> bool:
    return copy.tier is Tier.PARKED and required <= copy.plan.anchored - copy.corrupt


class OperatorOrder:
    """Numbers of operators, so that a set of them is the bits of one integer: united, cut and sent in no time.

    Args:
        operators: All that there are, each once, in the same order wherever their numbers are used.
    """

    def __init__(self, operators: Iterable[OperatorId]) -> None:
        self._operators = tuple(operators)
        self._numbers = {operator: number for number, operator in enumerate(self._operators)}

    def bits(self, operators: Iterable[OperatorId]) -> int:
        """The set of these operators."""
        found = bytearray(len(self._operators) // 8 + 1)
        for one in operators:
            number = self._numbers[one]
            found[number >> 3] |= 1 << (number & 7)
        return int.from_bytes(found, "little")

    def named(self, bits: int) -> Operators:
        """The operators of a set."""
        return frozenset(self.listed(bits))

    def listed(self, bits: int) -> list[OperatorId]:
        """The same in their order."""
        return [self._operators[number] for number in numbers_of(bits)]


def numbers_of(bits: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    return [number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]


@dataclass(frozen=True)
class StageState:
    """What ranks of one pipeline stage can rebuild together; sets of operators and of ranks are bits.

    An operator is there only if every rank that owns a shard of it has its records. `parked` are the iterations at
    which any rank parked its complete state, `stands` those at which all did, and `reaches` those at which each of them
    parked, or one step before with the reduced gradients of the next one; `rolling` are the ranks of which the latter
    holds, by iteration. `logs` are the iterations of which all ranks have a log in a direction.
    """

    ranks: int
    required: int
    lacks: Mapping[Part, Mapping[int, int]]
    parked: frozenset[int]
    stands: frozenset[int]
    reaches: frozenset[int]
    rolling: Mapping[int, int]
    logs: Mapping[Direction, frozenset[int]]

    def __or__(self, other: StageState) -> StageState:
        """What the ranks of both can rebuild together."""
        return StageState(
            self.ranks + other.ranks,
            self.required | other.required,
            self.lacks if self.lacks is other.lacks else {part: self._lacked(other, part) for part in self.lacks},
            self.parked | other.parked,
            self.stands & other.stands,
            self.reaches & other.reaches,
            {i: self.rolling.get(i, 0) | other.rolling.get(i, 0) for i in self.rolling.keys() | other.rolling.keys()},
            {way: there & other.logs[way] for way, there in self.logs.items()},
        )

    def _lacked(self, other: StageState, part: Part) -> dict[int, int]:
        iterations = self.lacks[part].keys() | other.lacks[part].keys()
        return {iteration: self.lacking(part, iteration) | other.lacking(part, iteration) for iteration in iterations}

    def lacking(self, part: Part, iteration: int) -> int:
        """Operators whose `part` cannot be had as it was after `iteration`.

        Args:
            part: A component that the states were made for.
            iteration: The iteration after which the state is looked for.
        """
        return self.lacks[part].get(iteration, self.required)

    def frozen(self, base: int, limit: int | None) -> list[int] | None:
        """Which operators stay frozen after loading the snapshots of iterations base, base + 1, ...; ends with none.

        This is the condition of sparse-to-dense conversion (MoEvement 3.3): from `base` on, each operator has compute
        weights at every iteration until the first one with its full state.

        Args:
            base: The iteration whose snapshot is loaded first.
            limit: The last iteration at which operators may stay frozen; None: any.

        Returns:
            One set per iteration from `base` on; None if the condition fails at or before `limit`.
        """
        found: list[int] = []
        pending, iteration = self.required, base
        while pending or not found:
            if limit is not None and iteration > limit:
                return None
            pending &= self.lacking(Part.MASTER_AND_MOMENTS, iteration)
            if pending & self.lacking(Part.COMPUTE, iteration):
                return None
            found.append(pending)
            iteration += 1
        return found

    @cached_property
    def dense(self) -> Mapping[int, int]:
        """Every iteration from which the stage can be rebuilt, with the iteration at which it is dense again."""
        scanned = {base: self.frozen(base, None) for base in self.lacks[Part.MASTER_AND_MOMENTS]}
        return {base: base + len(frozen) - 1 for base, frozen in scanned.items() if frozen is not None}

    def bases(self, limit: int | None) -> dict[int, int]:
        """As `dense`, where the stage is dense again at `limit` at the latest."""
        return {base: dense for base, dense in self.dense.items() if limit is None or dense <= limit}

    def newest(self, part: Part, limit: int) -> Iterator[tuple[int, int]]:
        """The iterations up to `limit`, the newest first, each with operators whose newest `part` is of it.

        Args:
            part: The component that is looked for.
            limit: The last iteration that counts.
        """
        pending = self.required
        for iteration in sorted(self.lacks[part], reverse=True):
            if iteration <= limit and pending:
                yield iteration, pending & ~self.lacking(part, iteration)
                pending &= self.lacking(part, iteration)

    def logs_since(self, way: Direction, target: int) -> int:
        """From which iteration on all ranks' logs are there, without a gap up to the target.

        Args:
            way: The direction in which they were sent.
            target: The last iteration.
        """
        reached = target + 1
        while reached - 1 in self.logs[way]:
            reached -= 1
        return reached


Stages = Mapping[int, StageState]
"""By pipeline stage."""


@dataclass(frozen=True)
class Survey:
    """What ranks can rebuild together, by stage, and the iterations whose global scalars are known."""

    stages: Stages
    journal: frozenset[int]


Everywhere = Callable[[Survey], Survey]
"""From what this rank can rebuild to what all ranks can: a collective."""


def whole(survey: Survey, topology: Topology) -> list[StageState]:
    """The states of all pipeline stages, in their order.

    Args:
        survey: Of all ranks of the job.
        topology: The rank layout.

    Raises:
        UsageError: It leaves out a rank.
    """
    ranks = sum(stage.ranks for stage in survey.stages.values())
    if ranks != topology.world_size:
        raise UsageError(
            f"the inventory says what {ranks} of {topology.world_size} ranks require; it must name all ranks"
        )
    return [survey.stages[stage] for stage in range(topology.pp)]


def surveyed(
    states: Mapping[int, RankState], inventory: Inventory, lost: Lost, topology: Topology, order: OperatorOrder
) -> Survey:
    """What the ranks of an inventory can rebuild together.

    Args:
        states: What was found of each rank's state, by rank.
        inventory: All that was found after the failure.
        lost: Ranks and nodes that failed.
        topology: The rank layout.
        order: Has all operators.
    """
    alike: dict[int, tuple[int, Mapping[Part, Mapping[int, int]]]] = {}
    kinds: dict[tuple[int, int], StageState] = {}
    for rank, state in states.items():
        if state.kind not in alike:
            lacks = {part: {i: order.bits(one) for i, one in held.items()} for part, held in state.lacks.items()}
            alike[state.kind] = order.bits(state.required), lacks
        parked, kind = frozenset(state.parked), (topology.stage(rank), state.kind)
        may_roll = rank in inventory.can_roll_forward
        rolling = frozenset(at + 1 for at in parked if may_roll and at + 1 not in parked)
        logs = {way: _logged(inventory, lost, rank, way) for way in Direction}
        bits = dict.fromkeys(rolling, 1 << rank)
        own = StageState(1, *alike[state.kind], parked, parked, parked | rolling, bits, logs)
        kinds[kind] = kinds[kind] | own if kind in kinds else own
    stages: dict[int, StageState] = {}
    for (stage, _), found in kinds.items():
        stages[stage] = stages[stage] | found if stage in stages else found
    return Survey(stages, inventory.journal)


def _logged(inventory: Inventory, lost: Lost, rank: int, way: Direction) -> frozenset[int]:
    logs = (log for log in inventory.logs.get(rank, ()) if log.direction is way and log.holder not in lost.nodes)
    return frozenset(iteration for log in logs for iteration in log.iterations)


def copy_sources(
    states: Mapping[int, RankState], ranks: Iterable[int], records: Callable[[RankState], Iterable[Record]]
) -> Iterator[CopySource]:
    """What each of these ranks of one stage loads; ranks of one kind differ only in who holds their copies.

    Args:
        states: What was found of each rank's state, by rank.
        ranks: Ranks of one pipeline stage.
        records: Chooses the records for a state; called once for each kind of rank.
    """
    recipes: dict[int, list[Record]] = {}
    for rank in ranks:
        state = states[rank]
        if state.kind not in recipes:
            recipes[state.kind] = list(records(state))
        for index, part, operators in recipes[state.kind]:
            copy = state.copies[index]
            yield CopySource(rank, copy.plan.iteration, copy.tier, copy.holder, part, operators)


def _in_order(copies: Iterable[Copy]) -> Sequence[Copy]:
    """By iteration, then tier, then holder; what only its content tells apart is looked into only then."""
    found = list(copies)
    places = list(map(_place, found))
    if all(map(operator.lt, places, places[1:])):
        return found
    if len(set(places)) == len(places):
        return sorted(found, key=_place)
    return sorted(found, key=lambda copy: (_place(copy), copy.sealed, copy.plan.digest(), sorted(copy.corrupt)))


def _place(copy: Copy) -> tuple[int, int, int]:
    return copy.plan.iteration, copy.tier, -1 if copy.holder is None else copy.holder


def _constant_copies(usable: Sequence[Copy], refused: Sequence[tuple[Copy, RefusalReason]]) -> Iterator[ConstantCopy]:
    """Newest first, of equally new ones in order of preference."""
    found = [(index, copy) for index, copy in enumerate(usable) if copy.plan.constant]
    seen = [copy for copy in (*usable, *(copy for copy, _ in refused)) if copy.tier is not Tier.PARKED]
    for index, copy in sorted(found, key=lambda item: (-item[1].plan.iteration, item[0])):
        operators, first = copy.plan.constant - copy.corrupt, copy.plan.iteration
        changed: dict[OperatorId, int] = {}
        for other in seen:
            if other.plan.iteration > first:
                for one in operators & (other.plan.giving(Part.MASTER) - other.plan.constant):
                    changed[one] = min(other.plan.iteration, changed.get(one, other.plan.iteration))
        yield ConstantCopy(index, first, operators, changed)


def _lacking(
    required: Operators, copies: Sequence[Copy], part: Part, constant: Sequence[ConstantCopy]
) -> dict[int, Operators]:
    lacking: dict[int, Operators] = {}
    for copy in copies:
        given = copy.plan.giving(part)
        before = lacking.get(copy.plan.iteration, required)
        lacking[copy.plan.iteration] = before - (given - copy.corrupt if copy.corrupt else given)
    for one in constant:
        for iteration in lacking:
            if one.first <= iteration:
                lacking[iteration] = lacking[iteration] - one.until(iteration)
    return lacking
