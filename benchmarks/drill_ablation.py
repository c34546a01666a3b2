"""What local recovery and standbys each contribute: the same job under the same faults, with and without them.

After MoEvement's Fig. 13, on real jobs: `sparse` on two nodes of four ranks, whose ranks are killed at random. All
stages roll back, or only the one that was struck; and all ranks start as new processes, or the others keep theirs and a
standby takes the place of the one that was lost. Each state must be as without faults, to the last bit. Times are those
of one machine, on which all ranks share few cores. With --write the result is kept as data and as a page.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Benchmark, machine

from moe_ckpt.drills.drill import Drill, DrillSettings, judged, wrong_components
from moe_ckpt.drills.reports import iteration_s
from moe_ckpt.drills.schedule import Odds, schedule

BENCHMARK = Benchmark("drill_ablation", "drill-ablation.md")

NODES, NPROC = 2, 4
STANDBYS = 2
KINDS = {
    "all stages, new processes": ("global", 0),
    "all stages, in place": ("global", STANDBYS),
    "struck stage, new processes": ("local", 0),
    "struck stage, in place": ("local", STANDBYS),
}
"""--moe-ckpt-recovery, and standbys per node."""


def main() -> int:
    """Measure; exit code 1 unless all came out as without faults, and the last kind got furthest."""
    parser = BENCHMARK.parser(__doc__, quick="15 seconds of each kind")
    parser.add_argument("--minutes", type=float, default=4.0, help="under faults, of each kind (default: 4)")
    parser.add_argument("--mtbf", type=float, default=20.0, help="seconds between faults on average (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the times and victims (default: 1)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.minutes, arguments.mtbf = 0.25, 5.0
    result = BENCHMARK.result(arguments, lambda: measured(60 * arguments.minutes, arguments.mtbf, arguments.seed))
    BENCHMARK.show(arguments, result, page(result))
    jobs = result["jobs"]
    is_right = not any(job["wrong"] or job["wrong_components"] for job in jobs.values())
    return int(not is_right or max(jobs, key=lambda kind: float(jobs[kind]["ettr"])) != list(KINDS)[-1])


def measured(run_s: float, mtbf_s: float, seed: int) -> dict[str, Any]:
    """All kinds, one after the other, and the run without faults that they are compared with."""
    result: dict[str, Any] = {"machine": machine(), "run_s": run_s, "mtbf_s": mtbf_s, "seed": seed, "jobs": {}}
    kills = schedule(seed, Odds(mtbf_s, 0.0, NODES, NODES * NPROC), run_s)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="drill-ablation-") as name:
        folder = Path(name)
        common = DrillSettings(folder, folder / "memory", NODES, NPROC, run_s, mtbf_s, 180.0, kills)
        outcomes = {}
        for kind, (recovery, standbys) in KINDS.items():
            own = replace(
                common, folder=folder / kind.replace(" ", "-"), flags=("--moe-ckpt-recovery", recovery),
                standbys=standbys,
            )  # fmt: skip
            outcomes[kind] = Drill(own, say).subject()
        reference = folder / "reference"
        last = max(outcome.last for outcome in outcomes.values())
        for kind, outcome in outcomes.items():
            journal = Drill(common, say).reference(reference, last, outcome.last)
            job = judged(outcome, journal, iteration_s(journal))
            job["wrong_components"] = list(wrong_components(outcome.folder, reference, outcome.last))
            result["jobs"][kind] = job
    return result


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)


def page(result: dict[str, Any]) -> list[str]:
    """A row for each kind."""
    about, jobs = result["machine"], result["jobs"]
    faults = len(next(iter(jobs.values()))["faults"])
    lines = [
        "# What local recovery and standbys contribute",
        "",
        "Made by `benchmarks/drill_ablation.py --write`; every recovery is in `benchmarks/results/drill_ablation.json`."
        " The idea is that of MoEvement's Fig. 13, of which the [simulated one](moevement-fig13.md) is beside.",
        "",
        f"{NODES} nodes of {NPROC} ranks (PP=2, EP=2) on {about['cores']} cores ({about['cpu']}), torch"
        f" {about['torch']}, Megatron-Core {about['megatron_core']}; `sparse` with a window of 4. Each job was under"
        f" faults for {result['run_s']:.0f} s, {result['mtbf_s']:g} s apart on average, {faults} of them, the same for"
        f" all. With standbys a node has {STANDBYS}.",
        "",
        "| recovery of | ETTR | iterations | seconds of a recovery, median | iterations replayed | as without faults |",
        "|---|---|---|---|---|---|",
    ]
    for kind, job in jobs.items():
        seconds = [timeline["total_s"] for timeline in job["timelines"]]
        right = "no" if job["wrong"] or job["wrong_components"] else "to the last bit"
        lines.append(
            f"| {kind} | {job['ettr']:.3f} | {job['iterations']} | {statistics.median(seconds):.1f} |"
            f" {job['replayed']} | {right} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
