"""Recovery with standbys that take the seats of all ranks, against new processes for all: from detection to rejoin.

One job with as many standbys as ranks and one without run right after each other, in another order in each pair, with
the same faults; so whatever else the machine does hits both. Timelines are those that the jobs write themselves; what
iterations take that are run again is left out, since it is the same work. A fault strikes once the standbys are ready:
how long that takes after a recovery is told too. With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, machine, spread

BENCHMARK = Benchmark("standbys", "standbys.md")

RANKS = 4
KINDS = {"standbys": RANKS, "new processes": 0}
WINDOW = 4
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 8"
    " --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --bf16 --untie-embeddings-and-output-weights"
    " --lr-warmup-iters 0 --lr-decay-style constant"
)
FAULTS = ("1@10:forward-backward", "2@18:step", "3@26:start", "0@34:forward-backward")
ITERATIONS = 38


def main() -> int:
    """Measure; exit code 1 unless standbys were back sooner, by the median."""
    parser = BENCHMARK.parser(__doc__, quick="one pair")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of jobs, 4 faults each (default: 3)")
    arguments = parser.parse_args()
    pairs = 1 if arguments.quick else arguments.pairs
    result = BENCHMARK.result(arguments, lambda: measured(pairs))
    BENCHMARK.show(arguments, result, page(result))
    return 0 if statistics.median(ratios(result["pairs"])) < 1 else 1


def measured(pairs: int) -> dict[str, Any]:
    """All pairs."""
    result: dict[str, Any] = {"machine": machine(), "model": MODEL, "window": WINDOW, "pairs": []}
    for index in range(pairs):
        order = list(KINDS) if index % 2 else list(KINDS)[::-1]
        result["pairs"].append({kind: recoveries(KINDS[kind]) for kind in order})
        print(f"pair {index + 1} of {pairs}", flush=True)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def recoveries(standbys: int) -> list[dict[str, Any]]:
    """The timelines of a job that all faults struck."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="standbys-benchmark-") as name:
        folder = Path(name)
        metrics, seats = folder / "metrics.jsonl", folder / "seats"
        seats.mkdir()
        flags = [*MODEL.split(), "--train-iters", str(ITERATIONS), "--metrics-jsonl", str(metrics)]
        flags += ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", str(WINDOW), "--log-interval", "1000"]
        flags += ["--moe-ckpt-memory-dir", name]
        flags += [part for fault in FAULTS for part in ("--moe-ckpt-inject-fault", fault)]
        environment = os.environ | {"NPROC": str(RANKS), "PP": "2", "EP": "2", "TP": "1", "PYTHON": sys.executable}
        environment |= {"STANDBYS": str(standbys), "READY_STANDBYS": str(standbys), "SEATS": str(seats)}
        environment |= {"SCRIPT": str(ROOT / "benchmarks" / "standby_job.py"), "TMPDIR": name}
        environment["MAX_RESTARTS"] = str(2 * len(FAULTS))
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags]
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found = [line["recovery"] for line in lines if "recovery" in line]
    if ended.returncode or len(found) != len(FAULTS):
        raise SystemExit(f"{ended.stdout}\n{len(FAULTS)} faults led to {len(found)} recoveries")
    return [{"total_s": one["total_s"], "parts": one["parts"], "replayed": one["replayed"]} for one in found]


def back_s(recovery: dict[str, Any]) -> float:
    """From detection to rejoin, without iterations that are run again."""
    return float(recovery["total_s"]) - float(recovery["parts"].get("replay", 0.0))


def ratios(pairs: Sequence[dict[str, Any]]) -> list[float]:
    """Standbys over new processes, recovery by recovery."""
    return [
        back_s(one) / back_s(other)
        for pair in pairs
        for one, other in zip(pair["standbys"], pair["new processes"], strict=True)
    ]


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    about = result["machine"]
    lines = [
        "# Recovery with standbys",
        "",
        "Made by `benchmarks/standbys.py --write`; every recovery is in `benchmarks/results/standbys.json`. Medians,"
        " and in brackets quartiles.",
        "",
        f"{RANKS} processes (PP=2, EP=2) on {about['cores']} cores ({about['cpu']}), torch {about['torch']},"
        f" Megatron-Core {about['megatron_core']}; one-minute load {about['load_before']:.1f} before and"
        f" {about['load_after']:.1f} after, the jobs' own included. A rank is killed; then all ranks start again, from"
        " standbys that have done their imports, or as new processes. Iterations that are run again are left out of the"
        " first row.",
        "",
        "| | standbys | new processes | ratio |",
        "|---|---|---|---|",
    ]
    every = {kind: [one for pair in result["pairs"] for one in pair[kind]] for kind in KINDS}
    cells = [spread([back_s(one) for one in every[kind]], 2) for kind in KINDS]
    lines.append(f"| detection to rejoin, s | {' | '.join(cells)} | {spread(ratios(result['pairs']), 2)} |")
    for part in ("park", "restart", "rendezvous", "build", "inventory", "fetch", "replay", "rejoin"):
        cells = [spread([one["parts"].get(part, 0.0) for one in every[kind]], 2) for kind in KINDS]
        lines.append(f"| of it {part}, s | {' | '.join(cells)} | |")
    return [*lines, "", *judgements(result)]


def judgements(result: dict[str, Any]) -> Iterator[str]:
    """Whether what is asked for is met."""
    ratio = statistics.median(ratios(result["pairs"]))
    yield f"With standbys a recovery takes {ratio:.2f} of the time that it takes with new processes."


if __name__ == "__main__":
    sys.exit(main())
