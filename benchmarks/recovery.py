"""Recovery in place, with standbys, and with new processes; of the struck stage alone, and of all stages.

A rank is killed. In place the ranks that were not lost keep their processes, and one standby takes the slot of the one
that was; with standbys for all, or with new processes, all ranks start again. Jobs of each kind run right after each
other, in another order in each round, with the same faults; so whatever else the machine does hits all. Timelines are
those that the jobs write themselves. A fault strikes once the standbys are ready.
"""

from __future__ import annotations

import statistics
from typing import Any

from harness import ROOT, STEADY, UNTIED, Benchmark, laid_out, row, rule, spread, start, under_faults, where

from moe_ckpt.simulator.events import Estimate, estimate

BENCHMARK = Benchmark("recovery", 5, "recovery.md")
WINDOW = 4
LAYOUT, QUICK = {"NPROC": "4", "PP": "2", "EP": "2"}, {"NPROC": "2", "PP": "2", "EP": "1"}
ALL = int(LAYOUT["NPROC"])
KINDS = {
    "in place": ("auto", 1),
    "standbys": ("auto", ALL),
    "new processes": ("auto", 0),
    "all stages, in place": ("global", 1),
    "all stages, standbys": ("global", ALL),
    "all stages, new processes": ("global", 0),
}
"""--moe-ckpt-recovery, and standbys of the job."""
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 8"
    f" --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --bf16 {UNTIED} {STEADY}"
)
FAULTS = ("1@10:forward-backward", "2@18:step", "3@26:start", "0@34:forward-backward")
PARTS = ("park", "restart", "import", "rendezvous", "build", "inventory", "fetch", "replay", "rejoin")
MOST_S, MOST_SHARE = 1.5, 0.15
"""That a recovery in place may take beside the replay, and of what one with new processes takes."""


def main() -> int:
    """Exit code 1 unless recoveries in place were the fastest, by the median."""
    return BENCHMARK.run(__doc__, measured, page, lambda result: statistics.median(_ratios(result, "in place")) < 1)


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """All rounds; quick: two processes and one fault, in place and with new processes."""
    kinds = ["in place", "new processes"] if quick else list(KINDS)
    layout, faults = (QUICK, FAULTS[:1]) if quick else (LAYOUT, FAULTS)
    rounds = []
    for index in range(turns):
        rounds.append({kind: recoveries(kind, layout, faults) for kind in kinds[:: 1 if index % 2 else -1]})
        print(f"round {index + 1} of {turns}", flush=True)
    return {"model": MODEL, "layout": layout, "window": WINDOW, "rounds": rounds}


def recoveries(kind: str, layout: dict[str, str], faults: tuple[str, ...]) -> list[dict[str, Any]]:
    """The timelines of a job that all faults struck."""
    scope, standbys = KINDS[kind]
    last = int(faults[-1].partition("@")[2].partition(":")[0])
    flags = f"{MODEL} --train-iters {last + 4} --moe-ckpt-strategy sparse --moe-ckpt-window {WINDOW}"
    own = {
        "STANDBYS": str(standbys), "READY_STANDBYS": str(min(standbys, 1)), "SLOTS": "{folder}",
        "KEEP": str(int(kind.endswith("in place"))),
        "MOE_CKPT_SCRIPT": str(ROOT / "tests" / "process" / "standby_job.py"),
    }  # fmt: skip
    found = under_faults(f"{flags} --moe-ckpt-recovery {scope}", layout | own, faults)
    timelines = [line["recovery"] for line in found if "recovery" in line]
    if kind.endswith("new processes") and any(one["parts"]["rendezvous"] > one["parts"]["import"] for one in timelines):
        raise SystemExit(f"new processes took longer to meet than to import: {timelines}")
    return [{"total_s": one["total_s"], "parts": one["parts"], "replayed": one["replayed"]} for one in timelines]


def _back_s(recovery: dict[str, Any]) -> float:
    """From detection to rejoin, without iterations that are run again: that is the same work for all kinds."""
    return float(recovery["total_s"]) - float(recovery["parts"].get("replay", 0.0))


def _ratios(result: dict[str, Any], kind: str) -> list[float]:
    """Of this kind over new processes, recovery by recovery."""
    pairs = [pair for found in result["rounds"] for pair in zip(found[kind], found["new processes"], strict=True)]
    return [_back_s(one) / _back_s(other) for one, other in pairs]


def _of_jobs(result: dict[str, Any], kind: str) -> Estimate:
    """The mean over jobs, as recoveries of one job are alike, with Student's 95 % interval."""
    return estimate([statistics.fmean(map(_back_s, of_round[kind])) for of_round in result["rounds"]])


def page(result: dict[str, Any]) -> list[str]:
    """Medians and, in brackets, quartiles."""
    kinds = [kind for kind in KINDS if kind in result["rounds"][0]]
    every = {kind: [one for found in result["rounds"] for one in found[kind]] for kind in kinds}
    back = [_back_s(one) for one in every["in place"]]
    lines = [
        *BENCHMARK.head("Recovery in place, with standbys, and with new processes"),
        f"{laid_out(result['layout'])} {where(result)}; `sparse` with a window of {WINDOW}. A rank is killed. In"
        " place the others keep their processes, and a standby takes its slot; else all ranks start again, from"
        " standbys that have done their imports, or as new processes. The struck stage alone goes back, or all stages"
        f" where that is said. Each kind has {len(result['rounds'])} jobs and {len(back)} recoveries. Iterations"
        " that are run again are left out of the first three rows; ± is half of a 95 % interval over jobs.",
        "",
        row("", *kinds),
        rule(1 + len(kinds)),
        row("detection to rejoin, s", *(spread([_back_s(one) for one in every[kind]], 2) for kind in kinds)),
        row("mean of jobs, s", *(f"{_of_jobs(result, kind):.2f}" for kind in kinds)),
        row("of that with new processes", *(spread(_ratios(result, kind), 2) for kind in kinds)),
    ]
    for part in PARTS:
        lines.append(
            row(f"{part}, s", *(spread([one["parts"].get(part, 0.0) for one in every[kind]], 2) for kind in kinds))
        )
    return [
        *lines,
        "",
        f"In place a recovery takes {statistics.median(back):.2f} s beside the replay, by the median of {len(back)}"
        f" (asked for: {MOST_S} s at most), {statistics.median(_ratios(result, 'in place')):.2f} of the time that it"
        f" takes with new processes (asked for: {MOST_SHARE}).",
    ]


if __name__ == "__main__":
    start(main)
