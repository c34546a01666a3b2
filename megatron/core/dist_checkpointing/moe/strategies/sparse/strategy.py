"""`sparse`: every iteration a part, each operator in full once in a window of W iterations (MoEvement 3.2); exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from ...config import MoECheckpointConfig
from ...policy.tracking import PLACES
from ...types import Level, Piece, RecoveryPlan, SnapshotPlan, Window
from ..base import NO_BUFFERS, BufferSpec, Job, Strategy, Throughput
from ..interval_policy import Costs, cut
from .windows import (
    Budget,
    NextTimetable,
    Popularity,
    Timetable,
    as_full,
    larger_window,
    largest_window,
    ordering_of,
    timetable,
)

KIND = "window"
AUTO = "auto"
_COUNTING = ("popularity", "soft-count", "time-decayed", "capacity-aware")
_REMEMBERED = 4  # windows: one under way, one still replicated, one being persisted, and one to spare


@dataclass(frozen=True)
class _Begun:
    """A window that was begun, and how many of its snapshots all ranks have sealed."""

    window: Window
    planned: int = 0
    sealed: int = 0

    @property
    def span(self) -> range:
        """Its iterations."""
        return range(self.window.first_iteration, self.window.last_iteration + 1)

    @property
    def next(self) -> int:
        """The iteration whose snapshot is planned next; the one after the last if all are."""
        return self.window.first_iteration + self.planned


@dataclass(frozen=True)
class _Windows:
    """The newest windows, oldest first; those that were given up are forgotten."""

    begun: tuple[_Begun, ...] = field(default=(), repr=False)

    def of(self, iteration: int) -> _Begun | None:
        """The window that this iteration belongs to."""
        return next((one for one in self.begun if iteration in one.span), None)

    def began(self, window: Window) -> _Windows:
        """With another one."""
        return _Windows((*self.begun, _Begun(window))[-_REMEMBERED:])

    def put(self, begun: _Begun) -> _Windows:
        """With another value of a window that is there."""
        return _Windows(tuple(begun if one.span == begun.span else one for one in self.begun))

    def without_begun(self) -> _Windows:
        """Without the newest one if no more of it was planned than its first snapshot, which no rank has sealed."""
        is_new = bool(self.begun) and self.begun[-1].planned <= 1 and not self.begun[-1].sealed
        return _Windows(self.begun[:-1]) if is_new else self

    def without(self, iteration: int) -> _Windows:
        """Without the window of this iteration."""
        return _Windows(tuple(one for one in self.begun if iteration not in one.span))


def _bad_ordering(config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
    capacities, default = config.ordering_capacities, MoECheckpointConfig()
    named = " ".join(f"{one:g}" for one in capacities)
    reorders = {name: getattr(config, name) for name in ("reorder_threshold", "reorder_fraction")}
    if config.ordering == "layer-order" and any(getattr(default, name) != value for name, value in reorders.items()):
        yield "--moe-ckpt-reorder-threshold and -fraction have no effect with --moe-ckpt-ordering layer-order"
    if config.ordering_decay >= 1:
        yield f"--moe-ckpt-ordering-decay {config.ordering_decay} must be below 1: nothing new would ever count"
    if config.ordering_decay != default.ordering_decay and config.ordering != "time-decayed":
        yield "--moe-ckpt-ordering-decay has an effect only with --moe-ckpt-ordering time-decayed"
    if capacities and config.ordering != "capacity-aware":
        yield "--moe-ckpt-ordering-capacities has an effect only with --moe-ckpt-ordering capacity-aware"
    elif config.ordering == "capacity-aware" and len(set(capacities)) < 2:
        yield (
            "--moe-ckpt-ordering capacity-aware needs --moe-ckpt-ordering-capacities, which differ from expert to"
            " expert: with equal capacities it is --moe-ckpt-ordering popularity"
        )
    elif capacities and (len(capacities) != num_experts or min(capacities) <= 0):
        yield (
            f"--moe-ckpt-ordering-capacities {named} must be one number above 0 for each of the {num_experts} experts"
            " of a layer"
        )


class Sparse(Strategy):
    """Windows one after the other: the snapshot of each iteration has some operators in full and the compute weights
    of later ones.

    Window. `--moe-ckpt-window` iterations; with `auto` as few as fit what an iteration has time to copy and replicate
    (`Budget`), on the rank with the most bytes (MoEvement 3.5, Algorithm 1, by bytes in place of counts). Until that
    is known no snapshots are taken. It changes between windows only.

    Order. `--moe-ckpt-ordering`; experts are ordered again, between windows, when the shares of enough of them have
    changed until the last snapshot of a window is planned (MoEvement 3.5): another thread then has an iteration to find
    the next order. The most used is anchored last, and so is frozen for longest in a replay.

    Failure. When a snapshot of a window fails on any rank, the window restores nothing: it is given up, and the next
    iteration begins another one.

    Rooms. A window is worth what a snapshot of `full` is, so three windows of own snapshots and of each owner's
    replicas suffice: the one before stays until the next is whole and protected (MoEvement 3.2).

    Memory. What it has no room for is given up in this order, each step once for each window that is chosen: logs of
    the oldest iterations, in steps of a window; a window that was grown; a window for a larger one that takes less,
    as few operators fill it more evenly; the window for everything at once, as in `full`; everything.

    Storage. Every `--moe-ckpt-persist-interval` iterations a whole window goes to storage.
    """

    replays = True
    plans_by_sizes = True
    settings = ("window", "ordering", "reorder_", "replay_")

    @classmethod
    def contradictions(cls, config: MoECheckpointConfig, num_experts: int) -> Iterator[str]:
        """As `Strategy.contradictions`."""
        whole = config.window.isascii() and config.window.isdigit() and int(config.window) >= 1
        if config.window != AUTO and not whole:
            yield f"invalid --moe-ckpt-window {config.window} (expected auto or a number of iterations above 0)"
        if not 0 < config.reorder_fraction <= 1:
            yield f"--moe-ckpt-reorder-fraction {config.reorder_fraction} must be above 0, and at most 1"
        yield from _bad_ordering(config, num_experts)
        if config.interval != 1 or config.interval_policy != "fixed":
            given = (
                f"interval {config.interval}" if config.interval != 1 else f"interval-policy {config.interval_policy}"
            )
            yield (
                f"--moe-ckpt-{given} has no meaning with --moe-ckpt-strategy sparse, which snapshots a part of the"
                " state after every iteration; --moe-ckpt-window says in how many of them all of it is snapshotted"
            )
        if config.shard != "none":
            yield (
                f"--moe-ckpt-shard {config.shard} is for snapshots of all operators, but those of --moe-ckpt-strategy"
                " sparse hold a part of them; use --use-distributed-optimizer to share state out"
            )

    def __init__(self, job: Job) -> None:
        config, ordering = job.config, ordering_of(job)
        super().__init__(job)
        self._ordering = ordering
        self.counts_tokens = any(one.is_expert for one in job.changing) and ordering in _COUNTING
        self.counts_gates = self.counts_tokens and ordering == "soft-count"
        self._fixed = None if config.window == AUTO else int(config.window)
        self.needs_throughput = self._fixed is None
        self._popularity = Popularity(job.moe_layers, config.ordering_decay if ordering == "time-decayed" else None)
        self._budget = Budget()
        self._windows = _Windows()
        self._table: Timetable | None = None
        # With its logs and count of orders: what holds again where memory has no room for the table chosen after it.
        self._former: tuple[Timetable | None, int, int, Popularity] | None = None
        self._next: NextTimetable | None = None
        self._log_windows = PLACES
        if self._fixed is not None:
            self._table = timetable(job, {}, window=self._fixed)

    @property
    def lookback(self) -> int:
        """A window that is kept, one that is replicated, and one that is begun."""
        return PLACES * self._table.size if self._table is not None else 0

    @property
    def keeps_logs(self) -> bool:
        return self._log_windows > 0

    @property
    def logged(self) -> int:
        """Of the newest iterations; where they are fewer than `lookback`, some faults roll back all stages."""
        return self._log_windows * self._table.size if self._table is not None else 0

    def due(self, iteration: int) -> bool:
        """In every iteration, once the window is known."""
        return self._table is not None

    def plan(self, iteration: int) -> SnapshotPlan | None:
        """The next snapshot of the window under way, or the first one of a new window."""
        begun = self._windows.of(iteration)
        if begun is None or iteration != begun.next:
            self._schedule()
            if self._table is None:
                return None
            self._windows = self._windows.without(iteration).began(self._table.window.beginning(iteration))
            begun = self._windows.begun[-1]
        self._windows = self._windows.put(replace(begun, planned=begun.planned + 1))
        plan = begun.window.plan(iteration)
        if iteration != begun.span[0]:
            return plan
        return self._with_constants(plan, last_iteration=begun.span[-1])

    def ahead(self) -> Callable[[], None] | None:
        """The next window, once the last snapshot of this one is planned, from what all ranks know by then.

        The first one as well: it begins an iteration after it could have been found.
        """
        begun = self._windows.begun[-1:]
        is_over = begun[0].planned == begun[0].window.size if begun else self._table is None
        if not is_over or self._gave_up:
            return None
        coming = self._next = self._next_timetable()

        def find() -> None:
            coming()

        return find if coming.reorders or coming.budget_bytes is not None else None

    def pieces(self, plan: SnapshotPlan) -> tuple[Piece, ...]:
        """All in one, which restores a state together with the rest of its window."""
        begun = self._windows.of(plan.iteration)
        return cut(Piece(KIND, plan, begun.span if begun else range(0)))

    def persistent(self, plan: SnapshotPlan) -> tuple[SnapshotPlan, ...]:
        """A whole window, once its last snapshot has settled."""
        begun = self._windows.of(plan.iteration)
        if begun is None or plan.iteration != begun.span[-1] or begun.sealed < begun.window.size:
            return ()
        due, self._interval_policy = self._interval_policy.persist_due(plan.iteration)
        return self._handed_on(tuple(map(begun.window.plan, begun.span))) if due else ()

    def buffer_specs(self) -> tuple[BufferSpec, ...]:
        return self._table.buffer_specs if self._table else NO_BUFFERS

    def on_token_counts(self, iteration: int, counts: Sequence[Sequence[int]]) -> None:
        """As `Strategy.on_token_counts`."""
        self._popularity = self._popularity.on_token_counts(counts)

    def on_commit(self, plan: SnapshotPlan, level: Level, ok: bool) -> None:
        """As `Strategy.on_commit`."""
        super().on_commit(plan, level, ok)
        begun = self._windows.of(plan.iteration)
        if level is not Level.SNAPSHOT or begun is None:
            return
        if ok:
            self._windows = self._windows.put(replace(begun, sealed=begun.sealed + 1))
        else:
            self._windows = self._windows.without(plan.iteration)
            self._constants = self._constants.given_up(begun.span)

    def on_costs(self, costs: Costs) -> None:
        if self.needs_throughput:
            self._budget = self._budget.on_costs(costs, self._table.peak_bytes if self._table else 0)

    def throughput_measured(self, throughput: Throughput) -> None:
        self._budget = self._budget.throughput_measured(throughput)

    def to_data(self) -> dict[str, Any]:
        """Who is anchored when follows from the window and what the last order was made from."""
        return {
            **super().to_data(),
            "ordering": self._ordering,
            "window": self._table.size if self._table else None,
            "popularity": self._popularity.to_data(),
            "budget": self._budget.to_data(),
            "log_windows": self._log_windows,
        }

    def remembered(self) -> Callable[[], dict[str, Any]]:
        # All that it remembers are values: what the copy refers to stays as it is now.
        return copy(self).to_data

    def resumed(self, plan: RecoveryPlan, data: Mapping[str, Any], fault_iteration: int) -> RecoveryPlan:
        """The next iteration begins a window, in the same order and of the same size.

        Other flags than before the fault hold from there on.

        Args:
            plan: The recovery that was carried out.
            data: What `to_data` gave at its target.
            fault_iteration: The newest iteration that is known to have ended before the fault.
        """
        plan = super().resumed(plan, data, fault_iteration)
        self._windows, self._next = _Windows(), None
        self._budget = self._budget.from_data(data["budget"])
        if data["ordering"] == self._ordering:
            self._popularity = self._popularity.from_data(data["popularity"])
        window = self._fixed or data["window"]
        if window is not None and not self._gave_up:
            if self._fixed is None:  # ranks may be more than when it was chosen, and own fewer operators
                window = min(window, largest_window(self._job))
            self._table = self._timetable(window)
            # What a chosen window had no room for before the fault it has none for now; a fixed one was tried already.
            self._log_windows = self._log_windows if self._fixed else data.get("log_windows", PLACES)
        return plan

    def buffers_refused(self) -> str:
        self._windows = self._windows.without_begun()
        config, table, former = self._job.config, self._table, self._former
        self._former = None
        if self._log_windows and self._job.topology.pp > 1 and config.recovery != "global":
            self._former = former
            return self._fewer_logs()
        if table is None:
            return super().buffers_refused()
        if former is not None and former[0] is not None and former[0] != table:
            self._table, self._log_windows, self.order_changes, popularity = former
            self._popularity = self._popularity.refusing(popularity)
            logs = f", with boundary logs of {self.logged}" if self.logged else ""
            return f"the window stays at {former[0].size} iterations{logs}"
        larger = larger_window(self._job, self._popularity.last, table)
        if larger is not None:
            self._table = larger
            return f"the window has {larger.size} iterations in place of {table.size}"
        if not table.is_as_full:
            self._table = as_full(self._job, self._popularity.last)
            return "everything is snapshotted at once, as with --moe-ckpt-strategy full"
        self._table = None
        return super().buffers_refused()

    def _fewer_logs(self) -> str:
        before = self.logged
        self._log_windows -= 1
        if not self._log_windows:
            return "no boundary logs are kept: faults roll back all stages"
        return (
            f"boundary logs of {self.logged} iterations are kept in place of {before}: faults that need older ones roll"
            " back all stages"
        )

    def _schedule(self) -> None:
        """Between two windows: a new order if experts are used otherwise now, another size if the budget calls for it.

        The one is looked at before the other, so that both take effect together. A window of one iteration has no
        order.
        """
        if self._gave_up:
            return
        table, coming = self._table, self._next
        self._former, self._next = (table, self._log_windows, self.order_changes, self._popularity), None
        if coming is None or coming.table is not table:
            coming = self._next_timetable()
        reordered, needed = coming()
        if reordered is not None:
            self._popularity = self._popularity.reordered(coming.known)
            self.order_changes += 1
        else:
            self._popularity = self._popularity.faded()
        if coming.budget_bytes is not None:
            self._budget = self._budget.decided(coming.budget_bytes)
        if needed is not None and (table is None or needed.size != table.size):
            self._table, self._log_windows = needed, PLACES
        elif reordered is not None:
            self._table = reordered

    def _next_timetable(self) -> NextTimetable:
        budget_bytes = self._budget.calls_for_another() if self._fixed is None else None
        reorders = self.counts_tokens and self._table is not None and self._table.size != 1 and not self._gave_up
        return NextTimetable(self._job, self._popularity, self._table, reorders=reorders, budget_bytes=budget_bytes)

    def _timetable(self, window: int | None) -> Timetable:
        return timetable(self._job, self._popularity.last, window=window, budget_bytes=self._budget.decided_bytes)
