"""Windows of a whole job: the order of its operators, the window that it needs, and the bytes of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...errors import UsageError
from ...policy.ordering import ORDERINGS, Counts, capacity_aware
from ...policy.window import joint_schedules, merge
from ...types import OperatorId, OperatorSize, Window
from ..base import BufferSpec, Job, constant_buffers

Sizes = Mapping[int, Mapping[OperatorId, OperatorSize]]

UNKNOWN = OperatorSize(12, 2)
"""Bytes per parameter in mixed precision: where nobody has told the sizes, all operators count as equal."""

DENSE_ORDERING, MOE_ORDERING = "layer-order", "popularity"


_WINDOWS = 3


@dataclass(frozen=True)
class Timetable:
    """The groups of a window (`types.Window`), the bytes of the largest snapshot of any rank, and the most that any
    rank has to copy in all.

    Which operators are anchored when follows from their order and from what each rank owns of them (MoEvement 3.5):
    the same on all ranks. replica_windows: of each owner, how many are kept. constants: memory for what never changes.
    """

    groups: tuple[tuple[OperatorId, ...], ...] = field(repr=False)
    peak_bytes: int
    full_bytes: int
    replica_windows: int = _WINDOWS
    constants: tuple[BufferSpec, ...] = field(default=(), repr=False)

    def is_needed(self, budget_bytes: int) -> bool:
        """Whether a window of this size fits the budget, and a smaller one certainly does not."""
        could_be_smaller = self.size > 1 and budget_bytes * (self.size - 1) >= self.full_bytes
        return self.peak_bytes <= budget_bytes and not could_be_smaller

    @property
    def is_as_full(self) -> bool:
        """Whether it is a window of one iteration that takes no more room than `full`."""
        return self.replica_windows < _WINDOWS

    @property
    def size(self) -> int:
        """W, the iterations of a window."""
        return len(self.groups)

    @cached_property
    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        """Three windows, own snapshots and replicas of each owner.

        One window is kept, one may still be replicated, one is being copied (MoEvement 3.2, "Persisting Snapshots").
        Of the last one the first snapshots are replicated before the others are copied; in `full`, where it has only
        one, two replicas suffice. With less room they would take that of the rank's own next snapshots.
        """
        replica = self.replica_windows * self.size
        window = Window(0, self.groups)
        first, *others = (window.plan(step) for step in range(window.size))
        own = BufferSpec(first, own=_WINDOWS * self.size, replica=replica, trainer=True, also=tuple(others))
        return (own, *self.constants)


def ordering_of(job: Job) -> str:
    """The name of the ordering that the flags ask for, or that suits the model."""
    return job.config.ordering or (MOE_ORDERING if job.moe_layers else DENSE_ORDERING)


def ordered(job: Job, counts: Counts) -> tuple[OperatorId, ...]:
    """The operators of a model in the order in which a window anchors them."""
    ordering, capacities = ordering_of(job), job.config.ordering_capacities
    if ordering == "capacity-aware":
        by_expert = {op: capacities[op.expert] for op in job.changing if op.is_expert}
        return capacity_aware(job.changing, counts, by_expert)
    return ORDERINGS[ordering](job.changing, counts)


def timetable(job: Job, counts: Counts, *, window: int | None = None, budget_bytes: int = 0) -> Timetable:
    """The window of this size, or the smallest one whose snapshots fit `budget_bytes` (0: any) on every rank.

    Each rank copies only what it owns, so each has its own bytes; the window is the largest that any rank needs.
    Raises UsageError for a window that is larger than the number of operators that any rank owns.
    """
    order = ordered(job, counts)
    sizes = job.changing_sizes or {0: dict.fromkeys(job.changing, UNKNOWN)}
    owned = {(rank,): [one for one in order if one in own] for rank, own in sizes.items() if own}
    lane_sizes = {(rank,): own for rank, own in sizes.items()}
    most = max(map(len, owned.values()))
    if window is not None and window > most:
        raise UsageError(
            f"--moe-ckpt-window {window} is more than the {most} operators that any rank owns a part of: lower it"
        )
    schedules = joint_schedules(owned, lane_sizes, budget_bytes or _everything(sizes), window=window)
    return Timetable(
        _in_order(order, merge(schedules)),
        max(schedule.peak_bytes for schedule in schedules.values()),
        max(sum(size.full_bytes for size in own.values()) for own in sizes.values()),
        constants=constant_buffers(job),
    )


def as_full(job: Job, counts: Counts) -> Timetable:
    """Everything in each snapshot, in as much room as `full` needs."""
    return replace(timetable(job, counts, window=1), replica_windows=2)


def larger_window(job: Job, counts: Counts, table: Timetable) -> Timetable | None:
    """The next larger window, of at most twice the size, whose segments take less; None where there is none.

    Mostly there is none, as each iteration more stores the weights that wait once more.
    """
    most = max((len(own) for own in job.changing_sizes.values()), default=len(job.changing))
    for size in range(table.size + 1, min(most, 2 * table.size) + 1):
        found = timetable(job, counts, window=size)
        if found.size == size and size * found.peak_bytes < table.size * table.peak_bytes:
            return found
    return None


def _in_order(order: Sequence[OperatorId], window: Window) -> tuple[tuple[OperatorId, ...], ...]:
    """The groups, each in the order of anchoring; lanes were merged rank by rank."""
    place = {operator: at for at, operator in enumerate(order)}
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in window.groups)


def _everything(sizes: Sizes) -> int:
    return 1 + max(sum(size.full_bytes for size in own.values()) for own in sizes.values())
