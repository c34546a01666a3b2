#!/usr/bin/env python3
"""How well a model learns in the precisions of MoEvement Table 7: losses after 300 iterations against 16/32 bits.

    python benchmarks/low_precision_quality.py --write     trains what results/low_precision_quality.json lacks
    python benchmarks/low_precision_quality.py --report    shows what it has

Each run is kept as soon as it has ended, so the command goes on where it was stopped. One process trains a smaller
variant of the demo model on the demo's data; runs of a seed begin with the same weights and read the same samples.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_jobs import evaluated
from harness import Benchmark
from low_precision_rows import BASELINE, ROWS, train

BENCHMARK = Benchmark("low_precision_quality")
SEEDS = (1234, 1235, 1236)
ITERATIONS, LAST = 300, 50
SETTINGS = {
    "--num-layers": 2,
    "--seq-length": 64,
    "--micro-batch-size": 8,
    "--global-batch-size": 8,
    "--train-iters": ITERATIONS,
    "--eval-interval": ITERATIONS,
    "--eval-iters": 100,
}
Runs = list[dict[str, Any]]


def main() -> int:
    """Exit code 1 if a run came out as it cannot be."""
    parser = BENCHMARK.parser(__doc__, quick="20 iterations of one seed")
    arguments = parser.parse_args()
    settings, seeds = SETTINGS, SEEDS
    if arguments.quick:
        settings, seeds = {**SETTINGS, "--train-iters": 20, "--eval-interval": 20, "--eval-iters": 2}, SEEDS[:1]
    runs: Runs = []
    if BENCHMARK.data.exists() and not arguments.quick:
        kept = json.loads(BENCHMARK.data.read_text())
        runs = kept["runs"] if kept["settings"] == settings or arguments.report else []
    if not arguments.report:
        done = {(run["seed"], run["row"]) for run in runs}
        for seed, row in ((seed, row) for seed in seeds for row in ROWS if (seed, row) not in done):
            runs.append(trained(seed, row, settings))
            if arguments.write:
                BENCHMARK.keep({"settings": settings, "runs": runs})
    sys.stdout.write("\n".join(page(runs)) + "\n")
    failures = list(broken(runs))
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


def trained(seed: int, row: str, settings: Mapping[str, object]) -> dict[str, Any]:
    """One training to its end: losses in nats per byte, of each iteration and of the validation split at the end."""
    with tempfile.TemporaryDirectory(prefix="low-precision-") as folder:
        flags = [part for pair in settings.items() for part in pair]
        reports, said = train(row, [*flags, "--seed", seed], Path(folder) / "metrics.jsonl")
    ((_, validation),) = evaluated(said)
    losses = [round(report["lm_loss"], 5) for report in reports]
    skipped = sum(report["skipped"] for report in reports)
    return {"seed": seed, "row": row, "validation": validation, "skipped": skipped, "losses": losses}


def broken(runs: Runs) -> Iterator[str]:
    """A sentence for each run that diverged, or that has the losses of a run with other precisions."""
    for run in runs:
        if not all(map(math.isfinite, run["losses"])):
            yield f"row {run['row']}, seed {run['seed']}: a loss is not finite"
        for other in runs:
            if run["row"] < other["row"] and run["seed"] == other["seed"] and run["losses"] == other["losses"]:
                yield f"rows {run['row']} and {other['row']}, seed {run['seed']}: the same losses"


def page(runs: Runs) -> list[str]:
    """The table of docs/low_precision.md: of each row the mean over seeds, in brackets the least and the largest."""
    by_row = {row: [run for run in runs if run["row"] == row] for row in ROWS}
    lines = [
        f"| row | loss, last {LAST} of {ITERATIONS} iterations | validation loss | against {BASELINE}, same seed |",
        "|---|---|---|---|",
    ]
    for row, found in by_row.items():
        if not found:
            continue
        against = [run["validation"] / _baseline(runs, run["seed"]) - 1 for run in found]
        cells = (
            row,
            _span([statistics.mean(run["losses"][-LAST:]) for run in found], ".4f"),
            _span([run["validation"] for run in found], ".4f"),
            "" if row == BASELINE else _span(against, "+.2%"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _baseline(runs: Runs, seed: int) -> float:
    """Validation loss of the run with 16 and 32 bits from a seed; NaN while there is none."""
    return next((run["validation"] for run in runs if (run["row"], run["seed"]) == (BASELINE, seed)), math.nan)


def _span(values: Sequence[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
