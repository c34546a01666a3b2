"""A checkpoint of every iteration: `sparse` with the window that it chooses, against `full` and stock `torch_dist`.

The training, the turns and the clocks are those of `snapshot.py`: about 1 GB of training state on two processes, all
contestants in turns within one run. Shown are the stall and the overhead per iteration in per cent of an iteration,
and how even the bytes of a window are.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness import Benchmark, row, rule, spread, start, where
from snapshot import run_job, state_of

from moe_ckpt.simulator.events import estimate

BENCHMARK = Benchmark("every_iteration", 12, "every-iteration.md")
LAYERS = 5
"""Of the model: with fewer its embedding is more than a part of a window, and no plan is even."""
MOST_STALL = 0.02
"""Of an iteration, with the window that is chosen."""
MOST_UNEVEN = 0.10
"""By how much the bytes of one iteration of a window may differ from their mean."""


def main() -> int:
    """Exit code 1 if `sparse` stalls more, or its windows are less even, than allowed."""
    return BENCHMARK.run(
        __doc__, measured, report, lambda result: stall_met(result) and unevenness(result) <= MOST_UNEVEN
    )


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """The turns of all contestants."""
    settings = {"copies": 0, "interval": 1, "checkpoints_per_turn": 4 if quick else 8}
    return run_job(["sparse", "sparse/4", "full", "torch_dist async"], settings, turns, quick, 2 if quick else LAYERS)


def stall_met(result: dict[str, Any]) -> bool:
    """Whether the thread that trains waits for `sparse` as little as asked for: the median of all rounds."""
    rows = result["checkpoints"]["rows"]["sparse"]
    return statistics.median(_stalls(rows, iteration_s(result))) <= 100 * MOST_STALL


def _stalls(rows: list[dict[str, float]], base: list[float]) -> list[float]:
    return [100 * turn["stall_s"] / base_s for turn, base_s in zip(rows, base, strict=True)]


def _longer(rows: dict[str, list[dict[str, float]]], name: str) -> list[float]:
    """Of each round, by how many per cent its turn is longer than the one without checkpoints."""
    pairs = zip(rows[name], rows["none"], strict=True)
    return [100 * (turn["turn_s"] / plain["turn_s"] - 1) for turn, plain in pairs]


def iteration_s(result: dict[str, Any]) -> list[float]:
    """Of training without checkpoints, by round."""
    found = result["checkpoints"]
    return [turn["turn_s"] / found["checkpoints_per_turn"] for turn in found["rows"]["none"]]


def unevenness(result: dict[str, Any]) -> float:
    """The largest distance of an iteration's bytes from the mean of its window, relative to that, over all ranks."""
    windows = [window for ranks in result["windows"].values() for rank in ranks for window in rank]
    means = map(statistics.mean, windows)
    pairs = zip(windows, means, strict=True)
    return max((abs(nbytes - mean) / mean for window, mean in pairs for nbytes in window), default=0.0)


def report(result: dict[str, Any]) -> list[str]:
    """The page: medians and, in brackets, quartiles; means of what is within rounds."""
    found, base = result["checkpoints"], iteration_s(result)
    sizes = sorted({len(window) for rank in result["windows"]["sparse"] for window in rank})
    lines = [
        *BENCHMARK.head("A checkpoint of every iteration"),
        f"Measured {where(result)}. {state_of(result)} An iteration without checkpoints takes {spread(base)} s."
        f" {len(base)} rounds, in each a turn of {found['checkpoints_per_turn']} iterations for each. `sparse` chose"
        f" windows of {', '.join(map(str, sizes)) or 'no'} iterations by itself, `sparse/4` was given 4.",
        "",
        row("", "GB per iteration", "stall, % of an iteration", "overhead, % of an iteration", "its mean"),
        rule(5, 5),
    ]
    for name, rows in found["rows"].items():
        if name != "none":
            longer = _longer(found["rows"], name)
            gigabytes = statistics.median(turn["bytes"] for turn in rows) / 1e9
            stalls, mean = spread(_stalls(rows, base), 1), f"{estimate(longer):.1f}"
            lines.append(row(name, f"{gigabytes:.3f}", stalls, spread(longer, 1), mean))
    full, alone, window = (_longer(found["rows"], name) for name in ("full", "sparse", "sparse/4"))
    less, fewer = (estimate([own - w for own, w in zip(of, window, strict=True)]) for of in (full, alone))
    even = "met" if unevenness(result) <= MOST_UNEVEN else "NOT met"
    return [
        *lines,
        "",
        f"`full` less `sparse/4`: {less:+.1f} % of an iteration{'' if less.is_beyond() else ', no difference shown'};"
        f" `sparse` less `sparse/4`: {fewer:+.1f} %. ± is half of the 95 % interval over rounds; those of `full` are"
        f" {', '.join(f'{one:.1f}' for one in sorted(full))} %. `torch_dist async` forks a process for each save, as"
        " the worker of `--use-persistent-ckpt-worker` needs a GPU.",
        "",
        f"Asked for: a stall of at most {MOST_STALL:.0%} with `sparse`: {'met' if stall_met(result) else 'NOT met'}."
        f" Bytes of an iteration at most {MOST_UNEVEN:.0%} off the mean of their window: {unevenness(result):.1%} at"
        f" most, {even}.",
    ]


if __name__ == "__main__":
    start(main)
