"""Recovery of the failed stage alone against a rollback of all stages: from detection until training is where it was.

One job with `--moe-ckpt-recovery local` and one with `global` run right after each other, in another order in each
pair, with the same faults; so whatever else the machine does hits both. Timelines are those that the jobs write
themselves. A rollback of all stages rejoins at an earlier iteration: the iterations that it then trains again, up to
where the fault struck, count as well. The replay alone is compared per pair too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness import STEADY, UNTIED, Benchmark, row, rule, spread, start, under_faults, where

from moe_ckpt.simulator.events import Estimate, estimate

BENCHMARK = Benchmark("localized_recovery", 5, "localized-recovery.md")
LAYOUTS = {"PP=2, EP=2": {"NPROC": "4", "PP": "2", "EP": "2"}, "PP=4": {"NPROC": "4", "PP": "4", "EP": "1"}}
SCOPES = ("local", "global")
WINDOW, ITERATIONS = 4, 30
LARGE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --moe-ffn-hidden-size 512 --num-experts 8"
    " --seq-length 128 --micro-batch-size 2 --global-batch-size 16"
)
SMALL = "--num-layers 4 --hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 8"
FAULTS = ("1@10:forward-backward", "2@18:step", "3@26:start")
"""Each some iterations after a window was whole, in a stage of its own with PP=4."""


def main() -> int:
    """Exit code 1 unless the failed stage alone ran its iterations again sooner, by the median, in every layout.

    Not judged: whether it was back sooner. Where all processes are new, imports are most of a recovery of either kind.
    """
    return BENCHMARK.run(
        __doc__, measured, page,
        lambda result: all(statistics.median(ratios(found, "again_s")) < 1 for found in result["layouts"].values()),
    )  # fmt: skip


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """All pairs of all layouts; quick: a tiny model, one layout and one fault."""
    layouts = dict(list(LAYOUTS.items())[:1]) if quick else LAYOUTS
    faults, iterations, model = (FAULTS[:1], 14, SMALL) if quick else (FAULTS, ITERATIONS, LARGE)
    flags = f"{UNTIED} {STEADY} {model} --train-iters {iterations} --moe-ckpt-strategy sparse"
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in layouts}
    for name, layout in layouts.items():
        for index in range(turns):
            pair = {}
            for scope in SCOPES[:: 1 if index % 2 else -1]:
                own = f"{flags} --moe-ckpt-window {WINDOW} --moe-ckpt-recovery {scope}"
                pair[scope] = recoveries(under_faults(own, layout, faults), scope)
            found[name].append(pair)
            print(f"{name}: pair {index + 1} of {turns}", flush=True)
    return {"model": model, "window": WINDOW, "layouts": found}


def recoveries(lines: Sequence[dict[str, Any]], scope: str) -> list[dict[str, float]]:
    """Of each recovery: seconds from detection to rejoin; those until training is back where the fault struck; those
    in which iterations were run again; and how many these were. Raises SystemExit for one of another scope."""
    found: list[dict[str, float]] = []
    newest = 0
    for line in lines:
        if "recovery" in line:
            timeline = line["recovery"]
            if timeline["scope"] != scope:
                raise SystemExit(f"asked for {scope}, but a fault led to a recovery of scope {timeline['scope']}")
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
    both = [one for pair in pairs for one in zip(pair["local"], pair["global"], strict=True)]
    return [local[name] / other[name] for local, other in both if other[name]]


def of_jobs(pairs: Sequence[dict[str, Any]], name: str) -> Estimate:
    """The ratio of the means of each pair of jobs, as recoveries of one job are alike."""
    return estimate([
        statistics.fmean(one[name] for one in pair["local"]) / statistics.fmean(one[name] for one in pair["global"])
        for pair in pairs
    ])  # fmt: skip


def verdict(ratio: Estimate) -> str:
    """What an interval lets one say of times."""
    if not ratio.is_beyond(1):
        return "no difference shown"
    return "less" if ratio.mean < 1 else "MORE"


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    recovered = min(len(ratios(pairs, "rejoin_s")) for pairs in result["layouts"].values())
    jobs = min(map(len, result["layouts"].values()))
    lines = [
        *BENCHMARK.head("Recovery of the failed stage alone"),
        f"4 processes {where(result)}. `sparse` with windows of {result['window']}; a process is killed in different"
        f" stages and phases, and all start anew: {recovered} recoveries of {jobs} jobs in each cell."
        " Jobs that recover the failed stage alone and jobs that roll all stages back run in turns."
        " With more stages than cores a stage that replays alone has a core for itself, a whole pipeline has not.",
        "",
        row(
            "layout", "", "failed stage alone", "all stages", "ratio", "mean ratio of jobs, ± half of its 95 % interval"
        ),
        rule(6, 6),
    ]
    rows = {"back_s": "detection until training is where it was, s", "rejoin_s": "detection to rejoin, s",
            "again_s": "iterations that are run again, s"}  # fmt: skip
    for layout, pairs in result["layouts"].items():
        for name, title in rows.items():
            cells = [spread([recovery[name] for pair in pairs for recovery in pair[scope]], 2) for scope in SCOPES]
            lines.append(row(layout, title, *cells, spread(ratios(pairs, name), 2), f"{of_jobs(pairs, name):.2f}"))
    lines.append("")
    for layout, pairs in result["layouts"].items():
        back, again = (verdict(of_jobs(pairs, name)) for name in ("back_s", "again_s"))
        lines.append(
            f"{layout}, the failed stage alone against all, beyond the interval over jobs: until training is where it"
            f" was: {back}; iterations run again: {again}.  "
        )
    return lines


if __name__ == "__main__":
    start(main)
