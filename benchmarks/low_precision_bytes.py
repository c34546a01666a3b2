#!/usr/bin/env python3
"""Bytes of stored snapshots in the precisions of MoEvement Table 7: per parameter, and of whole sparse windows.

    python benchmarks/low_precision_bytes.py --write      measures, and keeps results/low_precision_bytes.json

Counted is what manifests in storage list of experts of three matrices of 128 x 128: a dense snapshot (`full`), the
states of a sparse window of three iterations, and whole windows, in which embeddings, norms and routers are too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import Benchmark
from low_precision_rows import BASELINE, ROWS, train

BENCHMARK = Benchmark("low_precision_bytes")
HIDDEN, WINDOW = 128, 3
PARAMETERS = 3 * HIDDEN * HIDDEN
"""Of one expert."""
PAPER = {BASELINE: 12, "1": 6, "2": 12, "3": 10, "4": 5, "5": 4}
"""Master weights and both moments of a parameter."""
EXACT = {BASELINE: 12, "1": 8, "2": 12, "3": 11, "4": 6, "5": 5}
"""With compute weights where masters do not tell them (`Precision.exact`)."""
SCALES = 0.001
"""Bytes per parameter that scales of payloads may add."""
_SIZES = (
    f"--num-layers 2 --hidden-size {HIDDEN} --num-experts 4 --moe-ffn-hidden-size {HIDDEN} --seq-length 32"
    " --micro-batch-size 1 --global-batch-size 1 --train-iters 7"
)
FULL = "--moe-ckpt-strategy full --moe-ckpt-interval 3 --moe-ckpt-persist-interval 3"
SPARSE = f"--moe-ckpt-strategy sparse --moe-ckpt-window {WINDOW} --moe-ckpt-persist-interval {WINDOW}"


def main() -> int:
    """Exit code 1 if a row does not take the bytes of the table."""
    arguments = BENCHMARK.parser(__doc__).parse_args()
    result = BENCHMARK.result(arguments, lambda: {row: measured(row) for row in ROWS})
    if arguments.write:
        BENCHMARK.keep(result)
    sys.stdout.write("\n".join(page(result)) + "\n")
    wrong = [row for row, facts in result.items() for kind in ("dense", "window state") if not _fits(row, facts[kind])]
    sys.stdout.write("".join(f"row {row}: not the bytes of the table\n" for row in dict.fromkeys(wrong)))
    return 1 if wrong else 0


def _fits(row: str, range_: tuple[float, float]) -> bool:
    return EXACT[row] <= range_[0] <= range_[1] <= EXACT[row] + SCALES


def measured(row: str) -> dict[str, Any]:
    """Least and most bytes per parameter of an expert in a dense snapshot, in a window with master weights and in one
    without; and bytes of a whole window."""
    dense, sparse = stored(row, FULL), stored(row, SPARSE)
    of_experts = [fields for (_, operator), fields in sparse.items() if _is_expert(operator)]
    return {
        "dense": _range([fields for (_, operator), fields in dense.items() if _is_expert(operator)]),
        "window state": _range([fields for fields in of_experts if "exp_avg" in fields]),
        "window weights": _range([fields for fields in of_experts if "exp_avg" not in fields]),
        "window": sum(sum(fields.values()) for fields in _newest(sparse).values()),
    }


Stored = dict[tuple[int, str], Counter[str]]
"""Bytes by field, of each iteration and operator."""


def stored(row: str, strategy: str) -> Stored:
    """What a job with this strategy left in storage."""
    found: Stored = defaultdict(Counter)
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="low-precision-") as name, tempfile.TemporaryDirectory(dir=shared) as ram:
        storage = Path(name) / "snapshots"
        flags = [*_SIZES.split(), *strategy.split(), "--moe-ckpt-persist-dir", storage, "--moe-ckpt-memory-dir", ram]
        train(row, flags, Path(name) / "metrics.jsonl")
        for path in storage.glob("*/manifest.json"):
            manifest = json.loads(path.read_text())["manifest"]
            for record in manifest["records"]:
                if record["operator"] is not None:
                    field = record["key"].rpartition("/")[2]
                    found[manifest["iteration"], str(record["operator"])][field] += record["nbytes"]
    return dict(found)


def _is_expert(operator: str) -> bool:
    return "'EXPERT'" in operator


def _newest(sparse: Stored) -> Stored:
    """Of the last window in storage alone."""
    last = max(iteration for iteration, _ in sparse)
    return {key: fields for key, fields in sparse.items() if key[0] > last - WINDOW}


def _range(experts: list[Counter[str]]) -> tuple[float, float]:
    counts = [fields.total() / PARAMETERS for fields in experts]
    return round(min(counts), 5), round(max(counts), 5)


def page(result: Mapping[str, Any]) -> list[str]:
    """The table of docs/low_precision.md."""
    lines = [
        f"| row | paper | exact | dense snapshot | state in a window | weights in a window | window of {WINDOW} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, facts in result.items():
        ratio = facts["window"] / result[BASELINE]["window"]
        columns = [f"{facts[kind][1]:.4f}" for kind in ("dense", "window state", "window weights")]
        lines.append(f"| {row} | {PAPER[row]} | {EXACT[row]} | {' | '.join(columns)} | {ratio:.3f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
