"""The parts of the page that are about one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..accounts import Run, TimeSpent
from ..advice import sayings
from ..run_log import LEVELS
from .charts import Curve, Mark, bands, chart, stacked
from .html import duration, escape, figures, nbytes, share, short, table

MOST_CHANGES = 50


def marks_of(run: Run) -> list[Mark]:
    """Where training stopped."""
    return [Mark(stop.after, f"{stop.what or 'stopped'} after iteration {stop.after}") for stop in run.stops]


def overview(run: Run) -> str:
    """What is said of the run, and its figures."""
    said = "".join(f'<li class="{one.weight}">{escape(one.text)}</li>' for one in sayings(run))
    time, tokens = run.time, run.last("tokens_per_s")
    recovered = sum(stop.recovery is not None for stop in run.stops)
    newest = [run.last(name) for name in ("protected_iteration", "persisted_iteration")]
    values = [
        ("Newest iteration", f"{run.newest:,}", _of_all(run)),
        ("ETTR so far", share(time.ettr), f"of {duration(time.total_s)}"),
        ("Restarts", str(len(run.stops)), f"{recovered} recovered from snapshots"),
        ("Newest protected", _whole(newest[0]), "all copies in memory"),
        ("Newest persisted", _whole(newest[1]), "in storage"),
        ("Tokens per second", short(tokens).strip(), f"{short(run.last('model_flops_per_s'))}FLOP/s of the model"),
    ]
    return f'{_job(run)}<ul class="say">{said}</ul>{figures(values)}'


_HEAD = {"job": "Id", "strategy": "Strategy", "model": "Model", "layout": "Layout", "software": "Software"}


def _job(run: Run) -> str:
    """Of what job this is a report, as far as its log says."""
    rows = [(title, str(run.facts[name])) for name, title in _HEAD.items() if run.facts.get(name)]
    return table(("Job", ""), rows) if rows else ""


def _of_all(run: Run) -> str:
    total = run.facts.get("train_iters")
    return f"of {total:,}" if isinstance(total, int) and total > 0 else ""


def _whole(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def loss(run: Run) -> str:
    """With faults, and recomputed iterations."""
    again = [(run.log.columns["iteration"][at], run.log.columns["lm_loss"][at]) for at in run.again]
    curves = [Curve("loss", points(run, "lm_loss"), 0), Curve("recomputed", sorted(again), 1, dots=True)]
    return chart("Loss over iterations", curves, marks_of(run))


def overhead(run: Run) -> str:
    """What an iteration takes, and what of it is for checkpoints."""
    marks = marks_of(run)
    times = [Curve("iteration", points(run, "iteration_time_s"), 0)]
    waits = [Curve("waiting for checkpoints", points(run, "stall_s"), 1)]
    slowed = [Curve("longer than the median pass without a copy", points(run, "slowed_s"), 3)]
    return (
        chart("Time of an iteration", times, marks, unit="s", from_zero=True)
        + chart("Training waiting for checkpoints", waits, marks, unit="s", from_zero=True)
        + chart("Passes slowed by copies", slowed, marks, unit="s", from_zero=True)
    )


def protection(run: Run) -> str:
    """How safe the run was when, and how far the newest copies were behind."""
    marks = marks_of(run)
    names = {"protection": "in memory", "persistence": "in storage"}
    rows = [(names[tier], _known(run, tier)) for tier in names]
    shares = [(names[tier], *(share(states[name]) for name in reversed(LEVELS))) for tier, states in run.states.items()]
    behind = [
        Curve(f"not yet {what}", _behind(run, name), color, steps=True)
        for what, name, color in (
            ("protected in memory", "protected_iteration", 2),
            ("in storage", "persisted_iteration", 0),
        )
    ]
    found = bands("How safe the run was", rows, LEVELS, marks)
    found += chart("Snapshot lag", behind, marks, unit="iterations", from_zero=True)
    if shares:
        found += table(("Share of iterations", *reversed(LEVELS)), shares)
    return found + _reasons(run)


def _reasons(run: Run) -> str:
    iterations = run.log.columns["iteration"]
    rows = [(f"{iterations[at]:.0f}", reason) for at, reason in run.log.reasons if reason]
    if not rows:
        return ""
    shown = table(("From iteration", "Why there was less protection than asked for"), rows[-50:])
    return f"<details><summary>Less protection than asked for: {len(rows)}</summary>{shown}</details>"


def time_spent(run: Run) -> str:
    """Where the time went."""
    time = run.time
    parts = list(_time_parts(time, is_measured=any(math.isfinite(one) for one in run.of_kept("slowed_s"))))
    if not time.total_s:
        return ""
    bar = stacked([(name, length_s, share(length_s / time.total_s)) for name, length_s, _ in parts], time.total_s)
    rows = [(name, duration(length_s), share(length_s / time.total_s), what) for name, length_s, what in parts]
    rows.append(("all", duration(time.total_s), share(1.0), ""))
    return f"<h3>Where the time went</h3>{bar}" + table(("", "time", "share", ""), rows)


def _time_parts(time: TimeSpent, *, is_measured: bool) -> Iterator[tuple[str, float, str]]:
    yield "training", time.useful_s, "of what the newest state consists of"
    yield "waiting", time.stall_s, "for checkpoints"
    yield (
        "slowed",
        time.slowed_s,
        "passes, by concurrent copies" + ("" if is_measured else ": no warm pass without a copy yet"),
    )
    yield "recomputed", time.again_s, "iterations that were run before"
    yield "stopped", time.stopped_s, "by faults, until training continued"
    yield "other", time.other_s, "between iterations: evaluation, data, the first start"


def memory(run: Run) -> str:
    """What checkpoints take, and what they move, on the rank that writes the log."""
    marks = marks_of(run)
    tiers = (
        ("own snapshots", "own_bytes", 0),
        ("replicas of others", "replica_bytes", 1),
        ("boundary logs", "log_bytes", 3),
    )
    held = [Curve(name, points(run, column), color, steps=True) for name, column, color in tiers]
    moved = [
        Curve(name, points(run, column), color)
        for name, column, color in (
            ("copied", "snapshot_bytes", 0),
            ("sent to peers", "replicated_bytes", 1),
            ("written to storage", "persisted_bytes", 2),
        )
        if any(value > 0 for value in run.log.columns[column])
    ]
    totals = [
        (name, nbytes(sum(value for value in run.log.columns[column] if value > 0)), nbytes(run.last(column)))
        for name, column in (
            ("copied to memory", "snapshot_bytes"),
            ("sent to peers", "replicated_bytes"),
            ("written to storage", "persisted_bytes"),
        )
    ]
    now = [(name, nbytes(run.last(column))) for name, column, _ in tiers]
    if all(math.isnan(run.last(column)) for _, column, _ in tiers) and not moved:
        return ""
    return (
        '<p class="soft">Of the rank that writes the log, the last one.</p>'
        + chart("Memory of checkpoints", held, marks, unit="bytes", from_zero=True)
        + table(("Memory now", "bytes"), now)
        + chart("Bytes of an iteration", moved, marks, unit="bytes", from_zero=True)
        + table(("Bytes", "in all", "in the newest iteration"), totals)
    )


def windows(run: Run) -> str:
    """When the window or the order of operators changed."""
    columns = run.log.columns
    rows: list[tuple[str, str]] = []
    before: tuple[float, float] | None = None
    for at in run.kept:
        now = columns["window"][at], columns["order_changes"][at]
        if before is not None and any(
            a != b and not (math.isnan(a) and math.isnan(b)) for a, b in zip(now, before, strict=True)
        ):
            rows.append((f"{columns['iteration'][at]:,.0f}", _change(before, now)))
        before = now
    window = run.last("window")
    if math.isnan(window) or (window == 1 and not rows):
        return ""
    said = f"<p>The window has {window:.0f} iterations now."
    if not rows:
        return f"{said}</p>"
    shown = table(("Iteration", "what changed"), rows[-MOST_CHANGES:])
    opener = f"<details><summary>The newest {min(MOST_CHANGES, len(rows))} changes</summary>"
    return f"{said} It or the order of operators changed {len(rows)} times.</p>{opener}{shown}</details>"


def _change(before: tuple[float, float], now: tuple[float, float]) -> str:
    changes = []
    if now[0] != before[0] and not (math.isnan(now[0]) and math.isnan(before[0])):
        changes.append(f"window of {_whole(now[0])} in place of {_whole(before[0])} iterations")
    if now[1] != before[1]:
        again = now[1] < before[1] or math.isnan(before[1])
        changes.append("another attempt counts from 0" if again else "experts in a new order of popularity")
    return ", ".join(changes)


def points(run: Run, name: str) -> Sequence[tuple[float, float]]:
    """A column over iterations, of the reports that count.

    Args:
        run: The run.
        name: Name of the column in its log.
    """
    iterations, column = run.log.columns["iteration"], run.log.columns[name]
    return [(iterations[at], column[at]) for at in run.kept]


def _known(run: Run, name: str) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points(run, name) if not math.isnan(y)]


def _behind(run: Run, name: str) -> list[tuple[float, float]]:
    return [(x, x - y) for x, y in points(run, name)]
