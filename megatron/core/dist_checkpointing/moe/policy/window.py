"""Windows: in which order operators are anchored, and which in which iteration, by bytes.

Operators differ in size by orders of magnitude, and late snapshots carry less weights, so counting operators does not
say what a snapshot weighs: snapshot i has the full bytes of group i and the weights bytes of all later groups. Here a
rank gets the smallest window whose largest snapshot fits the budget, as even as can be. The order is kept where it
fits, bent where an operator is too large for a gap, and given up between operators of different size where that saves
an iteration or 2 % of the largest snapshot; equal ones always keep it.

Where the budget is too small for every window that is found, each operator that is larger than the cap is anchored
alone, at the end of the window, where the least weights come with it; for the others the cap is raised, from 10 % above
the least that any window needs (the compute weights of all, and the smallest operator in full) in steps of 10 %, until
a window is found. The last few per cent of a stall are thus not bought with a window many times as long.

Ranks that own different operators, such as the expert-parallel ranks of pipeline stages ("lanes"), get windows of one
size in which what they share is anchored in the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from operator import add, attrgetter
from typing import Any, Protocol, cast

from ..errors import UsageError
from ..types import OperatorId, OperatorKind, OperatorSize, Window
from .checks import whole
from .packing import Items, partition

# Orderings: which operators a window anchors first, and when to order again (MoEvement 3.5, App. B and E).

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


Sizes = Mapping[OperatorId, OperatorSize]

Lane = tuple[int, int]
"""Pipeline stage and expert-parallel rank."""
"""A Lane, or a rank alone."""
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """A window, the bytes that each of its snapshots copies, and the bytes that an iteration has time to copy.

    `why` says on one line why the largest snapshot does not fit the budget; it is empty if it does.
    """

    window: Window
    load_bytes: tuple[int, ...]
    budget_bytes: int
    why: str = field(default="", compare=False)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest snapshot."""
        return max(self.load_bytes)

    @property
    def fits(self) -> bool:
        """Whether no snapshot stalls training."""
        return self.peak_bytes <= self.budget_bytes


def schedule_of(
    ordered: Sequence[OperatorId], load: Items, groups: Sequence[Sequence[int]], first_iteration: int, budget: int
) -> Schedule:
    """The schedule that anchors given operators in each step.

    Args:
        ordered: The operators in the order of anchoring.
        load: Their bytes, by position in `ordered`.
        groups: The positions that each step anchors.
        first_iteration: The iteration of the first step.
        budget: Bytes that a snapshot may have without a stall.
    """
    window = Window(first_iteration, tuple(tuple(map(ordered.__getitem__, group)) for group in groups))
    loads = _loads_of(load, groups)
    return Schedule(window, loads, budget, _why(ordered, load, loads, budget))


