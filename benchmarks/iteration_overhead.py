"""What protection adds to an iteration where all cores are busy: the job of the drill with and without it, in turns.

2 nodes of 4 ranks share the cores of this machine, and a rank's state is 1 MB, so that what is added is no copying of
bytes but the fixed work of each iteration: messages between ranks, manifests, plans. Nothing fails. The pace of a
machine that others use too changes from one minute to the next: only jobs that run one after the other are compared.
With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import Benchmark, machine

from moe_ckpt.drills.drill import SUBJECT, UNTIED
from moe_ckpt.drills.job import ROOT, DrillJob, JobPlan
from moe_ckpt.drills.reports import iteration_s

BENCHMARK = Benchmark("iteration_overhead", "iteration-overhead.md")

LAYOUT = {"TP": "1", "PP": "2", "EP": "2", "NNODES": "2", "NPROC": "4"}
WARM = 10
"""First iterations, which do not count: connections are made, memory is touched for the first time."""


def main() -> int:
    """Measure, and show."""
    parser = BENCHMARK.parser(__doc__, quick="one round of a few iterations")
    parser.add_argument("--rounds", type=int, default=5, help="of both jobs in turns (default: 5)")
    parser.add_argument("--iterations", type=int, default=90, help="of each job (default: 90)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.iterations = 1, WARM + 4
    result = BENCHMARK.result(arguments, lambda: measured(arguments.rounds, arguments.iterations))
    BENCHMARK.show(arguments, result, list(page(result)))
    return 0


def measured(rounds: int, iterations: int) -> dict[str, Any]:
    """The median iteration of each job."""
    found: list[dict[str, float]] = []
    for turn in range(rounds):
        kinds = ["without", "sparse"] if turn % 2 == 0 else ["sparse", "without"]
        found.append({kind: _iteration_s(kind, iterations) for kind in kinds})
        sys.stderr.write(f"round {turn + 1} of {rounds}: {found[-1]}\n")
    return {"machine": machine(), "iterations": iterations, "rounds": found}


def _iteration_s(kind: str, iterations: int) -> float:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="iteration-overhead-") as name:
        folder = Path(name)
        protection = [*SUBJECT, "--moe-ckpt-memory-dir", str(folder / "memory")]
        protection += ["--moe-ckpt-persist-dir", str(folder / "persistent")]
        flags = [*UNTIED, "--train-iters", "12000", "--exit-interval", str(iterations)]
        flags += protection if kind == "sparse" else []
        plan = JobPlan(kind, [str(ROOT / "scripts" / "train_cpu.sh"), *flags], LAYOUT)
        with DrillJob(plan, folder / "job", folder / "memory", lambda text: None) as job:
            return iteration_s(job.run().journal, WARM)


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for people."""
    rounds = result["rounds"]
    ratios = [one["sparse"] / one["without"] for one in rounds]
    yield "# What protection adds to an iteration on full cores"
    yield ""
    yield (
        "Made by `benchmarks/iteration_overhead.py --write`; each round is in"
        f" `benchmarks/results/{BENCHMARK.data.name}`. The job of [the drill](chaos.md) without faults: 2 nodes of 4"
        f" ranks on {result['machine']['cores']} cores ({result['machine']['cpu']}), `sparse` with a window of 4,"
        " snapshots after each iteration, replicated and persisted. Medians of"
        f" {result['iterations'] - WARM} iterations; the jobs of a round ran one after the other."
    )
    yield ""
    yield "| round | s per iteration, not protected | protected | ratio |"
    yield "|---|---|---|---|"
    for at, (one, ratio) in enumerate(zip(rounds, ratios, strict=True), 1):
        yield f"| {at} | {one['without']:.3f} | {one['sparse']:.3f} | {ratio:.2f} |"
    yield ""
    yield (
        f"A protected iteration takes {statistics.median(ratios):.2f} times as long by the median"
        f" ({min(ratios):.2f} to {max(ratios):.2f}). The state is 1 MB per rank, so this is the"
        " [fixed work of an iteration](../internals/decisions/065-messages-cost-more-than-bytes.md), done on cores that"
        " training keeps busy. With larger states [the copies](every-iteration.md) count."
    )


if __name__ == "__main__":
    sys.exit(main())
