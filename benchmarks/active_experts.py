#!/usr/bin/env python3
"""Tokens of each expert in every iteration of a real job, with as many experts as DeepSeek-MoE's layers have.

    python benchmarks/active_experts.py [--iterations N] [--write]

Two expert-parallel processes train a small model, 64 experts per layer and 6 per token, whose routers begin at random;
the tokens that they count are in the metrics of the job.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from demo_jobs import Size, train
from harness import Benchmark, machine

BENCHMARK = Benchmark("active_experts")
EXPERTS, TOPK = 64, 6
LAYOUT = {"NPROC": "2", "PP": "1", "EP": "2"}
MODEL = (
    "--num-layers", "2", "--num-experts", str(EXPERTS), "--moe-router-topk", str(TOPK), "--moe-ffn-hidden-size", "32",
    "--moe-aux-loss-coeff", "1e-2",
)  # fmt: skip
COUNTING = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-replicas", "0", "--moe-ckpt-log-expert-tokens")
"""Routers are counted for strategies that choose experts; no fault strikes."""


def main() -> None:
    """Measure and show."""
    parser = BENCHMARK.parser(__doc__, quick="a few iterations")
    parser.add_argument("--iterations", type=int, default=100)
    arguments = parser.parse_args()
    iterations = 6 if arguments.quick else arguments.iterations
    result = BENCHMARK.result(arguments, lambda: measured(iterations))
    BENCHMARK.show(arguments, result, [f"{len(result['tokens'])} iterations, the last one:", *result["tokens"][-1]])


def measured(iterations: int) -> dict[str, Any]:
    """The machine and the model; tokens: by iteration, for each layer those of all experts, as a text."""
    about = machine()
    with tempfile.TemporaryDirectory(prefix="active-experts-") as folder:
        size = Size(iterations, iterations, 1, ())
        train(1, "experts", size, Path(folder), COUNTING, model=MODEL, layout=LAYOUT)
        lines = (Path(folder) / "1-experts.jsonl").read_text().splitlines()
    found = [json.loads(line).get("expert_tokens") for line in lines]
    tokens = {int(at): rows for one in found if one for at, rows in one.items()}
    texts = [[" ".join(map(str, row)) for row in tokens[at]] for at in sorted(tokens)]
    return {"machine": about, "experts": EXPERTS, "topk": TOPK, "flags": MODEL, "tokens": texts}


if __name__ == "__main__":
    main()
