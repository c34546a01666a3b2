"""Snapshots beside training: bandwidth of the copies, memory over many of them, cost against other checkpoints.

A GPT-MoE with about 1 GB of training state trains on two processes under the real driver. All contestants checkpoint
that one training at the same frequency, in turns of a few iterations and in another order in each round; so whatever
else the machine does hits all. Everything is written to a tmpfs. With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import install_nvrx
from snapshot_page import LEAST_BANDWIDTH_RATIO, MOST_GROWTH_BYTES, bandwidth_ratio, growth_bytes, report

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).resolve().parent / "results" / "snapshot.json"
PAGE = ROOT / "docs" / "results" / "snapshot.md"
NVRX_FOLDER = ROOT / ".data" / "nvrx"

LAYOUT = {"NPROC": "2", "TP": "1", "PP": "1", "EP": "2", "MAX_RESTARTS": "0"}
COMMON = (
    "--train-iters 1000000 --log-interval 1000000 --lr-warmup-iters 0 --lr-decay-style constant --bf16"
    " --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds: shows that it runs")
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins after this (default: 10)")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULT.name} and {PAGE.name}")
    parser.add_argument("--report", action="store_true", help=f"measure nothing: show what {RESULT.name} has")
    arguments = parser.parse_args()
    if arguments.report:
        result = json.loads(RESULT.read_text())
    elif not arguments.quick and available_gb() < NEEDED_GB:
        parser.error(f"{available_gb():.1f} GB of memory are available, but {NEEDED_GB:.0f} GB are needed: free some")
    else:
        result = measured(QUICK if arguments.quick else FULL, arguments.minutes * 60)
    page = report(result)
    print("\n".join(page))
    if arguments.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text("\n".join(page) + "\n")
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


def machine() -> dict[str, Any]:
    """What the numbers depend on, and how busy it was."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "kernel": platform.release(),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "load_before": os.getloadavg()[0],
    }


def available_gb() -> float:
    """Memory that is free, or would be once caches are dropped."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9


def run_job(settings: dict[str, Any], model: str) -> dict[str, Any]:
    """Start the ranks as the demo does, in the environment of scripts/train_cpu.sh."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="snapshot-benchmark-") as folder:
        result = Path(folder) / "result.json"
        settings = settings | {"folder": folder, "result": str(result), "nvrx": str(NVRX_FOLDER)}
        environment = os.environ | LAYOUT
        environment |= {"PYTHON": sys.executable, "SCRIPT": str(Path(__file__).with_name("snapshot_ranks.py"))}
        environment["SNAPSHOT_BENCHMARK"] = json.dumps(settings)
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *COMMON.split(), *model.split()]
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
