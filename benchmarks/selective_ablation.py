"""What each technique of MOETION saves: selection, redundancy, gradients and bubbles, against `full` every iteration.

    python benchmarks/selective_ablation.py [--rounds N] [--minutes N] [--write]

Real jobs of four ranks, each a node of its own, in two pipeline stages, without the distributed optimizer: the
data-parallel peer of a rank, which keeps its replicas, holds all but experts as well. Each round trains all of them one
after the other, beginning with none and then `full`, with which all others are paired; overheads are those of medians
of iterations in the same round. A job that fails or hangs is tried again, and what it had measured does not count; a
round begins only if it will end in time. Techniques are added up in the order of the table. What peers hold is never
sent, and no flag changes that: what it saves is counted in the job before it, whose metrics have what was not sent.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from demo_jobs import JobFailed, Size, train
from harness import Benchmark, machine

BENCHMARK = Benchmark("selective_ablation", "selective-ablation.md")
LAYOUT = {"NNODES": "4", "NPROC": "1", "PP": "2", "EP": "2", "OPTIMIZER": "plain"}
MODEL = ("--hidden-size", "128", "--moe-ffn-hidden-size", "512", "--moe-aux-loss-coeff", "0")
QUICK_MODEL = ("--moe-aux-loss-coeff", "0")
SHARE = 0.7
"""Budgets of `selective` for the node and for peers, of the bytes of `full` on the rank that writes the metrics."""
TRIES, JOB_S = 3, 240.0
"""How often a job is tried, and for how long."""
SKIPPED = 6
"""Iterations at the start, in which everything is snapshotted and nothing is measured yet."""

NONE, FULL, SELECTION, GRADIENTS, BUBBLES = "none", "full", "selection", "+ gradients", "+ bubbles"
REDUNDANCY = "+ redundancy"
FOLLOWING = ("--moe-ckpt-replicate", "gradients")
ADDED: Mapping[str, Sequence[str]] = {
    SELECTION: (),
    GRADIENTS: FOLLOWING,
    BUBBLES: (*FOLLOWING, "--moe-ckpt-copy-placement", "bubbles"),
}


def main() -> int:
    """Measure; exit code 1 if any technique added bytes, or copies in bubbles began in none."""
    parser = BENCHMARK.parser(__doc__, quick="a tiny model and few iterations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further round that would end later")
    arguments = parser.parse_args()
    iterations = 12 if arguments.quick else arguments.iterations
    model = QUICK_MODEL if arguments.quick else MODEL
    result = BENCHMARK.result(arguments, lambda: measured(arguments.rounds, iterations, model, 60 * arguments.minutes))
    BENCHMARK.show(arguments, result, report(result))
    return 0 if holds(result) else 1


def measured(rounds: int, iterations: int, model: Sequence[str], within_s: float) -> dict[str, Any]:
    """The machine, and the rows of each round by name."""
    about, begun_s = machine(), time.monotonic()
    found: list[dict[str, Any]] = []
    budget, longest_s = 0, 0.0
    for _ in range(rounds):
        round_s = time.monotonic()
        if found and round_s - begun_s + longest_s > within_s:
            print(f"{len(found)} rounds: another one would not end in time", file=sys.stderr)
            break
        row: dict[str, Any] = {}
        for name in (NONE, FULL, *ADDED):
            row[name] = tried(name, iterations, model, budget)
            print(name, row[name], file=sys.stderr, flush=True)
            if name == FULL:
                budget = budget or int(SHARE * row[name]["copied"])
        found.append(row)
        longest_s = max(longest_s, time.monotonic() - round_s)
    about["load_after"] = os.getloadavg()[0]
    return {"machine": about, "layout": LAYOUT, "iterations": iterations, "budget_bytes": budget, "rounds": found}


def tried(name: str, iterations: int, model: Sequence[str], budget: int) -> dict[str, Any]:
    """As `run`, again where a job did not come to its end. Raises SystemExit after the last try."""
    for attempt in range(TRIES):
        try:
            return run(name, iterations, model, budget) | {"failed_before": attempt}
        except JobFailed as error:
            print(f"{error}\n{name}: try {attempt + 1} of {TRIES} failed", file=sys.stderr, flush=True)
    raise SystemExit(f"{name}: no job came to its end")


def run(name: str, iterations: int, model: Sequence[str], budget: int) -> dict[str, Any]:
    """Train to the end; means over the snapshots of one rank, and the median of its iteration times."""
    flags: tuple[str, ...] = ()
    if name != NONE:
        budgets = "--moe-ckpt-budget-local", str(budget), "--moe-ckpt-budget-remote", str(budget)
        strategy = ("full",) if name == FULL else ("selective", *budgets, *ADDED[name])
        flags = ("--moe-ckpt-strategy", *strategy, "--moe-ckpt-replicas", "1")
    with tempfile.TemporaryDirectory(prefix="selective-ablation-") as folder:
        size = Size(iterations, iterations, 0, ())
        train(1, name, size, Path(folder), flags, model=model, layout=LAYOUT, timeout_s=JOB_S)
        (metrics,) = Path(folder).glob("*.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [line for line in lines if "iteration" in line and line["iteration"] > SKIPPED]
    last, taken = lines[-1], sum(line["snapshot_bytes"] > 0 for line in rows)
    waits = [stage for line in rows for stage in line.get("pipeline_waits") or ()]
    return {
        "iteration_s": statistics.median(line["iteration_time_s"] for line in rows),
        "stall_s": statistics.median(line["stall_s"] for line in rows),
        "snapshots": taken,
        "copied": sum(line["snapshot_bytes"] for line in rows) / max(1, taken),
        "sent": sum(line["replicated_bytes"] for line in rows) / max(1, taken),
        "spared": sum(line["spared_bytes"] for line in rows) / max(1, taken),
        "protected": last["iteration"] - (last["protected_iteration"] or 0),
        "waited_s": statistics.mean(stage["waited_s"] for stage in waits) if waits else None,
        "estimated_s": statistics.mean(stage["estimated_s"] for stage in waits) if waits else None,
        "copied_in_waits": sum(stage["copied_bytes"] for stage in waits) / max(1, len(waits)),
        "sent_in_waits": sum(stage["sent_bytes"] for stage in waits) / max(1, len(waits)),
        "overrun_s": max((stage["overrun_s"] for stage in waits), default=None),
    }


def table(result: dict[str, Any]) -> list[tuple[str, float, float, list[float], list[float], list[float]]]:
    """Rows: name, bytes copied and sent per snapshot; by round, as shares of an iteration, what it takes longer than
    without checkpoints and than with `full`, and the stall.

    Without redundancy what peers made from what they hold would have been sent: in `full` and `selection`.
    """
    rounds = result["rounds"]

    def mean(name: str, what: str) -> float:
        return statistics.mean(row[name][what] for row in rounds)

    rows = []
    for shown, name, adds in (
        (FULL, FULL, "spared"),
        (SELECTION, SELECTION, "spared"),
        (REDUNDANCY, SELECTION, ""),
        (GRADIENTS, GRADIENTS, ""),
        (BUBBLES, BUBBLES, ""),
    ):
        sent = mean(name, "sent") + (mean(name, adds) if adds else 0.0)
        longer = [row[name]["iteration_s"] / row[NONE]["iteration_s"] - 1 for row in rounds]
        stalls = [row[name]["stall_s"] / row[NONE]["iteration_s"] for row in rounds]
        paired = [row[name]["iteration_s"] / row[FULL]["iteration_s"] - 1 for row in rounds]
        rows.append((shown, mean(name, "copied"), sent, longer, paired, stalls))
    return rows


def holds(result: dict[str, Any]) -> bool:
    """Whether each of the first three techniques saves bytes that are sent, and copies began in bubbles."""
    rows = {name: (copied, sent) for name, copied, sent, *_ in table(result)}
    falls = [rows[name][1] for name in (FULL, SELECTION, REDUNDANCY, GRADIENTS)]
    saves = all(later < earlier for earlier, later in pairwise(falls))
    used = all(row[BUBBLES]["copied_in_waits"] > 0 for row in result["rounds"])
    return saves and rows[SELECTION][0] < rows[FULL][0] and used


def report(result: dict[str, Any]) -> list[str]:
    """The page."""
    about, rounds, rows = result["machine"], result["rounds"], table(result)
    base = ", ".join(f"{row[NONE]['iteration_s']:.2f}" for row in rounds)
    lines = [
        "# What each technique of MOETION saves",
        "",
        "Made by `benchmarks/selective_ablation.py --write`; every measurement is in"
        " `benchmarks/results/selective_ablation.json`.",
        "",
        "Four ranks, each a node of its own, two pipeline stages, 8 experts per layer, no distributed optimizer, one"
        f" replica, a snapshot after each of {result['iterations']} iterations; the first {SKIPPED} are left out."
        f" `selective` has budgets of {result['budget_bytes'] / 1e6:.1f} MB, for the node and for peers."
        f" {len(rounds)} rounds, in each all jobs one after the other; an iteration without checkpoints took {base} s"
        f" on {about['cores']} cores ({about['cpu']}), torch {about['torch']}, Megatron-Core"
        f" {about['megatron_core']}. The one-minute load was {about['load_before']:.1f} before; four ranks share"
        f" {about['cores']} cores, so that copies take time from training that an accelerator would not lose, and the"
        " spread between rounds is the noise. Bytes, per snapshot of one rank, are exact.",
        "",
        "| | MB copied | MB sent | sent, of `full` | overhead by round, % | against `full`, % | stall by round, % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, copied, sent, longer, paired, stalls in rows:
        told = [", ".join(f"{100 * one:.1f}" for one in each) for each in (longer, paired, stalls)]
        shares = [""] * 3 if name == REDUNDANCY else told
        columns = f"{copied / 1e6:.2f}", f"{sent / 1e6:.2f}", f"{100 * sent / rows[0][2]:.1f} %", *shares
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return [*lines, "", *_remarks(rounds)]


def _remarks(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    def mean(what: str) -> float:
        return statistics.mean(row[BUBBLES][what] for row in rounds)

    late_ms = 1000 * max(row[BUBBLES]["overrun_s"] for row in rounds)
    return [
        "What data-parallel peers hold is never sent, in any job, and no flag changes that: the rows `full` and"
        " `selection` have what their jobs sent and what peers made from their own state (`spared_bytes`),"
        " `+ redundancy` what was sent in the very job of `selection`. The last three do not change what is copied to"
        " the rank's own memory, but for the experts that are selected.",
        "",
        f"In waits for another stage began {mean('copied_in_waits') / 1e6:.2f} MB of what was copied and"
        f" {mean('sent_in_waits') / 1e6:.2f} MB of what was sent, per rank and iteration. A stage waited for"
        f" {mean('waited_s'):.3f} s of an iteration; the schedule lets expect {mean('estimated_s'):.3f} s, of stages"
        f" that are alike and have a core for each rank. The latest chunk ended {late_ms:.1f} ms after its wait.",
    ]


if __name__ == "__main__":
    sys.exit(main())
