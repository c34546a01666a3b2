"""Partition of operators into the steps of a window: how many steps, under which cap, and in which order to pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .packing import Bins, Items, Packing, fewest_steps, most_even

_WORTH_OF_ORDER = 50  # the order of anchoring is given up for one step less, or for 1/50 of the largest load


def partition(
    load: Items, budget_bytes: int, window: int | None = None, pinned: Mapping[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Numbers that each step anchors, ascending; the rules are those of `window.byte_aware_schedule`.

    The operators of `load` are numbered from 0 in the order of anchoring. `pinned` gives the step of some numbers and
    needs `window`. A window with more steps than operators, or one whose pinned operators leave too few others, has
    empty steps. Nothing is validated.
    """
    fixed = dict(pinned or {})
    for cap in _caps(load, budget_bytes):
        alone = _too_large(_without(load, fixed), cap)
        steps = window or _steps_needed(load, alone, cap)
        if steps is not None:
            taken = set(fixed.values())
            open_steps = [step for step in reversed(range(steps)) if step not in taken]
            pins = fixed | dict(zip(alone, open_steps, strict=False))
            found = _most_even_around(load, pins, steps, cap)
            if found is not None:
                return found
    raise AssertionError("caps grow until one step holds everything")


def _caps(load: Items, budget_bytes: int) -> Iterator[int]:
    """The budget, then caps from 10 % above the least that any window needs, in steps of 10 %."""
    cap = budget_bytes
    yield cap
    cap = max(cap, load.least_peak_bytes)
    while True:
        cap = cap * 11 // 10 + 1
        yield cap


def _steps_needed(load: Items, alone: Sequence[int], cap: int) -> int | None:
    """The smallest window that is found for `cap`; None if there is none."""
    if sum(load.weights) > cap:
        return None  # also where all are too large: else each would get an iteration of its own
    rest, room = _without(load, alone), cap - sum(load.weights[number] for number in alone)
    steps = fewest_steps(rest, room)
    if steps is None or not rest.can_never_fit(steps - 1, room):
        steps = min((n for n in (steps, fewest_steps(rest.ascending(), room)) if n is not None), default=None)
    return None if steps is None else steps + len(alone)


def _most_even_around(
    load: Items, pins: Mapping[int, int], window: int, cap: int
) -> tuple[tuple[int, ...], ...] | None:
    """The most even partition around pinned positions, in order unless that costs too much; None: not below `cap`."""
    rest = _without(load, pins)
    pinned = [(step, load.full[number], load.weights[number]) for number, step in pins.items()]
    bins = Bins.around(window, pinned, len(rest))
    in_order = most_even(rest, bins, cap)
    good_enough = in_order.peak_bytes * (_WORTH_OF_ORDER - 1) // _WORTH_OF_ORDER if in_order else cap
    if in_order and rest.can_never_fit(window, good_enough):
        return _groups(rest, in_order, pins)
    ascending = rest.ascending()
    by_size = most_even(ascending, bins, cap)
    if by_size and (in_order is None or by_size.peak_bytes < good_enough):
        return _groups(ascending, by_size, pins)
    return _groups(rest, in_order, pins) if in_order else None


def _groups(load: Items, packing: Packing, pins: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
    groups = [[number for start, stop in pieces for number in load.numbers[start:stop]] for pieces in packing.steps]
    for number, step in pins.items():
        groups[step].append(number)
    return tuple(tuple(sorted(group)) for group in groups)


def _without(load: Items, numbers: Sequence[int] | Mapping[int, int]) -> Items:
    left_out = set(numbers)
    return load.only([index for index in range(len(load)) if index not in left_out]) if left_out else load


def _too_large(load: Items, cap: int) -> list[int]:
    """Numbers of operators that fit no step beside the weights of others that are too large; the largest first."""
    found, reserved = [], 0
    if max(load.full, default=0) > cap:
        for index in sorted(range(len(load)), key=lambda index: (-load.full[index], -index)):
            if load.full[index] + reserved <= cap:
                break
            found.append(load.numbers[index])
            reserved += load.weights[index]
    return found
