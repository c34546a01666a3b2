"""Snapshots beside training: bandwidth of the copies, memory over many of them, cost against other checkpoints.

A GPT-MoE with about 1 GB of training state trains on two processes in Megatron-LM's loop. All contestants checkpoint
that one training at the same frequency, in turns of a few iterations and in another order in each round; so whatever
else the machine does hits all. Everything is written to a tmpfs. With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ENDLESS, ROOT, Benchmark, available_gb, machine, run_ranks
from peers import install_nvrx
from snapshot_page import LEAST_BANDWIDTH_RATIO, MOST_GROWTH_BYTES, bandwidth_ratio, growth_bytes, report

BENCHMARK = Benchmark("snapshot", "snapshot.md")
NVRX_FOLDER = ROOT / ".data" / "nvrx"

LAYOUT = {"NPROC": "2", "TP": "1", "PP": "1", "EP": "2"}
COMMON = f"{ENDLESS} --bf16 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
"""Experts get equal numbers of tokens: for each new shape oneDNN compiles a kernel, which costs time and memory."""
SMALL = "--num-layers 2 --global-batch-size 4 --seq-length 64"
LARGE = (
    "--num-layers 5 --hidden-size 512 --num-attention-heads 8 --moe-ffn-hidden-size 1024 --num-experts 8"
    " --seq-length 128 --micro-batch-size 2 --global-batch-size 4"
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str
    rounds: int
    checkpoints_per_turn: int
    copies: int
    memory_warm: int
    memory_iterations: int


FULL = Sizes(LARGE, rounds=8, checkpoints_per_turn=2, copies=14, memory_warm=40, memory_iterations=200)
QUICK = Sizes(SMALL, rounds=2, checkpoints_per_turn=2, copies=6, memory_warm=5, memory_iterations=20)
INTERVAL = 2
NEEDED_GB = 12.0
"""Of memory for the full sizes: both sessions, a checkpoint of a peer being written beside another, both processes."""


def main() -> int:
    """Measure; exit code 1 if the copies are slower or the memory grows more than allowed, 2 if there is no room."""
    parser = BENCHMARK.parser(__doc__, quick="a tiny model and few rounds")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins after this (default: 10)")
    arguments = parser.parse_args()
    if not (arguments.report or arguments.quick) and available_gb() < NEEDED_GB:
        parser.error(f"{available_gb():.1f} GB of memory are available, but {NEEDED_GB:.0f} GB are needed: free some")
    sizes, seconds = QUICK if arguments.quick else FULL, arguments.minutes * 60
    result = BENCHMARK.result(arguments, lambda: measured(sizes, seconds))
    BENCHMARK.show(arguments, result, report(result))
    return 0 if bandwidth_ratio(result) >= LEAST_BANDWIDTH_RATIO and growth_bytes(result) <= MOST_GROWTH_BYTES else 1


def measured(sizes: Sizes, seconds: float) -> dict[str, Any]:
    """The machine and the results of both jobs."""
    started_s = time.monotonic()
    result: dict[str, Any] = {"machine": machine(), "nvrx_missing": install_nvrx(NVRX_FOLDER), "model": sizes.model}
    memory = {"part": "memory", "warm": sizes.memory_warm, "iterations": sizes.memory_iterations}
    result |= run_job(memory, SMALL)
    checkpoints = {
        "part": "checkpoints",
        "copies": sizes.copies,
        "rounds": sizes.rounds,
        "seconds": seconds - (time.monotonic() - started_s),
        "interval": INTERVAL,
        "checkpoints_per_turn": sizes.checkpoints_per_turn,
    }
    result |= run_job(checkpoints, sizes.model)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def run_job(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """What the ranks of one training measure."""
    script = Path(__file__).with_name("snapshot_ranks.py")
    return run_ranks(script, settings | {"nvrx": str(NVRX_FOLDER)}, LAYOUT, f"{COMMON} {model}")


if __name__ == "__main__":
    sys.exit(main())
