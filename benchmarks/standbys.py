"""Recovery in place, with standbys for all ranks, and with new processes for all: from detection to rejoin.

In place the ranks that were not lost keep their processes, and one standby takes the seat of the one that was. Jobs of
each kind run right after each other, in another order in each round, with the same faults; so whatever else the machine
does hits all. Timelines are those that the jobs write themselves; what
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
KINDS = {"in place": 1, "standbys": RANKS, "new processes": 0}
"""How many standbys a job has."""
WINDOW = 4
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 8"
    " --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --bf16 --untie-embeddings-and-output-weights"
    " --lr-warmup-iters 0 --lr-decay-style constant"
)
FAULTS = ("1@10:forward-backward", "2@18:step", "3@26:start", "0@34:forward-backward")
ITERATIONS = 38


def main() -> int:
    """Measure; exit code 1 unless recoveries in place were the fastest, by the median."""
    parser = BENCHMARK.parser(__doc__, quick="one round")
    parser.add_argument("--rounds", type=int, default=3, help="of a job of each kind, 4 faults each (default: 3)")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    result = BENCHMARK.result(arguments, lambda: measured(rounds))
    BENCHMARK.show(arguments, result, page(result))
    return 0 if statistics.median(ratios(result["rounds"], "in place")) < 1 else 1


def measured(rounds: int) -> dict[str, Any]:
    """All rounds."""
    result: dict[str, Any] = {"machine": machine(), "model": MODEL, "window": WINDOW, "rounds": []}
    for index in range(rounds):
        order = list(KINDS) if index % 2 else list(KINDS)[::-1]
        result["rounds"].append({kind: recoveries(kind) for kind in order})
        print(f"round {index + 1} of {rounds}", flush=True)
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def recoveries(kind: str) -> list[dict[str, Any]]:
    """The timelines of a job that all faults struck."""
    standbys = KINDS[kind]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="standbys-benchmark-") as name:
        folder = Path(name)
        metrics, seats = folder / "metrics.jsonl", folder / "seats"
        seats.mkdir()
        flags = [*MODEL.split(), "--train-iters", str(ITERATIONS), "--metrics-jsonl", str(metrics)]
        flags += ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", str(WINDOW), "--log-interval", "1000"]
        flags += ["--moe-ckpt-memory-dir", name]
        flags += [part for fault in FAULTS for part in ("--moe-ckpt-inject-fault", fault)]
        environment = os.environ | {"NPROC": str(RANKS), "PP": "2", "EP": "2", "TP": "1", "PYTHON": sys.executable}
        environment |= {"STANDBYS": str(standbys), "READY_STANDBYS": str(min(standbys, 1)), "SEATS": str(seats)}
        environment["KEEP"] = "1" if kind == "in place" else "0"
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


def ratios(rounds: Sequence[dict[str, Any]], kind: str) -> list[float]:
    """Of this kind over new processes, recovery by recovery."""
    return [
        back_s(one) / back_s(other)
        for found in rounds
        for one, other in zip(found[kind], found["new processes"], strict=True)
    ]


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    about = result["machine"]
    lines = [
        "# Recovery in place, and with standbys",
        "",
        "Made by `benchmarks/standbys.py --write`; every recovery is in `benchmarks/results/standbys.json`. Medians,"
        " and in brackets quartiles.",
        "",
        f"{RANKS} processes (PP=2, EP=2) on {about['cores']} cores ({about['cpu']}), torch {about['torch']},"
        f" Megatron-Core {about['megatron_core']}; one-minute load {about['load_before']:.1f} before and"
        f" {about['load_after']:.1f} after, the jobs' own included. A rank is killed. In place the others keep their"
        " processes, and a standby takes its seat; else all ranks start again, from standbys that have done their"
        " imports, or as new processes. Iterations that are run again are left out of the first two rows.",
        "",
        f"| | {' | '.join(KINDS)} |",
        "|---|---|---|---|",
    ]
    every = {kind: [one for found in result["rounds"] for one in found[kind]] for kind in KINDS}
    cells = [spread([back_s(one) for one in every[kind]], 2) for kind in KINDS]
    lines.append(f"| detection to rejoin, s | {' | '.join(cells)} |")
    cells = [spread(ratios(result["rounds"], kind), 2) for kind in KINDS]
    lines.append(f"| of that with new processes | {' | '.join(cells)} |")
    for part in ("park", "restart", "rendezvous", "build", "inventory", "fetch", "replay", "rejoin"):
        cells = [spread([one["parts"].get(part, 0.0) for one in every[kind]], 2) for kind in KINDS]
        lines.append(f"| {part}, s | {' | '.join(cells)} |")
    return [*lines, "", *judgements(result)]


def judgements(result: dict[str, Any]) -> Iterator[str]:
    """Whether what is asked for is met."""
    found = [back_s(one) for each in result["rounds"] for one in each["in place"]]
    ratio = statistics.median(ratios(result["rounds"], "in place"))
    yield (
        f"In place a recovery takes {statistics.median(found):.2f} s beside the replay, by the median of {len(found)}"
        f" (asked for: 1.5 s at most), {ratio:.2f} of the time that it takes with new processes (asked for: 0.15)."
    )


if __name__ == "__main__":
    sys.exit(main())
