"""Orderings: which operators a window anchors first, and when to order again (MoEvement 3.5, App. B and E)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from operator import attrgetter
from typing import Any, Protocol

from ..errors import UsageError
from ..types import OperatorId, OperatorKind

type Counts = Mapping[OperatorId, int] | Mapping[OperatorId, float]
"""Tokens, or sums of gating probabilities, that each expert received; an expert that is not named received none."""

_BY_ID = attrgetter("layer", "kind", "expert")
_ENDS_OF_THE_MODEL = (OperatorKind.EMBEDDING, OperatorKind.HEAD)


class Ordering(Protocol):
    """Puts operators into the order in which a window anchors them, the first one first.

    An operator that comes late stays frozen for longer when a window is replayed, so what gets the most updates comes
    last. The result does not depend on the order of `operators`, each given once, or `counts`, and breaks ties by
    OperatorId. Counts must be the same on all ranks. Raises UsageError for counts below 0 or not finite.
    """

    def __call__(self, operators: Iterable[OperatorId], counts: Counts, /) -> tuple[OperatorId, ...]: ...


def hard_count(operators: Iterable[OperatorId], counts: Counts) -> tuple[OperatorId, ...]:
    """Experts by ascending number of tokens routed to them (MoEvement 3.5, A_j^l).

    Every token updates routers and non-experts, so they follow all experts (Fig. 6), and embedding and head, the
    largest single operators, end the order.

    Args:
        operators: The operators to order, each given once.
        counts: Tokens per expert, the same on all ranks; those of operators that are no experts are not looked at.

    Raises:
        UsageError: A count below 0 or not finite.
    """
    return _experts_first(operators, lambda experts: _checked(experts, counts))


def soft_count(operators: Iterable[OperatorId], counts: Counts) -> tuple[OperatorId, ...]:
    """As `hard_count`, with sums of gating probabilities for counts (MoEvement App. B, Soft-Count Popularity).

    The sums are floats: ranks agree on the order only if they were reduced over all of them before.
    Raises UsageError for a sum below 0 or not finite.
    """
    return hard_count(operators, counts)


def time_decayed(operators: Iterable[OperatorId], counts: Counts) -> tuple[OperatorId, ...]:
    """As `hard_count`, with the moving averages that `decay` maintains (MoEvement App. B, Time-Decayed Popularity).

    Raises UsageError for an average below 0 or not finite.
    """
    return hard_count(operators, counts)


def capacity_aware(
    operators: Iterable[OperatorId], counts: Counts, capacities: Mapping[OperatorId, float] | None = None
) -> tuple[OperatorId, ...]:
    """Experts by ascending count / capacity factor (MoEvement App. B, Capacity-Aware Ordering); the rest as before.

    Without capacities this is `hard_count`. Bind them with functools.partial. Quotients are compared exactly.

    Args:
        operators: The operators to order, each given once.
        counts: Tokens per expert, the same on all ranks.
        capacities: Capacity factors or tokens per batch, all in the same unit; an expert that is not named has 1.

    Raises:
        UsageError: A capacity not above 0 or not finite, or a count below 0 or not finite.
    """
    known = capacities or {}

    def utilizations(experts: list[OperatorId]) -> list[Any]:
        tokens = _checked(experts, counts)
        limits = [known.get(operator, 1) for operator in experts]
        for operator, limit in zip(experts, limits, strict=True):
            if not 0 < limit < math.inf:
                raise UsageError(f"capacity of {operator} is {limit}, but must be above 0 and finite")
        if len(set(limits)) <= 1:
            return tokens
        return [Fraction(count) / Fraction(limit) for count, limit in zip(tokens, limits, strict=True)]

    return _experts_first(operators, utilizations)


def layer_order(operators: Iterable[OperatorId], counts: Counts) -> tuple[OperatorId, ...]:
    """From the back of the model to its front (MoEvement App. E: dense models), within a layer as `hard_count`.

    The head comes first and the embedding last: while only the back layers are active, a replay needs no input
    gradients in front of them.

    Args:
        operators: The operators to order, each given once.
        counts: Tokens per expert, the same on all ranks.

    Raises:
        UsageError: A count below 0 or not finite.
    """
    return tuple(sorted(hard_count(operators, counts), key=attrgetter("layer"), reverse=True))


ORDERINGS: dict[str, Ordering] = {
    "popularity": hard_count,
    "soft-count": soft_count,
    "time-decayed": time_decayed,
    "capacity-aware": capacity_aware,
    "layer-order": layer_order,
}
"""Every ordering by the name that the command line gives it; a new one is a function and a line here."""


def should_reorder(previous: Counts, counts: Counts, threshold: float = 0.10, fraction: float = 0.25) -> bool:
    """Whether the frequencies of at least `fraction` of the experts changed by more than `threshold` (MoEvement 3.5).

    An expert's frequency is its share of its layer's tokens, so that a larger batch is no change; its change is
    relative to the previous share. The paper leaves this open. An expert that goes from no tokens to some has changed,
    whatever the threshold. Experts in either mapping are looked at; without any, or without a change, the answer is no.
    Integer counts are compared exactly, and so is a threshold as it is written in decimals.

    Args:
        previous: Tokens per expert when operators were last ordered.
        counts: Tokens per expert now.
        threshold: The relative change of a frequency above which an expert has changed; 0.10 is 10 %.
        fraction: The share of experts that have to change, above 0 and at most 1.

    Raises:
        UsageError: A threshold below 0 or not finite, a fraction not above 0 or above 1, and bad counts.
    """
    if not 0 <= threshold < math.inf:
        raise UsageError(f"reorder threshold is {threshold}, but must be at least 0 (0.10: a change of 10 %)")
    if not 0 < fraction <= 1:
        raise UsageError(f"reorder fraction is {fraction}, but must be above 0 and at most 1 (0.25: 25 % of experts)")
    experts = sorted({operator for operator in (*previous, *counts) if operator.is_expert}, key=_BY_ID)
    before, now = _checked(experts, previous), _checked(experts, counts)
    all_before, all_now = _layer_totals(experts, before), _layer_totals(experts, now)
    times, per = Fraction(str(threshold)).as_integer_ratio()
    changed = 0
    for operator, old, new in zip(experts, before, now, strict=True):
        # |new/all_now - old/all_before| > threshold old/all_before, without quotients: a layer may have no tokens yet.
        total_before, total_now = all_before[operator.layer], all_now[operator.layer]
        if old == 0 or total_now == 0:
            changed += old != new
        else:
            changed += abs(new * total_before - old * total_now) * per > times * old * total_now
    return changed > 0 and changed >= Fraction(str(fraction)) * len(experts)


def _experts_first(
    operators: Iterable[OperatorId], popularity: Callable[[list[OperatorId]], list[Any]]
) -> tuple[OperatorId, ...]:
    experts: list[OperatorId] = []
    others: list[OperatorId] = []
    ends: list[OperatorId] = []
    for operator in sorted(operators, key=_BY_ID):
        kind = operator.kind
        kinds = experts if kind is OperatorKind.EXPERT else ends if kind in _ENDS_OF_THE_MODEL else others
        kinds.append(operator)
    keys = popularity(experts)
    ascending = sorted(range(len(experts)), key=keys.__getitem__)
    return (*(experts[index] for index in ascending), *others, *ends)


def _checked(operators: Iterable[OperatorId], counts: Mapping[OperatorId, Any]) -> list[Any]:
    found = [counts.get(operator, 0) for operator in operators]
    if found and (min(found) < 0 or not sum(found) < math.inf):  # which one, only if any: this takes time
        for operator, count in zip(operators, found, strict=True):
            if not 0 <= count < math.inf:
                raise UsageError(f"count of {operator} is {count}, but must be at least 0 and finite")
    return found


def _layer_totals(experts: list[OperatorId], counts: list[Any]) -> dict[int, Any]:
    totals: dict[int, Any] = {}
    for operator, count in zip(experts, counts, strict=True):
        totals[operator.layer] = totals.get(operator.layer, 0) + count
    return totals
