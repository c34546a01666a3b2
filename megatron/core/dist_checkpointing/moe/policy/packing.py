"""Packing of a window by bytes: which operators are saved in full in which step, so that the largest step is small.

Bin packing with a twist. The steps of a window are the bins, `cap` bytes each, and the operators are the items, in the
order in which they should be saved in full. An item weighs its full bytes in the step that saves it in full, and its
weights bytes in every EARLIER step, which has to carry its compute weights until then (MoEvement 3.2). So the steps are
filled from the last to the first: then what is due in a step, the weights of all that is already placed behind it, is
known before the step is filled.

Two ways to fill, and the better one counts:
- In order (`_in_order`): each step takes consecutive operators from the end of what remains, as many as fit. Of all
  packings that keep the order this one has the fewest steps.
- Bent order (`_bent`), first-fit decreasing with care: a step first takes the largest items, as long as no earlier step
  could take them (earlier steps carry more weights, so they only have less room), then small ones from the end of the
  order, as far as the weights that they add to earlier steps leave the largest remaining item its place. Items that do
  not fit are skipped, so the order bends only where it has to.

`fewest_steps` asks how many steps a cap needs, `most_even` halves the cap until no packing is found. Steps may be
partly full from the start (`Bins`): with operators that other ranks have pinned. Everything here works on positions in
the order and on whole bytes, so that all ranks compute the same packing. `partition` chooses caps and orders, `window`
speaks of operators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

_LOOK_AHEAD = 64  # runs tried for one gap: bounds the work, and how far the order bends
_HALVINGS = 14
_FEW_STEPS = 64  # tried before as many steps as there are operators

Positions = tuple[int, int]
"""Positions from start to stop, stop excluded."""

_WORTH_OF_ORDER = 50  # the order of anchoring is given up for one step less, or for 1/50 of the largest load


@dataclass(frozen=True)
class Items:
    """Operators to pack in the order of anchoring: full bytes, weights bytes, and the caller's numbers for them."""

    full: Sequence[int]
    weights: Sequence[int]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self, positions: Sequence[int]) -> Items:
        """Some of the operators, in the order of `positions`."""
        return Items(*([column[index] for index in positions] for column in (self.full, self.weights, self.numbers)))

    def ascending(self) -> Items:
        """First what adds least to the compute weights: small ones are left for gaps; equal ones as before."""
        return self.only(sorted(range(len(self)), key=lambda index: self.full[index] - self.weights[index]))

    @property
    def least_peak_bytes(self) -> int:
        """What the first snapshot of any window needs: compute weights of all, and the smallest operator in full."""
        return sum(self.weights) + min(full - weights for full, weights, _, _ in self.runs)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """(full, weights, start, stop) of consecutive operators of equal size."""
        lengths = [(size, sum(1 for _ in same)) for size, same in groupby(zip(self.full, self.weights, strict=True))]
        stops = accumulate(length for _, length in lengths)
        return tuple((*size, stop - length, stop) for (size, length), stop in zip(lengths, stops, strict=True))

    @cached_property
    def largest_first(self) -> tuple[int, ...]:
        """Runs by descending size, of equal ones the last in the order first."""
        return tuple(sorted(range(len(self.runs)), key=lambda run: (-self.runs[run][0], -run)))

    @cached_property
    def full_before(self) -> tuple[int, ...]:
        """Sum of full bytes in front of each position, and in total."""
        return tuple(accumulate(self.full, initial=0))

    @cached_property
    def weights_before(self) -> tuple[int, ...]:
        """Sum of weights bytes in front of each position, and in total."""
        return tuple(accumulate(self.weights, initial=0))

    def can_never_fit(self, steps: int, cap: int) -> bool:
        """Whether not even operators that could be cut into pieces would fit that many steps of `cap` bytes.

        Args:
            steps: How many steps there are.
            cap: Bytes that each step may hold.
        """
        unit = 1 << 32  # the least weights bytes per full byte, rounded down, in these units
        ratio = min((weights * unit // full for full, weights, _, _ in self.runs if full), default=0)
        placed = 0
        for _ in range(steps):
            placed += max(cap - placed * ratio // unit, 0)
            if placed >= self.full_before[-1]:
                return False
        return True


@dataclass(frozen=True)
class Bins:
    """Steps to fill, LAST step first: bytes in each already, and whether it has to get an operator.

    A step that holds more than the cap already gets nothing, and is no reason to fail unless it has to get something.
    """

    base: Sequence[int]
    needs_one: Sequence[bool]

    @cached_property
    def least_base_before(self) -> tuple[int | None, ...]:
        """For each step the smallest base of all steps before it; None for the first step."""
        least = list(accumulate(reversed(self.base), min))
        return (*reversed(least[:-1]), None) if least else ()

    @cached_property
    def leave(self) -> tuple[int, ...]:
        """For each step how many operators the steps before it need."""
        return tuple(_of_steps_before(accumulate(reversed(self.needs_one), initial=0)))

    def most_base_before(self, cap: int) -> list[int]:
        """For each step the largest base of all steps before it that is not above the cap."""
        within = (base if base <= cap else 0 for base in reversed(self.base))
        return _of_steps_before(accumulate(within, max, initial=0))

    @classmethod
    def around(cls, window: int, pinned: Sequence[tuple[int, int, int]], operators: int) -> Bins:
        """Steps around pinned operators; empty only if operators are too few.

        Args:
            window: The number of steps.
            pinned: Of each pinned operator its step from the first, full bytes and weights bytes.
            operators: How many operators remain to be placed.
        """
        full, weights, empty = [0] * window, [0] * window, [True] * window
        for step, full_bytes, weights_bytes in pinned:
            full[step] += full_bytes
            weights[step] += weights_bytes
            empty[step] = False
        due = accumulate(reversed(weights), initial=0)
        needs_one = empty[::-1] if sum(empty) <= operators else [False] * window
        return cls([own + later for own, later in zip(reversed(full), due, strict=False)], needs_one)


def _of_steps_before(totals: Iterable[int]) -> list[int]:
    """Running totals from the first step on, the initial 0 included, as what lies before each step, last step first."""
    return list(totals)[-2::-1]


@dataclass(frozen=True)
class Packing:
    """What each step saves in full, FIRST step first, and the largest load of those that were not above the cap."""

    steps: tuple[tuple[Positions, ...], ...]
    peak_bytes: int


def fewest_steps(items: Items, cap: int) -> int | None:
    """The fewest steps of `cap` bytes that bending the order, or keeping it, finds for all operators; None: neither.

    Args:
        items: The operators in the order of anchoring.
        cap: Bytes that each step may hold.
    """
    for limit in (min(_FEW_STEPS, len(items)), len(items)):
        bins = Bins([0] * limit, [False] * limit)
        found = [packing.steps for packing in (_bent(items, bins, cap), _in_order(items, bins, cap)) if packing]
        if found:
            return min(sum(map(bool, steps)) for steps in found)
    return None


def most_even(items: Items, bins: Bins, cap: int) -> Packing | None:
    """The packing with the lowest cap that halving finds below `cap`; None if that is not enough.

    Args:
        items: The operators in the order of anchoring.
        bins: The steps to fill.
        cap: Bytes that no step may exceed.
    """
    best = _pack(items, bins, cap)
    if best is None:
        return None
    low, high = max([items.weights_before[-1], *(base for base in bins.base if base <= cap)]), best.peak_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        packing = _pack(items, bins, middle) if middle < high else None
        if packing is None:
            low = middle
        else:
            best, high = packing, packing.peak_bytes
    return best


def _pack(items: Items, bins: Bins, cap: int) -> Packing | None:
    return _bent(items, bins, cap) or _in_order(items, bins, cap)


def _in_order(items: Items, bins: Bins, cap: int) -> Packing | None:
    """Consecutive operators only: of all such packings the one with the fewest steps.

    A step that needs an operator gets one: it has more room than any step before it, so what does not fit never does.
    """
    full, weights = items.full_before, items.weights_before
    stop, steps, peak = len(items), [], 0
    for base, leave in zip(bins.base, bins.leave, strict=True):
        due = base + weights[-1] - weights[stop]
        start = stop if due > cap else min(stop, max(leave, bisect_left(full, full[stop] - (cap - due))))
        if due > cap >= base:
            return None
        steps.append(((start, stop),) if start < stop else ())
        peak = max(peak, due + full[stop] - full[start]) if base <= cap else peak
        stop = start
    return None if stop else Packing(tuple(reversed(steps)), peak)


def _bent(items: Items, bins: Bins, cap: int) -> Packing | None:
    """Large items while no earlier step has room for them, then small ones from the end of the order."""
    remaining, peak = _Remaining(items), 0
    steps: list[tuple[Positions, ...]] = []
    columns = zip(bins.base, bins.least_base_before, bins.most_base_before(cap), bins.leave, strict=True)
    for base, least_before, most_before, leave in columns:
        due = base + remaining.due
        earlier_gap = None if least_before is None else cap - least_before - remaining.due
        if due > cap >= base or not remaining.fill(
            max(cap - due, 0), leave, earlier_gap, earlier_weights=cap - most_before - remaining.due
        ):
            return None
        if bins.needs_one[len(steps)] and not remaining.taken:
            return None
        steps.append(tuple(sorted(remaining.taken)))
        peak = max(peak, due + remaining.full) if base <= cap else peak
    return None if remaining.count else Packing(tuple(reversed(steps)), peak)


class _Remaining:
    """Operators that are not placed yet, and what one step after the other, from the last one, takes of them.

    A run is a row of operators of equal size; operators are taken from its end. `due` are the weights that all that was
    taken adds to every step before; `taken`, `full` and `weights` are of the step that was filled last.
    """

    def __init__(self, items: Items) -> None:
        self.items, self.runs = items, items.runs
        self.ends = [stop for _, _, _, stop in items.runs]
        self.count, self.count_full = len(items), items.full_before[-1]
        self.last_run, self.largest_at = len(items.runs) - 1, 0  # where to look for the next one, in order and by size
        self.due = self.full = self.weights = 0
        self.may_take = 0
        self.taken: list[Positions] = []

    def fill(self, gap: int, leave: int, earlier_gap: int | None, earlier_weights: int) -> bool:
        """Fill one step; False if what remains can then not be placed any more.

        gap: bytes that it can take. leave: operators that the steps before it need. earlier_gap: what the emptiest step
        before it could hold if this one added no weights; None if there is none. earlier_weights: the weights that the
        fullest step before it has room for.
        """
        self.taken, self.full, self.weights = [], 0, 0
        self.may_take = max(self.count - leave, 0)
        if not self.count:
            return True
        if self.count_full <= gap and not leave:
            for run, (_, _, start, _) in enumerate(self.runs):
                if self.ends[run] > start:
                    self._take(run, self.ends[run] - start)
        elif earlier_gap is None or earlier_gap < 0:
            return False
        else:
            self._take_large(gap, earlier_gap)
            # Weights that this step may add before the largest item that remains fits no earlier step.
            spare = min(earlier_gap - self._largest()[0], earlier_weights)
            if spare < self.weights:
                return False
            self._take_small(gap, spare)
        self.due += self.weights
        return True

    def _take(self, run: int, count: int) -> None:
        full, weights, _, _ = self.runs[run]
        self.ends[run] -= count
        self.taken.append((self.ends[run], self.ends[run] + count))
        self.full += full * count
        self.weights += weights * count
        self.may_take -= count
        self.count -= count
        self.count_full -= full * count

    def _largest(self) -> tuple[int, int]:
        """(full bytes, run) of the largest operator that remains; (0, -1) if none does."""
        order = self.items.largest_first
        while self.largest_at < len(order):
            run = order[self.largest_at]
            full, _, start, _ = self.runs[run]
            if self.ends[run] > start:
                return full, run
            self.largest_at += 1
        return 0, -1

    def _take_large(self, gap: int, earlier_gap: int) -> None:
        """Take the largest operators while no earlier step would have room for them, were this one filled with others.

        The others are taken to be average: as much weights per byte as all operators together.
        """
        all_full, all_weights = self.items.full_before[-1], self.items.weights_before[-1]
        while self.may_take:
            full, run = self._largest()
            weights = self.weights + (gap - self.full) * all_weights // max(all_full, 1)
            if run < 0 or self.full + full > gap or full + weights <= earlier_gap:
                return
            self._take(run, 1)

    def _take_small(self, gap: int, spare: int) -> None:
        """Take operators from the end of the order while they fit and this step has no more weights than `spare`."""
        tried, run = 0, self.last_run
        while run >= 0 and self.may_take and tried < _LOOK_AHEAD:
            full, weights, start, _ = self.runs[run]
            left = self.ends[run] - start
            count = min(left, self.may_take, _times(gap - self.full, full), _times(spare - self.weights, weights))
            if count:
                self._take(run, count)
            if count < left or tried:
                tried += 1
            else:
                self.last_run = run - 1
            run -= 1


def _times(room: int, size: int) -> int:
    """How many of this size fit."""
    return room // size if size else 1 << 62


def partition(
    load: Items, budget_bytes: int, window: int | None = None, pinned: Mapping[int, int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Numbers that each step anchors, ascending; the rules are those of `window`.

    A window with more steps than operators, or one whose pinned operators leave too few others, has empty steps.
    Nothing is validated.

    Args:
        load: The bytes of all operators, numbered from 0 in the order of anchoring.
        budget_bytes: Bytes that one step should not exceed.
        window: The number of steps; None: chosen by the budget.
        pinned: The step of some numbers; needs `window`.
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
