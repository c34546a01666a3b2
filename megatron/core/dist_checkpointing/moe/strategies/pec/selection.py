"""Which groups of experts a snapshot of `pec` takes, and which of its experts go on to storage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from ...policy.ledger import TokenLedger
from ...policy.partial import persist_selection
from ...types import Level, OperatorId
from .groups import Groups
from .state import Experts, PecState

Last = Mapping[OperatorId, int]


def in_turn(groups: Groups, last: Last, cursor: int, count: int) -> list[int]:
    """The `count` groups saved longest ago, equal ones in turn from `cursor`: the rotation of `sequential_selection`.

    After a snapshot that failed its groups are still the oldest, and come first when their turn comes again.
    """
    oldest = [min(last[operator] for operator in members) for members in groups.members]
    order = sorted(range(groups.count), key=lambda group: (oldest[group], (group - cursor) % groups.count))
    return order[:count]


def by_load(groups: Groups, state: PecState, last: Last, k: int) -> Experts:
    """The shares of groups with the most tokens since they were last saved (PEC Alg. 1), in each pipeline stage.

    At most K x layers experts per stage and as many shares per expert-parallel rank as groups make K experts per layer,
    which is the paper's capacity of a rank. A share that was not in 2 x ceil(N / K) snapshots goes before all others.
    """
    assert state.ledger is not None
    unsaved = _unsaved_tokens(state.ledger, state)
    max_age = 2 * -(-groups.num_experts // k)
    ranked: list[tuple[int, int, int, int]] = []
    for index, cell in enumerate(groups.cells):
        for group, share in enumerate(cell.shares):
            if share:
                late = age(state.taken, min(last[operator] for operator in share)) - max_age
                ranked.append((-max(0, late), -sum(unsaved[operator] for operator in share), group, index))
    room = {cell.stage: k * cell.layers for cell in groups.cells}
    shares = [groups.needed(k)] * len(groups.cells)
    chosen: set[OperatorId] = set()
    for _, _, group, index in sorted(ranked):
        cell = groups.cells[index]
        if shares[index] and len(cell.shares[group]) <= room[cell.stage]:
            shares[index] -= 1
            room[cell.stage] -= len(cell.shares[group])
            chosen.update(cell.shares[group])
    return frozenset(chosen)


def overdue(groups: Groups, ages: Mapping[OperatorId, int], limit: int, count: int) -> list[int]:
    """Up to `count` groups with the oldest experts of those in which one has the age `limit` or more."""
    oldest = [max(ages[operator] for operator in members) for members in groups.members]
    late = [group for group in range(groups.count) if oldest[group] >= limit]
    return sorted(late, key=lambda group: (-oldest[group], group))[:count]


def to_persist(
    layers: Sequence[int], num_experts: int, offered: Iterable[OperatorId], k: int, ages: Mapping[OperatorId, int]
) -> Experts:
    """Of the experts in a snapshot, K per layer that were persisted longest ago, or all of a layer that has fewer."""
    found: dict[int, list[OperatorId]] = {layer: [] for layer in layers}
    for operator in offered:
        found[operator.layer].append(operator)
    sizes: dict[int, list[int]] = {}
    for layer, experts in found.items():
        sizes.setdefault(min(k, len(experts)), []).append(layer)
    chosen: set[OperatorId] = set()
    by_place = {(operator.layer, operator.expert): years for operator, years in ages.items()}
    for size, some in sizes.items():
        if size:
            rows = [[by_place[layer, index] for index in range(num_experts)] for layer in some]
            chosen.update(persist_selection(some, [one for layer in some for one in found[layer]], size, rows))
    return frozenset(chosen)


def age(iterations: Sequence[int], last: int) -> int:
    """How many of the ascending `iterations` came after `last`."""
    return len(iterations) - bisect_right(iterations, last)


def _unsaved_tokens(ledger: TokenLedger, state: PecState) -> dict[OperatorId, int]:
    """Tokens of each expert since its newest copy, those under way included."""
    rows = {layer: row for row, layer in enumerate(ledger.layers)}
    unsaved = ledger.unsaved(Level.SNAPSHOT)
    found = {operator: unsaved[rows[operator.layer]][operator.expert] for operator in state.last(Level.SNAPSHOT)}
    for iteration, experts in state.under_way(Level.SNAPSHOT):
        for operator in experts:
            captured = [
                copy for copy in state.captured[Level.SNAPSHOT].get(operator, ()) if copy.iteration == iteration
            ]
            if captured:
                found[operator] = ledger.tokens[rows[operator.layer]][operator.expert] - captured[-1].tokens
    return found
