"""What a person should know first of a run, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .accounts import Run
from .run_log import LEVELS

Weight = Literal["ok", "warn", "bad", "note"]

MUCH = 0.03
"""A share of the time from which on it is worth doing something."""


@dataclass(frozen=True)
class Recommendation:
    """One sentence or two. weight: whether all is well."""

    weight: Weight
    text: str


def sayings(run: Run) -> Iterator[Recommendation]:
    """What is to be said of a run, the most urgent first."""
    yield from _drill(run)
    yield from _protection(run)
    yield from _storage(run)
    yield from _losses(run)
    yield from _cost(run)
    yield from _stops(run)
    yield from (Recommendation("note", note[0].upper() + note[1:] + ".") for note in run.log.notes)


def _drill(run: Run) -> Iterator[Recommendation]:
    if run.drill is None:
        return
    stock, own = run.drill.stock_ettr, run.drill.ettr
    if own is not None and stock is not None:
        yield Recommendation(
            "note", f"ETTR by the drill: {100 * own:.1f} %, with stock checkpoints {100 * stock:.1f} %."
        )
    if run.drill.exact:
        yield Recommendation(
            "ok", f"Drill: {len(run.struck)} faults struck, and all came out as without them, to the last bit."
        )
    else:
        yield Recommendation(
            "bad", f"Drill: NOT as without faults: {run.drill.differences} differences; result.json lists them."
        )


def _protection(run: Run) -> Iterator[Recommendation]:
    level = run.last("protection")
    if math.isnan(level):
        yield Recommendation("note", "Nothing was protected in memory when the newest line was written.")
        return
    state, newest = LEVELS[int(level)], run.last("protected_iteration")
    which = "" if math.isnan(newest) else f": iteration {newest:.0f} of {run.newest} has all its copies"
    if state == "protected":
        yield Recommendation("ok", f"Protected in memory{which}.")
        return
    reason = run.log.reasons[-1][1] if run.log.reasons else ""
    why = f" Reason: {reason}." if reason else ""
    what_to_do = "the log of the rank that is named there says more" if reason else "the job's log says why"
    if not reason and run.stops:
        why, what_to_do = " After a recovery copies are counted again.", "nothing, if it is soon protected again"
    yield Recommendation(
        "bad" if state == "unprotected" else "warn", f"{state.capitalize()} in memory{which}.{why} To do: {what_to_do}."
    )


def _storage(run: Run) -> Iterator[Recommendation]:
    level = run.last("persistence")
    if math.isnan(level):
        if not math.isnan(run.last("protection")):
            yield Recommendation(
                "note", "No storage: losing all nodes at once loses the run up to the last dense checkpoint"
                " (--moe-ckpt-persist-dir).",
            )  # fmt: skip
        return
    newest = run.last("persisted_iteration")
    which = (
        "nothing has been written yet" if math.isnan(newest) else f"iteration {newest:.0f} of {run.newest} is newest"
    )
    yield Recommendation(
        "ok" if LEVELS[int(level)] == "protected" else "warn", f"{LEVELS[int(level)].capitalize()} in storage: {which}."
    )


def _losses(run: Run) -> Iterator[Recommendation]:
    lost = sum(sum(experts.values()) for experts in run.lost_tokens.values())
    if lost:
        plts = [recovery.plt for recovery in run.log.recoveries if recovery.plt is not None]
        part = f", {100 * plts[-1]:.3g} % of all" if plts else ""
        yield Recommendation(
            "warn", f"The updates of {lost:,} routed tokens were lost{part}. Only pec and selective lose any."
        )


def _cost(run: Run) -> Iterator[Recommendation]:
    time = run.time
    if not time.total_s:
        return
    if time.stall_s > MUCH * time.total_s:
        yield Recommendation(
            "warn", f"Training waited {100 * time.stall_s / time.total_s:.1f} % of the time for checkpoints. To do: a"
            " larger --moe-ckpt-window (or auto), or --moe-ckpt-interval; dense checkpoints with --async-save.",
        )  # fmt: skip
    if time.slowed_s > MUCH * time.total_s:
        yield Recommendation(
            "warn", f"Copies made passes longer, by {100 * time.slowed_s / time.total_s:.1f} % of the time. To do: a"
            " larger --moe-ckpt-window spreads them.",
        )  # fmt: skip
    if not time.is_by_clock:
        yield Recommendation("note", "Lines have no times: stops without a recovery are not counted.")


def _stops(run: Run) -> Iterator[Recommendation]:
    loaded = [stop for stop in run.stops if stop.recovery is None]
    if loaded:
        yield Recommendation(
            "note", f"{len(loaded)} of {len(run.stops)} stops continued without a recovery from snapshots."
        )
    startless = [recovery for recovery in run.log.recoveries if not recovery.is_whole]
    if startless:
        yield Recommendation(
            "note", f"{len(startless)} recoveries are counted from the restart: no rank left word of the fault."
        )
