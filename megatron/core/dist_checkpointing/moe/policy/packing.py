"""Packing of a window by bytes: boulders and sand, filled from the last step to the first.

An operator costs its full bytes in the step that anchors it and its weights bytes in every earlier one, so filling from
the back knows what each step still has room for. Everything here works on positions in the order of anchoring. The
order bends only where an operator does not fit: it is skipped, and smaller ones before it fill the gap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

_LOOK_AHEAD = 64  # runs tried for one gap: bounds the work, and how far the order bends
_HALVINGS = 14
_FEW_STEPS = 64  # tried before as many steps as there are operators

Piece = tuple[int, int]
"""Positions from start to stop, stop excluded."""


@dataclass(frozen=True)
class Load:
    """Operators to pack in the order of anchoring: full bytes, weights bytes, and the caller's numbers for them."""

    full: Sequence[int]
    weights: Sequence[int]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def only(self, positions: Sequence[int]) -> Load:
        """Some of the operators, in the order of `positions`."""
        return Load(*([column[index] for index in positions] for column in (self.full, self.weights, self.numbers)))

    def ascending(self) -> Load:
        """First what adds least to the WEIGHTS of all, so that sand is left for every gap; of equal size as before."""
        return self.only(sorted(range(len(self)), key=lambda index: self.full[index] - self.weights[index]))

    @property
    def least_peak_bytes(self) -> int:
        """What the first snapshot of any window needs at least: the WEIGHTS of all, and the smallest operator FULL."""
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
        """Whether not even operators that could be cut into pieces would fit that many steps of `cap` bytes."""
        unit = 1 << 32  # the least weights bytes per full byte, rounded down, in these units
        ratio = min((weights * unit // full for full, weights, _, _ in self.runs if full), default=0)
        placed = 0
        for _ in range(steps):
            placed += max(cap - placed * ratio // unit, 0)
            if placed >= self.full_before[-1]:
                return False
        return True


@dataclass(frozen=True)
class Room:
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
        return tuple(accumulate(reversed(self.needs_one), initial=0))[-2::-1]

    def most_base_before(self, cap: int) -> list[int]:
        """For each step the largest base of all steps before it that is not above the cap."""
        return list(accumulate((base if base <= cap else 0 for base in reversed(self.base)), max, initial=0))[-2::-1]

    @classmethod
    def around(cls, window: int, pinned: Sequence[tuple[int, int, int]], operators: int) -> Room:
        """`window` steps around pinned (step from the first, full, weights); empty only if operators are too few."""
        full, weights, empty = [0] * window, [0] * window, [True] * window
        for step, full_bytes, weights_bytes in pinned:
            full[step] += full_bytes
            weights[step] += weights_bytes
            empty[step] = False
        due = accumulate(reversed(weights), initial=0)
        needs_one = empty[::-1] if sum(empty) <= operators else [False] * window
        return cls([own + later for own, later in zip(reversed(full), due, strict=False)], needs_one)


@dataclass(frozen=True)
class Packing:
    """Pieces that each step anchors, FIRST step first, and the largest load of those that were not above the cap."""

    steps: tuple[tuple[Piece, ...], ...]
    peak_bytes: int


def fewest_steps(load: Load, cap: int) -> int | None:
    """The fewest steps of `cap` bytes that bending the order, or keeping it, finds for all operators; None: neither."""
    for limit in (min(_FEW_STEPS, len(load)), len(load)):
        room = Room([0] * limit, [False] * limit)
        found = [packing.steps for packing in (_bent(load, room, cap), _straight(load, room, cap)) if packing]
        if found:
            return min(sum(map(bool, steps)) for steps in found)
    return None


def most_even(load: Load, room: Room, cap: int) -> Packing | None:
    """The packing with the lowest cap that halving finds below `cap`; None if that is not enough."""
    best = _pack(load, room, cap)
    if best is None:
        return None
    low, high = max([load.weights_before[-1], *(base for base in room.base if base <= cap)]), best.peak_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        packing = _pack(load, room, middle) if middle < high else None
        if packing is None:
            low = middle
        else:
            best, high = packing, packing.peak_bytes
    return best


def _pack(load: Load, room: Room, cap: int) -> Packing | None:
    return _bent(load, room, cap) or _straight(load, room, cap)


def _straight(load: Load, room: Room, cap: int) -> Packing | None:
    """Consecutive operators only: of all such packings the one with the fewest steps.

    A step that needs an operator gets one: it has more room than any step before it, so what does not fit never does.
    """
    full, weights = load.full_before, load.weights_before
    stop, steps, peak = len(load), [], 0
    for base, leave in zip(room.base, room.leave, strict=True):
        due = base + weights[-1] - weights[stop]
        start = stop if due > cap else min(stop, max(leave, bisect_left(full, full[stop] - (cap - due))))
        if due > cap >= base:
            return None
        steps.append(((start, stop),) if start < stop else ())
        peak = max(peak, due + full[stop] - full[start]) if base <= cap else peak
        stop = start
    return None if stop else Packing(tuple(reversed(steps)), peak)


def _bent(load: Load, room: Room, cap: int) -> Packing | None:
    """Boulders while they still fit, then sand from the end of the order, as far as that leaves boulders their room."""
    filling, peak = _Filling(load), 0
    steps: list[tuple[Piece, ...]] = []
    columns = zip(room.base, room.least_base_before, room.most_base_before(cap), room.leave, strict=True)
    for base, least_before, most_before, leave in columns:
        due = base + filling.due
        filling.later_room = -1 if least_before is None else cap - least_before - filling.due
        filling.later_due = cap - most_before - filling.due
        if due > cap >= base or not filling.fill(max(cap - due, 0), leave):
            return None
        if room.needs_one[len(steps)] and not filling.pieces:
            return None
        steps.append(tuple(sorted(filling.pieces)))
        peak = max(peak, due + filling.full) if base <= cap else peak
    return None if filling.remaining else Packing(tuple(reversed(steps)), peak)


class _Filling:
    """Operators not placed yet, and what one step after the other, from the last one, takes of them.

    `later_room` is what the emptiest step before this one could hold if this one added no WEIGHTS, and -1 if there is
    none; `later_due` are the WEIGHTS that the fullest one of them has room for.
    """

    def __init__(self, load: Load) -> None:
        self.load, self.runs = load, load.runs
        self.ends = [stop for _, _, _, stop in load.runs]
        self.remaining, self.remaining_full = len(load), load.full_before[-1]
        self.top, self.big = len(load.runs) - 1, 0
        self.due = self.later_room = self.later_due = 0
        self.pieces: list[Piece] = []
        self.full = self.weights = self.count = 0

    def fill(self, gap: int, leave: int) -> bool:
        """Fill one step; False if what remains can then not be placed any more."""
        self.pieces, self.full, self.weights, self.count = [], 0, 0, max(self.remaining - leave, 0)
        if not self.remaining:
            return True
        if self.remaining_full <= gap and not leave:
            self._take_all()
        elif self.later_room < 0:
            return False
        else:
            self._take_boulders(gap)
            spare = min(self.later_room - self._largest()[0], self.later_due)
            if spare < self.weights:
                return False
            self._take_sand(gap, spare)
        self.due += self.weights
        return True

    def _take(self, run: int, count: int) -> None:
        full, weights, _, _ = self.runs[run]
        self.ends[run] -= count
        self.pieces.append((self.ends[run], self.ends[run] + count))
        self.full += full * count
        self.weights += weights * count
        self.count -= count
        self.remaining -= count
        self.remaining_full -= full * count

    def _take_all(self) -> None:
        for run, (_, _, start, _) in enumerate(self.runs):
            if self.ends[run] > start:
                self._take(run, self.ends[run] - start)

    def _largest(self) -> tuple[int, int]:
        """(full bytes, run) of the largest operator that remains; (0, -1) if none does."""
        order = self.load.largest_first
        while self.big < len(order) and self.ends[order[self.big]] == self.runs[order[self.big]][2]:
            self.big += 1
        return (self.runs[order[self.big]][0], order[self.big]) if self.big < len(order) else (0, -1)

    def _take_boulders(self, gap: int) -> None:
        """Take the largest operators while no earlier step would have room for them, were this one filled with sand."""
        all_full, all_weights = self.load.full_before[-1], self.load.weights_before[-1]
        while self.count:
            full, run = self._largest()
            weights = self.weights + (gap - self.full) * all_weights // max(all_full, 1)
            if run < 0 or self.full + full > gap or full + weights <= self.later_room:
                return
            self._take(run, 1)

    def _take_sand(self, gap: int, spare: int) -> None:
        """Take operators from the end of the order while they fit and this step has no more WEIGHTS than `spare`."""
        tried, run = 0, self.top
        while run >= 0 and self.count and tried < _LOOK_AHEAD:
            full, weights, start, _ = self.runs[run]
            left = self.ends[run] - start
            count = min(left, self.count, _times(gap - self.full, full), _times(spare - self.weights, weights))
            if count:
                self._take(run, count)
            if count < left or tried:
                tried += 1
            else:
                self.top = run - 1
            run -= 1


def _times(room: int, size: int) -> int:
    """How many of this size fit."""
    return room // size if size else 1 << 62
