"""Windows of a whole job: the order of its operators, the window that it needs, and the bytes of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, sub
from statistics import median
from typing import Any

from ...errors import UsageError
from ...policy.window import ORDERINGS, Counts, capacity_aware, joint_schedules, merge, should_reorder
from ...types import OperatorId, OperatorSize, Window, expert
from ..base import BufferSpec, Job, Throughput, constant_buffers
from ..interval_policy import Costs

Sizes = Mapping[int, Mapping[OperatorId, OperatorSize]]

UNKNOWN = OperatorSize(12, 2)
"""Bytes per parameter in mixed precision: where nobody has told the sizes, all operators count as equal."""
FADING = 16
"""Windows in which counts fade to about a third."""

DENSE_ORDERING, MOE_ORDERING = "layer-order", "popularity"


_WINDOWS = 3


@dataclass(frozen=True)
class Timetable:
    """The groups of a window (`types.Window`), the bytes of the largest snapshot of any rank, and the most that any
    rank has to copy in all.

    Which operators are anchored when follows from their order and from what each rank owns of them (MoEvement 3.5):
    the same on all ranks. replica_windows: of each owner, how many are kept. constants: memory for what never changes.
    operators: all that the groups hold, where somebody has that set already.
    """

    groups: tuple[tuple[OperatorId, ...], ...] = field(repr=False)
    peak_bytes: int
    full_bytes: int
    replica_windows: int = _WINDOWS
    constants: tuple[BufferSpec, ...] = field(default=(), repr=False)
    operators: frozenset[OperatorId] | None = field(default=None, repr=False, compare=False)

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
    def window(self) -> Window:
        """A window with these groups; those of other iterations share what it has made of its plans."""
        return Window(0, self.groups, self.operators)

    @cached_property
    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        """Three windows, own snapshots and replicas of each owner.

        One window is kept, one may still be replicated, one is being copied (MoEvement 3.2, "Persisting Snapshots").
        Of the last one the first snapshots are replicated before the others are copied; in `full`, where it has only
        one, two replicas suffice. With less room they would take that of the rank's own next snapshots.
        """
        replica = self.replica_windows * self.size
        first, *others = map(self.window.plan, range(self.size))
        own = BufferSpec(first, own=_WINDOWS * self.size, replica=replica, trainer=True, also=tuple(others))
        return (own, *self.constants)


def ordering_of(job: Job) -> str:
    """The name of the ordering that the flags ask for, or that suits the model."""
    return job.config.ordering or (MOE_ORDERING if job.moe_layers else DENSE_ORDERING)


def ordered(job: Job, counts: Counts) -> tuple[OperatorId, ...]:
    """The operators of a model in the order in which a window anchors them.

    Args:
        job: The job, with its operators and settings.
        counts: Tokens per expert.
    """
    ordering, capacities = ordering_of(job), job.config.ordering_capacities
    if ordering == "capacity-aware":
        by_expert = {op: capacities[op.expert] for op in job.changing if op.is_expert}
        return capacity_aware(job.changing, counts, by_expert)
    return ORDERINGS[ordering](job.changing, counts)


def timetable(job: Job, counts: Counts, *, window: int | None = None, budget_bytes: int = 0) -> Timetable:
    """The window of a given size, or the smallest one whose snapshots fit a budget on every rank.

    Each rank copies only what it owns, so each has its own bytes; the window is the largest that any rank needs.

    Args:
        job: The job, with the operators that each rank owns and their sizes.
        counts: Tokens per expert, which order the operators.
        window: The number of iterations; None: chosen by the budget.
        budget_bytes: Bytes that a snapshot may have on a rank; 0: any.

    Raises:
        UsageError: A window that is larger than the number of operators that any rank owns.
    """
    order = ordered(job, counts)
    sizes = job.changing_sizes or {0: dict.fromkeys(job.changing, UNKNOWN)}
    place = {operator: at for at, operator in enumerate(order)}
    # Each rank's own operators are sorted: to look for them in the order of all takes seconds with 1,000 ranks.
    owned = {(rank,): sorted(own.keys() & place.keys(), key=place.__getitem__) for rank, own in sizes.items() if own}
    lane_sizes = {(rank,): own for rank, own in sizes.items()}
    most = max(map(len, owned.values()))
    if window is not None and window > most:
        raise UsageError(
            f"--moe-ckpt-window {window} is more than the {most} operators that any rank owns a part of: lower it"
        )
    schedules = joint_schedules(owned, lane_sizes, budget_bytes or _everything(sizes), window=window)
    groups = _in_order(order, merge(schedules))
    return Timetable(
        groups,
        max(schedule.peak_bytes for schedule in schedules.values()),
        max(sum(size.full_bytes for size in own.values()) for own in sizes.values()),
        constants=constant_buffers(job),
        operators=job.changing_set if sum(map(len, groups)) == len(job.changing_set) else None,
    )


class NextTimetable:
    """What takes effect with the next window, operators in another order or another size; computed at the first call.

    Two threads may call it at once: both find the same.

    Args:
        job: The job, with the operators that each rank owns and their sizes.
        known: Which experts were used how much.
        table: Of the window under way, if any.
        reorders: Whether operators may be ordered again.
        budget_bytes: What the size is chosen for; None: it stays.
    """

    def __init__(
        self, job: Job, known: Popularity, table: Timetable | None, *, reorders: bool, budget_bytes: int | None
    ) -> None:
        self._job, self.known, self.table = job, known, table
        self.reorders, self.budget_bytes = reorders, budget_bytes
        self._found: tuple[Timetable | None, Timetable | None] | None = None

    def __call__(self) -> tuple[Timetable | None, Timetable | None]:
        """In another order, None where experts are used as before; for the budget, None without one."""
        if self._found is None:
            config, last, table, budget_bytes = self._job.config, self.known.last, self.table, self.budget_bytes
            reordered, needed = None, None
            changed = self.reorders and self.known.has_changed(config.reorder_threshold, config.reorder_fraction)
            if changed and table is not None:
                last = self.known.reordered(self.known).last
                reordered = timetable(self._job, last, window=table.size)
            if budget_bytes is not None:
                needed = table
                if table is None or not table.is_needed(budget_bytes):
                    needed = timetable(self._job, last, budget_bytes=budget_bytes)
            for found in (reordered, needed):
                _ = found and found.buffer_specs  # asked for next
            self._found = reordered, needed
        return self._found


def as_full(job: Job, counts: Counts) -> Timetable:
    """Everything in each snapshot, in as much room as `full` needs.

    Args:
        job: The job, with the operators that each rank owns and their sizes.
        counts: Tokens per expert, which order the operators.
    """
    return replace(timetable(job, counts, window=1), replica_windows=2)


def larger_window(job: Job, counts: Counts, table: Timetable) -> Timetable | None:
    """The next larger window, of at most twice the size, whose segments take less; None where there is none.

    Mostly there is none, as each iteration more stores the weights that wait once more.

    Args:
        job: The job, with the operators that each rank owns and their sizes.
        counts: Tokens per expert, which order the operators.
        table: The window to enlarge.
    """
    for size in range(table.size + 1, min(largest_window(job), 2 * table.size) + 1):
        found = timetable(job, counts, window=size)
        if found.size == size and size * found.peak_bytes < table.size * table.peak_bytes:
            return found
    return None


def largest_window(job: Job) -> int:
    """The number of iterations in which each snapshot of some rank still anchors an operator."""
    return max((len(own) for own in job.changing_sizes.values()), default=len(job.changing))


def _in_order(order: Sequence[OperatorId], window: Window) -> tuple[tuple[OperatorId, ...], ...]:
    """The groups, each in the order of anchoring; lanes were merged rank by rank."""
    place = {operator: at for at, operator in enumerate(order)}
    return tuple(tuple(sorted(group, key=place.__getitem__)) for group in window.groups)


def _everything(sizes: Sizes) -> int:
    return 1 + max(sum(size.full_bytes for size in own.values()) for own in sizes.values())


# How many bytes an iteration has time for, from what iterations, copies and replicas took lately (MoEvement 3.5).

MEASURED = 3
"""Iterations that are measured before the first decision; the first one of a start never counts."""

_REMEMBERED = 16
_HEADROOM = 0.8  # of what was measured: copies share memory and cores with training, and are never alike
_TOLERANCE = 0.2  # a budget that changes by less changes no window


@dataclass(frozen=True)
class Budget:
    """A value; each method returns the next one.

    passes_s, bandwidths: of the newest iterations (see `Throughput`). replicable: bytes that could have been
    replicated in an iteration each, at the pace of the newest snapshots. decided_bytes: for which the window was
    chosen; 0 if it never was. is_started: whether the first iteration of this start is over.
    """

    passes_s: tuple[float, ...] = ()
    bandwidths: tuple[float, ...] = ()
    replicable: tuple[float, ...] = ()
    decided_bytes: int = 0
    is_started: bool = False

    def throughput_measured(self, pace: Throughput) -> Budget:
        """With one more iteration; one of which nothing is known changes nothing."""
        if pace.iteration_s <= 0:
            return self
        if not self.is_started:
            return replace(self, is_started=True)
        passes, bandwidths = _with(self.passes_s, pace.iteration_s), _with(self.bandwidths, pace.bandwidth_bytes_per_s)
        return replace(self, passes_s=passes, bandwidths=bandwidths)

    def on_costs(self, costs: Costs, peak_bytes: int) -> Budget:
        """With one more snapshot that was replicated.

        Args:
            costs: What it took.
            peak_bytes: Bytes of the window's largest snapshot.
        """
        if costs.round_s <= 0 or not peak_bytes:
            return self
        return replace(self, replicable=_with(self.replicable, peak_bytes * costs.iteration_s / costs.round_s))

    def bytes_now(self) -> int | None:
        """What an iteration has time to copy, and to replicate.

        None until enough iterations were measured.
        """
        if len(self.passes_s) < MEASURED:
            return None
        found = median(self.passes_s) * median(self.bandwidths)
        if self.replicable:
            found = min(found, median(self.replicable))
        return max(1, int(_HEADROOM * found))

    def calls_for_another(self) -> int | None:
        """The bytes for which a window has to be chosen now; None as long as the one that was chosen will do."""
        found = self.bytes_now()
        if found is None or (self.decided_bytes and abs(found / self.decided_bytes - 1) <= _TOLERANCE):
            return None
        return found

    def decided(self, nbytes: int) -> Budget:
        """With a window that was chosen for these bytes."""
        return replace(self, decided_bytes=nbytes)

    def to_data(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "passes_s": list(self.passes_s),
            "bandwidths": list(self.bandwidths),
            "replicable": list(self.replicable),
            "decided_bytes": self.decided_bytes,
        }

    def from_data(self, data: Mapping[str, Any]) -> Budget:
        """This budget with what `to_data` told."""
        return replace(
            self,
            passes_s=tuple(data["passes_s"]),
            bandwidths=tuple(data["bandwidths"]),
            replicable=tuple(data["replicable"]),
            decided_bytes=data["decided_bytes"],
        )


def _with(values: Sequence[float], value: float) -> tuple[float, ...]:
    return (*values, value)[-_REMEMBERED:]


# How often experts are used, as far as it orders windows: what was counted, and what the last order was made from.

Rows = tuple[tuple[float, ...], ...]
"""By MoE layer and expert: whole numbers where they are summed, moving averages where older iterations fade."""

_UNADDED = 8


class _Sum:
    """Rows that are added up once somebody asks for them, which lanes do: training's thread has no time for it.

    Two threads may ask at once: both find the same. Where nobody asks, it adds up by itself from time to time.
    """

    def __init__(self, rows: Rows = (), changes: tuple[Callable[[Rows], Rows], ...] = ()) -> None:
        self._state = rows, changes  # replaced as one, so that no thread sees half of it

    @property
    def rows(self) -> Rows:
        """After all changes."""
        rows, changes = self._state
        for change in changes:
            rows = change(rows)
        self._state = rows, ()
        return rows

    def after(self, change: Callable[[Rows], Rows]) -> _Sum:
        """With one more change."""
        rows, changes = self._state
        return _Sum(rows, (*changes, change)) if len(changes) < _UNADDED else _Sum(self.rows, (change,))


@dataclass(frozen=True)
class Popularity:
    """A value; each method returns the next one.

    layers: those with experts, ascending. decay: how much of a moving average stays from one iteration to the next
    (alpha of MoEvement App. B, Time-Decayed); None: sums since the last order was made, which `faded` lets fade.
    ordered_by: what that order was made from, empty as long as there is none. refused: what one was made from for which
    there was no room.
    """

    layers: tuple[int, ...]
    decay: float | None = None
    ordered_by: Rows = field(default=(), repr=False)
    refused: Rows = field(default=(), repr=False)
    _sum: _Sum = field(default_factory=_Sum, repr=False)

    @property
    def counts(self) -> Rows:
        """What was counted; it may have to be added up first."""
        return self._sum.rows

    def on_token_counts(self, counts: Sequence[Sequence[int]]) -> Popularity:
        """With one more iteration."""
        alpha, news = self.decay, tuple(map(tuple, counts))

        def added(rows: Rows) -> Rows:
            if not rows:
                return news if alpha is None else tuple(tuple((1 - alpha) * one for one in row) for row in news)
            pairs = zip(rows, news, strict=True)
            if alpha is None:
                return tuple(tuple(map(add, old, new)) for old, new in pairs)
            return tuple(
                tuple(alpha * a + (1 - alpha) * b for a, b in zip(old, new, strict=True)) for old, new in pairs
            )

        return replace(self, _sum=self._sum.after(added))

    def has_changed(self, threshold: float, fraction: float) -> bool:
        """Whether the operators are to be ordered again (MoEvement 3.5).

        Args:
            threshold: The relative change of a frequency above which an expert has changed.
            fraction: The share of experts that have to change.
        """
        last = self._by_expert(self.refused or self.ordered_by)
        return bool(self.counts) and should_reorder(last, self._by_expert(self.counts), threshold, fraction)

    def reordered(self, known: Popularity) -> Popularity:
        """With an order that is made from what was counted when it was `known`; sums are of what came since then."""
        before = known.counts
        if self.decay is not None:
            return replace(self, ordered_by=before, refused=())

        def since(rows: Rows) -> Rows:
            if rows == before:
                return ()
            return tuple(tuple(map(sub, now, then)) for now, then in zip(rows, before, strict=True))

        return replace(self, ordered_by=before, refused=(), _sum=self._sum.after(since))

    def faded(self) -> Popularity:
        """At the end of a window that keeps its order: else old counts would outweigh the more, the longer it is kept.

        A change of frequencies that lasts is seen in some windows, however long they were the same before.
        """
        if self.decay is not None:
            return self
        return replace(self, _sum=self._sum.after(lambda rows: tuple(tuple(n - n // FADING for n in r) for r in rows)))

    def refusing(self, former: Popularity) -> Popularity:
        """Whose last order, if it is not that of `former`, found no room: this one stays until use changes again."""
        refused = self.refused if self.ordered_by == former.ordered_by else self.ordered_by
        return replace(self, ordered_by=former.ordered_by, refused=refused)

    @property
    def last(self) -> Mapping[OperatorId, float]:
        """What the last order was made from, by expert."""
        return self._by_expert(self.ordered_by)

    def to_data(self) -> dict[str, Any]:
        """As JSON values."""
        rows = {"counts": self.counts, "ordered_by": self.ordered_by, "refused": self.refused}
        return {name: [list(row) for row in found] for name, found in rows.items()}

    def from_data(self, data: Mapping[str, Any]) -> Popularity:
        """This popularity with the counts of `to_data`."""
        names = "counts", "ordered_by", "refused"  # the last is not in what earlier versions wrote
        counts, ordered_by, refused = (tuple(map(tuple, data.get(name, ()))) for name in names)
        return replace(self, ordered_by=ordered_by, refused=refused, _sum=_Sum(counts))

    def _by_expert(self, rows: Rows) -> dict[OperatorId, float]:
        layers = zip(self.layers, rows, strict=False)
        return {expert(layer, index): count for layer, row in layers for index, count in enumerate(row)}
