"""When a snapshot is due and when one goes to storage: at fixed intervals, or at one that follows measured
costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

from ..config import MoECheckpointConfig
from ..policy.interval import checkfreq_interval, daly, in_iterations, young

AUTO = "auto"
MOST_OVERHEAD = 0.01
"""The share of training that `auto` lets snapshots cost, in waiting and in slower passes."""
MEASURED = 5
"""Snapshots from whose median costs `auto` chooses: one slow iteration decides nothing."""
FIRST = 2
"""The interval of `auto` until it has measured: passes without a copy are needed to tell what a copy costs them."""


@dataclass(frozen=True)
class Costs:
    """What checkpoints cost lately, as measured by the slowest rank.

    iteration_s: an iteration without what it waited for checkpoints. stall_s: that waiting, per checkpoint.
    round_s: from the end of the copy until all replicas were acknowledged. persist_s: of the last write to storage; 0
    before the first. slowed_s: by how much a copy made the passes beside it longer; 0 where that is not known.
    """

    iteration_s: float
    stall_s: float
    round_s: float
    persist_s: float = 0.0
    slowed_s: float = 0.0


@dataclass(frozen=True)
class IntervalPolicy:
    """Snapshots every `interval` iterations, persistent ones every `persist_interval` (None: never).

    `adapting` names the rule that changes the interval with each measurement; `mtbf_s` is for Young's and Daly's. By
    `auto` it follows the median of some measurements, and shrinks only where half of it would do. With
    `persist_adapts` the persistent interval is the smallest in which a write ends before the next begins. A snapshot
    that could not be taken when it was due is taken as soon as it can be.
    """

    interval: int
    persist_interval: int | None = None
    adapting: str = "fixed"
    mtbf_s: float = 0.0
    last: int = 0
    last_persistent: int = 0
    persist_adapts: bool = False
    measured: tuple[Costs, ...] = ()
    choice: str = ""
    choice_made: bool = False

    @classmethod
    def of(cls, config: MoECheckpointConfig) -> IntervalPolicy:
        """The interval_policy that the flags ask for; an adapting one begins with `--moe-ckpt-interval`."""
        persist = config.persist_interval if config.persist_dir else None
        adapts = config.interval_policy == "checkfreq" or config.pec_adaptive
        if config.interval == "auto":
            return cls(FIRST, persist, AUTO, persist_adapts=adapts)
        return cls(config.interval, persist, config.interval_policy, config.mtbf_s or 0.0, persist_adapts=adapts)

    def due(self, iteration: int) -> tuple[bool, IntervalPolicy]:
        """Whether a snapshot is due after `iteration`, and the interval_policy once it is taken."""
        if self.adapting == "fixed":
            due = iteration // self.interval > self.last // self.interval
        else:
            due = iteration >= self.last + self.interval
        return due, replace(self, last=iteration) if due else self

    def persist_due(self, iteration: int) -> tuple[bool, IntervalPolicy]:
        """Whether the snapshot of `iteration` goes to persistent storage, and the interval_policy after that."""
        every = self.persist_interval
        if every is None:
            return False, self
        if self.persist_adapts:
            due = iteration >= self.last_persistent + every
        else:
            due = iteration // every > self.last_persistent // every
        return due, replace(self, last_persistent=iteration) if due else self

    def on_costs(self, costs: Costs) -> IntervalPolicy:
        """The interval_policy with the interval that these costs call for (CheckFreq's 3 %, Young 1974, Daly 2006).

        What a checkpoint costs is its stall; the next one begins at the earliest when its round has ended, and is
        persisted at the earliest when the write before has (CheckFreq; the lower bound of I_ckpt in MoC 5.3).
        """
        if costs.iteration_s <= 0:
            return self
        if self.persist_adapts and self.persist_interval is not None and costs.persist_s > 0:
            lower_bound = checkfreq_interval(costs.iteration_s, 0.0, costs.persist_s)
            return replace(self, persist_interval=lower_bound)._snapshots_measured(costs)
        return self._snapshots_measured(costs)

    def _snapshots_measured(self, costs: Costs) -> IntervalPolicy:
        if self.adapting == "fixed":
            return self
        if self.adapting == AUTO:
            return self._after(costs)
        shortest = checkfreq_interval(costs.iteration_s, costs.stall_s, costs.round_s)
        if self.adapting != "checkfreq":
            estimate_s = (young if self.adapting == "young" else daly)(costs.stall_s, self.mtbf_s)
            by_round = checkfreq_interval(costs.iteration_s, 0.0, costs.round_s)
            shortest = max(in_iterations(estimate_s, costs.iteration_s), by_round)
        return replace(self, interval=shortest)

    def _after(self, costs: Costs) -> IntervalPolicy:
        """As `auto` has it, a measurement later; all ranks are given the same ones."""
        measured = (*self.measured, costs)
        if len(measured) < MEASURED:
            return replace(self, measured=measured)
        typical = Costs(*map(median, zip(*map(astuple, measured), strict=True)))
        cost_s = typical.stall_s + typical.slowed_s
        needed = checkfreq_interval(typical.iteration_s, cost_s, typical.round_s, MOST_OVERHEAD)
        kept = replace(self, measured=())
        if self.choice_made and self.interval / 2 < needed <= self.interval:
            return kept
        choice = (
            f"interval: {needed} (auto; iteration={typical.iteration_s:.3g} s stall={typical.stall_s * 1000:.3g} ms"
            f" slowdown={typical.slowed_s * 1000:.3g} ms replication={typical.round_s:.3g} s"
            f" overhead={cost_s / typical.iteration_s / needed:.2%})"
        )
        return replace(kept, interval=needed, choice=choice, choice_made=True)

    def taken(self) -> tuple[str, IntervalPolicy]:
        """What was chosen since this was called last, in words, and the interval_policy after that."""
        return self.choice, replace(self, choice="") if self.choice else self

    def to_data(self) -> dict[str, Any]:
        """What a resumed run continues from."""
        persist = {"persist_interval": self.persist_interval} if self.persist_adapts else {}
        return {"interval": self.interval, "last": self.last, "last_persistent": self.last_persistent, **persist}

    def from_data(self, data: Mapping[str, Any]) -> IntervalPolicy:
        """This interval_policy as it stood when `to_data` was called; a fixed interval is that of the flags."""
        interval = self.interval if self.adapting == "fixed" else data["interval"]
        if self.adapting == AUTO:
            interval = max(FIRST, interval)
        persist = self.persist_interval
        if self.persist_adapts and persist is not None:
            persist = data.get("persist_interval") or persist
        return replace(
            self,
            interval=interval,
            persist_interval=persist,
            last=data["last"],
            last_persistent=data["last_persistent"],
        )
