"""One window for ranks that own different operators: lanes, such as the expert-parallel ranks of pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from ..errors import UsageError
from ..types import OperatorId, Window
from .checks import whole
from .packing import Items
from .partition import partition
from .window import Schedule, Sizes, load_of, schedule_of

Lane = tuple[int, int]
"""Pipeline stage and expert-parallel rank, as `shards.owned_operators` names them."""

AnyLane = TypeVar("AnyLane", bound=tuple[int, ...])
"""A Lane, or a rank alone."""

Groups = tuple[tuple[int, ...], ...]


@dataclass
class _Lanes(Generic[AnyLane]):
    """Operators and sizes per lane; lanes of the same shape share one partition."""

    ordered: dict[AnyLane, tuple[OperatorId, ...]]
    loads: dict[AnyLane, Items]
    budget_bytes: int
    found: dict[object, Groups] = field(default_factory=dict)

    def groups(self, lane: AnyLane, window: int | None, pinned: Mapping[int, int]) -> Groups:
        load = self.loads[lane]
        shape = (tuple(load.full), tuple(load.weights), window, tuple(sorted(pinned.items())))
        if shape not in self.found:
            self.found[shape] = partition(load, self.budget_bytes, window, pinned)
        return self.found[shape]

    def schedules(self, window: int, first_iteration: int) -> dict[AnyLane, Schedule]:
        """Lanes with the most bytes choose freely; what they anchor is pinned for lanes that share it."""
        step_of: dict[OperatorId, int] = {}
        scheduled = {}
        for lane in sorted(self.ordered, key=lambda lane: (-sum(self.loads[lane].full), lane)):
            ordered = self.ordered[lane]
            pinned = {index: step_of[operator] for index, operator in enumerate(ordered) if operator in step_of}
            groups = self.groups(lane, window, pinned)
            step_of.update((ordered[index], step) for step, group in enumerate(groups) for index in group)
            scheduled[lane] = schedule_of(ordered, self.loads[lane], groups, first_iteration, self.budget_bytes)
        return {lane: scheduled[lane] for lane in sorted(scheduled)}


def joint_schedules(
    lanes: Mapping[AnyLane, Sequence[OperatorId]],
    sizes: Sizes | Mapping[AnyLane, Sizes],
    budget_bytes: int,
    *,
    first_iteration: int = 0,
    window: int | None = None,
) -> dict[AnyLane, Schedule]:
    """Byte-aware schedules of the same window size for all lanes of a job, by lane, ascending (MoEvement 3.5).

    Each lane's ranks copy only their own operators, given in the order of anchoring; `sizes` are bytes per rank, the
    same for all lanes or by lane, and `budget_bytes` is that of one rank. Operators in several lanes (non-experts) are
    anchored in the same step by all of them. The window is the largest that any lane needs on its own, or, if shared
    operators then keep a lane from fitting, the next larger one up to twice that size with which all fit that can.
    `window` forces it. A lane with fewer operators than iterations has empty steps. The result does not depend on the
    order of `lanes` or `sizes`.
    Raises UsageError for no lanes, a window below 1 or above the largest number of operators in a lane, and as
    `window.byte_aware_schedule`.
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
    if window is not None:
        return job.schedules(window, first_iteration)
    alone = {
        lane: schedule_of(ordered[lane], job.loads[lane], job.groups(lane, None, {}), first_iteration, budget_bytes)
        for lane in ordered
    }
    needed = max(schedule.window.size for schedule in alone.values())
    can_fit = [lane for lane, schedule in alone.items() if schedule.fits]
    for size in range(needed, min(2 * needed, most) + 1):
        schedules = job.schedules(size, first_iteration)
        if all(schedules[lane].fits for lane in can_fit):
            return schedules
    return job.schedules(needed, first_iteration)


def _sizes_of(lane: AnyLane, sizes: Sizes | Mapping[AnyLane, Sizes]) -> Sizes:
    own = sizes.get(lane)  # type: ignore[call-overload]
    return cast("Sizes", sizes) if own is None else own


def merge(schedules: Mapping[AnyLane, Schedule]) -> Window:
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
