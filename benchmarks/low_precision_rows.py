"""The rows of MoEvement Table 7 as flags, and how a job with one of them is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT

BASELINE = "16/32"
ENGINE = ("--transformer-impl", "transformer_engine", "--moe-grouped-gemm")
_HALF = "--fp16 --accumulate-allreduce-grads-in-fp32 --initial-loss-scale 65536 --use-precision-aware-optimizer"
_EIGHT = (
    "--bf16 --fp8-format hybrid --fp8-param-gather --fp8-recipe delayed --fp8-amax-history-len 16"
    " --fp8-amax-compute-algo max"
)
_FLAGS = {
    BASELINE: "--bf16",
    "1": f"{_HALF} --main-params-dtype fp16 --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16",
    "2": _EIGHT,
    "3": f"{_EIGHT} --use-precision-aware-optimizer --main-params-dtype fp16",
    "4": f"{_EIGHT} --use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype fp8"
    " --exp-avg-sq-dtype fp16",
    "5": f"{_EIGHT} --use-precision-aware-optimizer --fp8-main-params --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
}
ROWS = {name: (*ENGINE, *flags.split()) for name, flags in _FLAGS.items()}
"""Flags by row; the first is what the others are compared with."""


def train(row: str, flags: Sequence[object], metrics: Path) -> tuple[list[dict[str, Any]], str]:
    """Train with a row's precisions in one process, with the flags of scripts/train_cpu.sh and these.

    Returns:
        What --metrics-jsonl has of each iteration, and what the job said.
    """
    environment = os.environ | {"PYTHON": sys.executable, "NPROC": "1", "PP": "1", "EP": "1", "MAX_RESTARTS": "0"}
    command = [str(ROOT / "scripts" / "train_cpu.sh"), *ROWS[row], "--metrics-jsonl", str(metrics), *map(str, flags)]
    ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"{ended.stdout}\nrow {row} ended with {ended.returncode}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "iteration" in line], ended.stdout
