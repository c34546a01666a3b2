"""A checkpoint of every iteration: `sparse` with the window that it chooses, against `full` and stock `torch_dist`.

The training, the turns and the clocks are those of `snapshot.py`: about 1 GB of training state on two processes, all
contestants in turns within one run. Shown are the stall and the overhead per iteration in per cent of an iteration,
and how even the bytes of a window are. With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from harness import Benchmark, available_gb, machine, spread
from snapshot import FULL, NEEDED_GB, QUICK, run_job

BENCHMARK = Benchmark("every_iteration", "every-iteration.md")

MOST_STALL = 0.02
"""Of an iteration, with the window that is chosen."""
MOST_UNEVEN = 0.10
"""By how much the bytes of one iteration of a window may differ from their mean."""


def main() -> int:
    """Measure; exit code 1 if `sparse` stalls more, or its windows are less even, than allowed; 2 without room."""
    parser = BENCHMARK.parser(__doc__, quick="a tiny model and few rounds")
    parser.add_argument("--minutes", type=float, default=6.0, help="no round begins after this (default: 6)")
    arguments = parser.parse_args()
    if not (arguments.report or arguments.quick) and available_gb() < NEEDED_GB:
        parser.error(f"{available_gb():.1f} GB of memory are available, but {NEEDED_GB:.0f} GB are needed: free some")
    seconds = arguments.minutes * 60
    result = BENCHMARK.result(arguments, lambda: measured(quick=arguments.quick, seconds=seconds))
    BENCHMARK.show(arguments, result, report(result))
    return 0 if stall_share(result, "sparse") <= MOST_STALL and unevenness(result) <= MOST_UNEVEN else 1


def measured(*, quick: bool, seconds: float) -> dict[str, Any]:
    """The machine and the turns of all contestants."""
    result: dict[str, Any] = {"machine": machine()}
    settings = {
        "part": "every iteration",
        "rounds": 3 if quick else 6,
        "seconds": seconds,
        "interval": 1,
        "checkpoints_per_turn": 4 if quick else 8,
    }
    result |= run_job(settings, (QUICK if quick else FULL).model)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def iteration_s(result: dict[str, Any]) -> list[float]:
    """Of training without checkpoints, by round."""
    found = result["checkpoints"]
    return [row["turn_s"] / found["checkpoints_per_turn"] for row in found["rows"]["none"]]


def stall_share(result: dict[str, Any], name: str) -> float:
    """What the thread that trains waits, as a share of an iteration: the median of all rounds."""
    rows = result["checkpoints"]["rows"][name]
    return statistics.median(row["stall_s"] / base for row, base in zip(rows, iteration_s(result), strict=True))


def unevenness(result: dict[str, Any]) -> float:
    """The largest distance of an iteration's bytes from the mean of its window, relative to that, over all ranks."""
    return max((_off(window) for ranks in result["windows"].values() for rank in ranks for window in rank), default=0.0)


def _off(window: list[int]) -> float:
    mean = statistics.mean(window)
    return max(abs(nbytes - mean) / mean for nbytes in window)


def report(result: dict[str, Any]) -> list[str]:
    """The page: medians and, in brackets, quartiles."""
    about, state, found = result["machine"], result["state"], result["checkpoints"]
    base = iteration_s(result)
    sizes = sorted({len(window) for rank in result["windows"]["sparse"] for window in rank})
    lines = [
        "# A checkpoint of every iteration",
        "",
        "Made by `benchmarks/every_iteration.py --write`; every measurement is in"
        " `benchmarks/results/every_iteration.json`. Medians, and in brackets quartiles.",
        "",
        f"{state['ranks']} processes on {about['cores']} cores ({about['cpu']}), torch {about['torch']}, Megatron-Core"
        f" {about['megatron_core']}; one-minute load {about['load_before']:.1f} before. Training state"
        f" {state['total_bytes'] / 1e9:.2f} GB over all ranks, an iteration without checkpoints {spread(base)} s."
        f" {len(base)} rounds, in each a turn of {found['checkpoints_per_turn']} iterations for each. `sparse` chose"
        f" windows of {', '.join(map(str, sizes)) or 'no'} iterations by itself, `sparse/4` was given 4. A process has"
        " one thread per core, so that what is copied beside training takes its time from training.",
        "",
        "| | GB per iteration | stall, % of an iteration | overhead, % of an iteration |",
        "|---|---|---|---|",
    ]
    for name, rows in found["rows"].items():
        if name != "none":
            stalls = [100 * row["stall_s"] / base_s for row, base_s in zip(rows, base, strict=True)]
            pairs = zip(rows, found["rows"]["none"], strict=True)
            longer = [100 * (row["turn_s"] / plain["turn_s"] - 1) for row, plain in pairs]
            gigabytes = statistics.median(row["bytes"] for row in rows) / 1e9
            lines.append(f"| {name} | {gigabytes:.3f} | {spread(stalls, 1)} | {spread(longer, 1)} |")
    kept = "met" if stall_share(result, "sparse") <= MOST_STALL else "NOT met"
    even = "met" if unevenness(result) <= MOST_UNEVEN else "NOT met"
    return [
        *lines,
        "",
        f"Asked for: a stall of at most {MOST_STALL:.0%} with `sparse`: {kept}. Bytes of an iteration at most"
        f" {MOST_UNEVEN:.0%} off the mean of their window: {unevenness(result):.1%} at most, {even}.",
    ]


if __name__ == "__main__":
    sys.exit(main())