def _loads_of(load: Items, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Bytes of each step: all of an operator that it anchors, and the weights of those anchored later."""
    full = [sum(map(load.full.__getitem__, group)) for group in groups]
    weights = [sum(map(load.weights.__getitem__, group)) for group in groups]
    return tuple(map(add, full, list(accumulate(reversed(weights), initial=0))[-2::-1]))


def _why(ordered: Sequence[OperatorId], load: Items, loads: tuple[int, ...], budget: int) -> str:
    stalls = [bytes_ - budget for bytes_ in loads if bytes_ > budget]
    if not stalls:
        return ""
    largest = max(range(len(load)), key=load.full.__getitem__)
    weights = sum(load.weights)
    if load.full[largest] > budget:
        reason = f"{ordered[largest]} alone has {load.full[largest]} bytes"
    elif load.least_peak_bytes > budget:
        reason = (
            f"the compute weights of all {len(load)} operators have {weights} bytes, and the first snapshot needs them"
        )
    else:
        reason = f"no window of {len(loads)} iterations was found in which less than {max(loads)} bytes come together"
    return (
        f"{reason}, but an iteration copies {budget}: training waits for {sum(stalls)} bytes in {len(stalls)} of"
        f" {len(loads)} iterations; raise the bandwidth, or lower the bytes per rank"
    )


def load_of(ordered: Sequence[OperatorId], sizes: Sizes) -> Items:
    """Bytes by position in `ordered`.

    Args:
        ordered: The operators in the order of anchoring, each once.
        sizes: Bytes of each operator.

    Raises:
        UsageError: There are no operators, or one occurs twice or has no size.
    """
    try:
        known = [sizes[operator] for operator in ordered]
    except KeyError as missing:
        raise UsageError(f"sizes has no entry for {missing.args[0]}: give the bytes of every operator") from None
    if not known:
        raise UsageError("ordered names no operators: a window needs at least 1")
    if len(set(ordered)) < len(ordered):
        twice = Counter(ordered).most_common(1)[0][0]
        raise UsageError(f"{twice} occurs more than once in the order: a window anchors each operator once")
    return Items([size.full_bytes for size in known], [size.weights_bytes for size in known], range(len(known)))


@lru_cache(maxsize=256)  # lanes are alike, and a new order of equal operators gives the same positions
def _partition(
    full: tuple[int, ...],
    weights: tuple[int, ...],
    budget_bytes: int,
    window: int | None,
    pinned: tuple[tuple[int, int], ...],
) -> Groups:
    return partition(Items(full, weights, range(len(full))), budget_bytes, window, dict(pinned))


class _Lanes[AnyLane: tuple[int, ...]]:
    """Operators and sizes per lane; lanes of the same shape share one partition.

    Of thousands of lanes few decide. The need of one on its own is looked at only where it does not fit. Lanes that
    share nothing with each other, as those of two stages, are scheduled apart, first where one did not fit last.
    """

    def __init__(
        self, ordered: dict[AnyLane, tuple[OperatorId, ...]], loads: dict[AnyLane, Items], budget: int
    ) -> None:
        self._ordered, self._loads, self._budget_bytes = ordered, loads, budget
        self._numbers: dict[AnyLane, tuple[int, ...]] = {}
        number: dict[OperatorId, int] = {}  # looked up once, not for each size that is tried
        shared: list[int] = []  # by number: another one of the same or an earlier lane, at last the same for all
        for lane in sorted(ordered, key=lambda lane: (-sum(loads[lane].full), lane)):
            mine = self._numbers[lane] = tuple(number.setdefault(one, len(number)) for one in ordered[lane])
            shared.extend(range(len(shared), len(number)))
            for one in mine:
                shared[_last(shared, one)] = _last(shared, mine[0])
        apart: dict[int, list[AnyLane]] = {}
        for lane, mine in self._numbers.items():
            apart.setdefault(_last(shared, mine[0]), []).append(lane)
        self._apart = list(apart.values())
        self._alone: dict[AnyLane, tuple[int, bool]] = {}
        self._packed: dict[tuple[Any, ...], Groups] = {}  # of thousands of lanes, for as long as they are planned
        self.needed = 0  # the largest window of a lane alone, as far as looked at
        self.need(self._apart[0][0])

    def need(self, lane: AnyLane) -> tuple[int, bool]:
        """The window of a lane alone, and whether it fits."""
        if lane not in self._alone:
            groups = self._groups(self._loads[lane], None, {})
            self._alone[lane] = len(groups), max(_loads_of(self._loads[lane], groups)) <= self._budget_bytes
            self.needed = max(self.needed, len(groups))
        return self._alone[lane]

    def _groups(self, load: Items, window: int | None, pinned: Mapping[int, int]) -> Groups:
        if window is None or len(pinned) < len(load):
            given = tuple(load.full), tuple(load.weights), self._budget_bytes, window, tuple(pinned.items())
            if given not in self._packed:
                self._packed[given] = _partition(*given)
            return self._packed[given]
        steps: list[list[int]] = [[] for _ in range(window)]
        for index, step in pinned.items():
            steps[step].append(index)
        return tuple(map(tuple, steps))

    def schedules(self, window: int, first_iteration: int, *, must_fit: bool = False) -> dict[AnyLane, Schedule]:
        """Lanes with the most bytes choose freely; what they anchor is pinned for lanes that share it.

        Empty where `must_fit`, and a lane does not that would fit alone, or needs a larger window.
        """
        found: dict[AnyLane, Groups] = {}
        for at, lanes in enumerate(self._apart):
            step_of: dict[int, int] = {}
            for lane in lanes:
                numbers, load = self._numbers[lane], self._loads[lane]
                pinned = {index: step_of[number] for index, number in enumerate(numbers) if number in step_of}
                groups = found[lane] = self._groups(load, window, pinned)
                if must_fit and max(_loads_of(load, groups)) > self._budget_bytes:
                    needed, could_fit = self.need(lane)
                    if could_fit or needed > window:
                        # With the next size first these again, then lanes not looked at yet.
                        self._apart = self._apart[at:] + self._apart[:at]
                        return {}
                step_of.update((numbers[index], step) for step, group in enumerate(groups) for index in group)
        return {
            lane: schedule_of(self._ordered[lane], self._loads[lane], found[lane], first_iteration, self._budget_bytes)
            for lane in sorted(found)
        }


def _last(others: list[int], number: int) -> int:
    while others[number] != number:
        others[number] = number = others[others[number]]
    return number


def joint_schedules[AnyLane: tuple[int, ...]](
    lanes: Mapping[AnyLane, Sequence[OperatorId]],
    sizes: Sizes | Mapping[AnyLane, Sizes],
    budget_bytes: int,
    *,
    first_iteration: int = 0,
    window: int | None = None,
) -> dict[AnyLane, Schedule]:
    """Byte-aware schedules of the same window size for all lanes of a job, by lane, ascending (MoEvement 3.5).

    Each lane's ranks copy only their own operators. Operators in several lanes (non-experts) are anchored in the same
    step by all of them. The window is the smallest with which all lanes fit that can, or, if shared operators keep one
    from it up to twice the largest that any lane needs on its own, this largest. A lane with fewer operators than
    iterations has empty steps. The result does not depend on the order of `lanes` or `sizes`.

    Args:
        lanes: The operators of each lane, in the order of anchoring.
        sizes: Bytes of operators on one rank, the same for all lanes or by lane.
        budget_bytes: Bytes that one rank may copy in an iteration without a stall.
        first_iteration: The iteration of the first step.
        window: The number of iterations; None: chosen as above.

    Raises:
        UsageError: A budget below 1, no lanes, a window below 1 or above the largest number of operators in a lane, and
            a lane without operators, with one twice, or with one that has no size.
    """
    whole("budget_bytes", budget_bytes, 1)
    if not lanes:
        raise UsageError("lanes names none: give the operators of at least 1")
    most = max(map(len, lanes.values()))
    if window is not None and not 1 <= window <= most:
        raise UsageError(
            f"window is {window}, but must be from 1 to the number of operators of the largest lane, {most}"
        )
    ordered = {lane: tuple(operators) for lane, operators in lanes.items()}
    loads = {lane: load_of(ordered[lane], _sizes_of(lane, sizes)) for lane in ordered}
    job = _Lanes(ordered, loads, budget_bytes)
    if window is None:
        size = job.needed
        while size <= min(2 * job.needed, most):
            schedules = job.schedules(size, first_iteration, must_fit=True)
            if schedules:
                return schedules
            size = max(size + 1, job.needed)
        window = max(job.need(lane)[0] for lane in ordered)
    return job.schedules(window, first_iteration)


def _sizes_of[AnyLane: tuple[int, ...]](lane: AnyLane, sizes: Sizes | Mapping[AnyLane, Sizes]) -> Sizes:
    own = sizes.get(lane)  # type: ignore[call-overload]
    return cast("Sizes", sizes) if own is None else own


def merge[AnyLane: tuple[int, ...]](schedules: Mapping[AnyLane, Schedule]) -> Window:
    """The window of the whole job: each operator once, in the step in which its lanes anchor it.

    Raises UsageError for no schedules, for windows that differ in size or first iteration, and for an operator that
    two lanes anchor in different steps.
    """
    windows = [schedules[lane].window for lane in sorted(schedules)]
    spans = {(window.first_iteration, window.size) for window in windows}
    if len(spans) != 1:
        raise UsageError(f"schedules have (first iteration, size) {sorted(spans)}, but must have one in common")
    step_of: dict[OperatorId, int] = {}
    for window in windows:
        for step, group in enumerate(window.groups):
            for operator in group:
                if step_of.setdefault(operator, step) != step:
                    raise UsageError(
                        f"{operator} is anchored in steps {step_of[operator]} and {step}: schedule jointly"
                    )
    groups: list[list[OperatorId]] = [[] for _ in windows[0].groups]
    for operator, step in step_of.items():
        groups[step].append(operator)
    return Window(windows[0].first_iteration, tuple(map(tuple, groups)))
