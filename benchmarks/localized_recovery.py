"""Recovery of the failed stage alone against a rollback of all stages: from detection until training is where it was.

One job with `--moe-ckpt-recovery local` and one with `global` run right after each other, in another order in each
pair, with the same faults; so whatever else the machine does hits both. Timelines are those that the jobs write
themselves. A rollback of all stages rejoins at an earlier iteration: the iterations that it then trains again, up to
where the fault struck, count as well. The replay alone is compared per pair too. With --write the result is kept as
data and as a page.
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

BENCHMARK = Benchmark("localized_recovery", "localized-recovery.md")

LAYOUTS = {"PP=2, EP=2": {"NPROC": "4", "PP": "2", "EP": "2"}, "PP=4": {"NPROC": "4", "PP": "4", "EP": "1"}}
WINDOW = 4
SCOPES = ("local", "global")
COMMON = "--lr-warmup-iters 0 --lr-decay-style constant --bf16 --untie-embeddings-and-output-weights"
LARGE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --moe-ffn-hidden-size 512 --num-experts 8"
    " --seq-length 128 --micro-batch-size 2 --global-batch-size 16"
)
SMALL = "--num-layers 4 --hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 8"
FAULTS = ("1@10:forward-backward", "2@18:step", "3@26:start")
"""Each some iterations after a window was whole, in a stage of its own with PP=4."""
ITERATIONS = 30


def main() -> int:
    """Measure; exit code 1 unless the failed stage alone was back sooner, by the median, in every layout."""
    parser = BENCHMARK.parser(__doc__, quick="a tiny model and one pair")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of jobs in each layout, 3 faults each (default: 5)")
    arguments = parser.parse_args()
    pairs, model = (1, SMALL) if arguments.quick else (arguments.pairs, LARGE)
    result = BENCHMARK.result(arguments, lambda: measured(pairs, model))
    BENCHMARK.show(arguments, result, page(result))
    return 0 if all(statistics.median(ratios(found, "back_s")) < 1 for found in result["layouts"].values()) else 1


def measured(pairs: int, model: str) -> dict[str, Any]:
    """All pairs of all layouts."""
    result: dict[str, Any] = {"machine": machine(), "model": model, "window": WINDOW, "layouts": {}}
    for name, layout in LAYOUTS.items():
        found: list[dict[str, Any]] = []
        for index in range(pairs):
            order = SCOPES if index % 2 else SCOPES[::-1]
            found.append({scope: recoveries(run_job(layout, model, scope)) for scope in order})
            print(f"{name}: pair {index + 1} of {pairs}", flush=True)
        result["layouts"][name] = found
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def run_job(layout: dict[str, str], model: str, scope: str) -> list[dict[str, Any]]:
    """The lines of --metrics-jsonl of a job that all faults struck."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="recovery-benchmark-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        flags = [*COMMON.split(), *model.split(), "--train-iters", str(ITERATIONS), "--metrics-jsonl", str(metrics)]
        flags += ["--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", str(WINDOW), "--moe-ckpt-recovery", scope]
        flags += ["--moe-ckpt-memory-dir", folder, "--log-interval", "1000"]
        flags += [part for fault in FAULTS for part in ("--moe-ckpt-inject-fault", fault)]
        environment = os.environ | layout | {"TP": "1", "PYTHON": sys.executable, "TMPDIR": folder}
        environment["MAX_RESTARTS"] = str(2 * len(FAULTS))
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags]
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    scopes = [line["recovery"]["scope"] for line in lines if "recovery" in line]
    if ended.returncode or scopes != [scope] * len(FAULTS):
        raise SystemExit(f"{ended.stdout}\n{scope}: {len(FAULTS)} faults led to recoveries of scope {scopes}")
    return lines


def recoveries(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each recovery: seconds from detection to rejoin; those until training is back where the fault struck; those
    in which iterations were run again; and how many these were."""
    found: list[dict[str, float]] = []
    newest = 0
    for line in lines:
        if "recovery" in line:
            timeline = line["recovery"]
            total_s, replay_s = timeline["total_s"], timeline["parts"].get("replay", 0.0)
            times = {"rejoin_s": total_s, "back_s": total_s, "again_s": replay_s}
            found.append(times | {"again": timeline["replayed"], "restart_s": total_s - replay_s})
        elif "iteration" in line and not line.get("replayed"):
            if found and line["iteration"] <= newest:
                for name in ("back_s", "again_s"):
                    found[-1][name] += line["iteration_time_s"]
                found[-1]["again"] += 1
            newest = max(newest, line["iteration"])
    return found


def ratios(pairs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Local over global, recovery by recovery."""
    return [
        local[name] / other[name]
        for pair in pairs
        for local, other in zip(pair["local"], pair["global"], strict=True)
        if other[name]
    ]


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    about = result["machine"]
    lines = [
        "# Recovery of the failed stage alone",
        "",
        "Made by `benchmarks/localized_recovery.py --write`; every recovery is in"
        " `benchmarks/results/localized_recovery.json`. Medians, and in brackets quartiles.",
        "",
        f"4 processes on {about['cores']} cores ({about['cpu']}), torch {about['torch']}, Megatron-Core"
        f" {about['megatron_core']}; one-minute load {about['load_before']:.1f} before. `sparse` with windows of"
        f" {result['window']}; a process is killed in different stages and phases. Jobs that recover the failed stage"
        " alone and jobs that roll all stages back run in turns. With more stages than cores a stage that replays alone"
        " has a core for itself, which a whole pipeline has not.",
        "",
        "| layout | | failed stage alone | all stages | ratio |",
        "|---|---|---|---|---|",
    ]
    rows = {"back_s": "detection until training is where it was, s", "rejoin_s": "detection to rejoin, s",
            "again_s": "iterations that are run again, s"}  # fmt: skip
    for layout, pairs in result["layouts"].items():
        for name, title in rows.items():
            cells = [spread([recovery[name] for pair in pairs for recovery in pair[scope]], 2) for scope in SCOPES]
            lines.append(f"| {layout} | {title} | {' | '.join(cells)} | {spread(ratios(pairs, name), 2)} |")
    return [*lines, "", *judgements(result)]


def judgements(result: dict[str, Any]) -> Iterator[str]:
    """Whether what is asked for is met."""
    for layout, pairs in result["layouts"].items():
        ratio = statistics.median(ratios(pairs, "back_s"))
        kept = "" if ratio < 1 else ", NOT less"
        yield f"{layout}: the failed stage alone takes {ratio:.2f} of the time that all stages take{kept}."


if __name__ == "__main__":
    sys.exit(main())
