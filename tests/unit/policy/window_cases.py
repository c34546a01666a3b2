"""What the tests of windows share: sizes to schedule, and how even a schedule could be at best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.policy.packing import partition
from megatron.core.dist_checkpointing.moe.policy.window import Schedule, load_of, schedule_of
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorSize, expert

Sizes = Mapping[OperatorId, OperatorSize]
WINDOWS = (2, 3, 6, 10, 20)


def named(*sizes: tuple[int, int]) -> dict[OperatorId, OperatorSize]:
    """Experts 0, 1, ... of one layer with these full and weights bytes."""
    return {expert(0, index): OperatorSize(*size) for index, size in enumerate(sizes)}


def byte_aware_schedule(
    ordered: Sequence[OperatorId],
    sizes: Sizes,
    budget: int,
    *,
    first_iteration: int = 0,
    window: int | None = None,
    pinned: Mapping[OperatorId, int] | None = None,
) -> Schedule:
    """The schedule of a rank for itself, around `pinned` operators that others have anchored in these steps."""
    load = load_of(ordered, sizes)
    pins = {at: pinned[operator] for at, operator in enumerate(ordered) if pinned and operator in pinned}
    return schedule_of(ordered, load, partition(load, budget, window, pins), first_iteration, budget)


def scheduled(sizes: Sizes, budget: int, window: int | None = None) -> Schedule:
    return byte_aware_schedule(list(sizes), sizes, budget, window=window)


def even_share_bytes(schedule: Schedule) -> int:
    """Bytes of each snapshot if all had the same, rounded up."""
    return -(-sum(schedule.load_bytes) // len(schedule.load_bytes))


def even_budget(sizes: Sizes, operators: Iterable[OperatorId], window: int) -> int:
    """5 % more than each of `window` snapshots would need if operators could be cut at will."""
    return math.ceil(fluid_bound([sizes[operator] for operator in operators], window) * Fraction(21, 20))


def fluid_bound(sizes: Sequence[OperatorSize], window: int) -> Fraction:
    """No partition has a smaller peak: with C in each step and ratio r, C (1 - (1 - r)^W) / r bytes can be anchored."""
    ratio = min(Fraction(size.weights_bytes, size.full_bytes) for size in set(sizes) if size.full_bytes)
    return sum(size.full_bytes for size in sizes) * ratio / (1 - (1 - ratio) ** window)


def alone_with_due_weights(schedule: Schedule, sizes: Sizes) -> int:
    """Bytes of the largest operator and the WEIGHTS still due where it is anchored."""
    largest = max(sizes[operator].full_bytes for group in schedule.window.groups for operator in group)
    due = found = 0
    for group in reversed(schedule.window.groups):
        if any(sizes[operator].full_bytes == largest for operator in group):
            found = max(found, largest + due)
        due += sum(sizes[operator].weights_bytes for operator in group)
    return found


def is_even(schedule: Schedule, sizes: Sizes) -> bool:
    even = even_share_bytes(schedule)
    return schedule.peak_bytes * 10 <= max(even * 11, alone_with_due_weights(schedule, sizes) * 10)


@st.composite
def some_sizes(draw: st.DrawFn) -> dict[OperatorId, OperatorSize]:
    """Operators of a few sizes that differ by orders of magnitude, in any order."""
    size = st.integers(0, 3).flatmap(lambda digits: st.integers(1, 10**digits))
    kinds = draw(st.lists(st.tuples(size, st.integers(1, 12)), min_size=1, max_size=4))
    members = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40))
    return named(*((weights * ratio, weights) for weights, ratio in members))


budgets = st.integers(0, 6).flatmap(lambda digits: st.integers(1, 10**digits))


def stalls(schedule: Schedule) -> tuple[int, ...]:
    """Bytes of each snapshot for which training has to wait."""
    return tuple(max(0, load - schedule.budget_bytes) for load in schedule.load_bytes)
