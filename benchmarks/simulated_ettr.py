"""The simulator's ETTR of jobs on this machine beside what they reach under real faults (as MoEvement Table 4).

What the simulator gets is measured first: what each strategy adds to an iteration, and in a job with a few faults at
fixed times how long a restart and a replayed iteration take. Then each strategy trains under faults at random times,
and the simulator is given the same times. A machine whose cores are shared with others changes its speed by more than
what is compared here, so all is counted in iterations of the same job, and becomes seconds by the pace of the run that
is predicted. With --write the result is kept as data and a page.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, machine

from moe_ckpt.drills.job import STOP_SIGNAL, DrillJob, DrillOutcome, JobPlan
from moe_ckpt.drills.reports import ettr
from moe_ckpt.drills.schedule import Kind, Odds, PlannedKill, schedule
from moe_ckpt.simulator.behaviour import Behaviour, Nodes, RecoveryCost
from moe_ckpt.simulator.events import simulate
from moe_ckpt.simulator.faults import Fault as SimulatedFault

BENCHMARK = Benchmark("simulated_ettr", "simulated-ettr.md")
TARGET = 0.015

LAYOUT = {"NPROC": "2", "PP": "2", "EP": "1", "MAX_RESTARTS": "1000"}
MODEL = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --moe-ffn-hidden-size 384 --num-experts 8"
    " --seq-length 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 20000"
    " --untie-embeddings-and-output-weights --lr-warmup-iters 0 --lr-decay-style constant"
).split()
WARM = 5
"""First iterations, in which much happens for the first time."""
PACED, TURNS = 50, 2
"""Iterations of the jobs that time them, with checkpoints and without in turns, and how many turns."""
CALIBRATION_FAULTS = 7
"""Faults that tell what a restart takes, one each 15 s."""


@dataclass(frozen=True)
class Setup:
    """A strategy as it is run. interval: iterations between states to return to. latency: until such a state counts.
    dense: what came after it is trained again; else it is replayed, a window first."""

    flags: tuple[str, ...]
    interval: int
    latency: int
    dense: bool


def _ours(*flags: str) -> tuple[str, ...]:
    return ("--moe-ckpt-strategy", *flags)


BEHIND = ("--async-save", "--use-persistent-ckpt-worker")
SETUPS = {
    "torch_dist async, every 10": Setup(("--save-interval", "10", *BEHIND), 10, 1, True),
    "full, every 4": Setup(_ours("full", "--moe-ckpt-interval", "4"), 4, 1, True),
    "sparse, W = 4, global": Setup(
        _ours("sparse", "--moe-ckpt-window", "4", "--moe-ckpt-recovery", "global"), 4, 1, False
    ),
    "sparse, W = 4, local": Setup(
        _ours("sparse", "--moe-ckpt-window", "4", "--moe-ckpt-recovery", "local"), 4, 1, False
    ),
}


@dataclass(frozen=True)
class Inputs:
    """What was measured for one setup, in iterations with checkpoints of the same job: an iteration without them, a
    restart, and an iteration that is replayed. between: the time that passes by that which iterations report, so with
    what is between them."""

    plain: float
    between: float
    restart: float
    replayed: float


def main() -> int:
    """Measure; exit code 1 unless six runs or more are predicted within 1.5 %."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each setup (default: 2)")
    parser.add_argument("--minutes", type=float, default=2.5, help="of a run (default: 2.5)")
    parser.add_argument("--mtbf", type=float, default=75.0, help="seconds between faults (default: 75)")
    arguments = parser.parse_args()
    result = BENCHMARK.result(arguments, lambda: measured(arguments))
    BENCHMARK.show(arguments, result, list(page(result)))
    return 0 if sum(abs(run["simulated"] - run["measured"]) <= TARGET for run in result["runs"]) >= 6 else 1


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All inputs, then all runs."""
    run_s = 60 * arguments.minutes
    result: dict[str, Any] = {"machine": machine(), "mtbf_s": arguments.mtbf, "run_s": run_s, "inputs": {}, "runs": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ettr-benchmark-") as scratch:
        for name, setup in SETUPS.items():
            inputs = inputs_of(setup, Path(scratch) / "inputs")
            result["inputs"][name] = asdict(inputs)
            print(f"{name}: {inputs}", flush=True)
            for seed in range(arguments.seeds):
                kills = schedule(seed, Odds(arguments.mtbf, 0.0, 1, 2), run_s)
                outcome = job(Path(scratch) / "run", setup.flags, kills=kills, run_s=run_s)
                found = compared(name, setup, inputs, outcome)
                result["runs"].append({"setup": name, "seed": seed} | found)
                print(
                    f"{name}, seed {seed}: simulated {found['simulated']:.3f}, measured {found['measured']:.3f}",
                    flush=True,
                )
    result["machine"]["load_after"] = os.getloadavg()[0]
    return result


def job(
    folder: Path,
    flags: Sequence[str],
    *,
    kills: Sequence[PlannedKill] = (),
    run_s: float | None = None,
    exit_at: int | None = None,
) -> DrillOutcome:
    """A job to its end, in a folder of its own that is removed."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as own:
        ending = ("--exit-interval", str(exit_at)) if exit_at else ()
        stop = ("--exit-signal-handler", "--exit-signal", STOP_SIGNAL.name) if run_s else ()
        saved = ("--save", f"{own}/ckpt", "--load", f"{own}/ckpt") if "--save-interval" in flags else ()
        memory = ("--moe-ckpt-memory-dir", f"{own}/memory") if "--moe-ckpt-strategy" in flags else ()
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *MODEL, *flags, *ending, *stop, *saved, *memory]
        plan = JobPlan(folder.name, command, LAYOUT, kills, run_s)
        with DrillJob(plan, Path(own) / "job", Path(own) / "memory", lambda text: None) as running:
            return running.run()


def pace_s(outcome: DrillOutcome, between: float) -> float:
    """Mean seconds from one trained iteration to the next, without the first ones. between: see `Inputs`."""
    return between * statistics.fmean(report["iteration_time_s"] for report in outcome.journal.trained[WARM:])


def inputs_of(setup: Setup, folder: Path) -> Inputs:
    """What the simulator gets of a setup."""
    turns = [[job(folder, flags, exit_at=PACED) for flags in ((), setup.flags)] for _ in range(TURNS)]
    between = statistics.median(walls(paced) for _, paced in turns)
    ratios = [pace_s(without, walls(without)) / pace_s(paced, between) for without, paced in turns]
    kills = [PlannedKill(15.0 * (number + 1), Kind.RANK, number % 2) for number in range(CALIBRATION_FAULTS)]
    outcome = job(folder, setup.flags, kills=kills, run_s=15.0 * (CALIBRATION_FAULTS + 1))
    replayed = sum(timeline["replayed"] for timeline in outcome.journal.recoveries)
    replay_s = sum(timeline["parts"].get("replay", 0.0) for timeline in outcome.journal.recoveries)
    pace = pace_s(outcome, between)
    # A fault cuts off half an iteration on average, which the simulator counts by itself.
    down_s = outcome.wall_s - (len(outcome.journal.trained) - 1) * pace - replay_s
    restart = down_s / len(outcome.strikes) / pace - 0.5
    return Inputs(min(1.0, statistics.median(ratios)), between, restart, replay_s / max(1, replayed) / pace)


def walls(outcome: DrillOutcome) -> float:
    """Of a job without faults: the time that passed by that in its iterations."""
    return outcome.wall_s / sum(report["iteration_time_s"] for report in outcome.journal.reports[1:])


def compared(name: str, setup: Setup, inputs: Inputs, outcome: DrillOutcome) -> dict[str, float]:
    """ETTR of a run, simulated with the faults as they struck, and measured."""
    pace = pace_s(outcome, inputs.between)
    useful_s = inputs.plain * pace
    recovery = recovery_of(setup, inputs, outcome.first, pace)
    behaviour = Behaviour(name, useful_s, setup.interval, 1, pace - useful_s, 0.0, recovery)
    faults = [SimulatedFault(strike.at_s, frozenset({0})) for strike in outcome.strikes]
    run = simulate(behaviour, faults, outcome.wall_s)
    shares = {"simulated": run.ettr, "measured": ettr(outcome.last - outcome.first, useful_s, outcome.wall_s)}
    return shares | {"faults": len(faults), "iterations": outcome.last, "iteration_s": pace}


def recovery_of(setup: Setup, inputs: Inputs, first: int, pace: float) -> Callable[[int, Nodes, Nodes], RecoveryCost]:
    """What a fault costs, by the iteration that it cuts off. first: iterations that were trained before the clock
    began. pace: seconds of an iteration with checkpoints."""
    restart_s = inputs.restart * pace

    def recover(since: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
        iteration = first + since
        again = min(
            iteration,
            iteration % setup.interval + (setup.interval if iteration % setup.interval < setup.latency else 0),
        )
        if setup.dense:
            return RecoveryCost(0.0, restart_s, 0.0, again * pace, again)
        replayed = min(iteration, setup.interval - 1 + again)
        return RecoveryCost(0.0, restart_s, 0.0, replayed * inputs.replayed * pace, replayed)

    return recover


def page(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    yield from ("# Simulated and measured ETTR", "")
    yield "Made by `benchmarks/simulated_ettr.py --write`; all figures are in `benchmarks/results/simulated_ettr.json`."
    yield (
        f"2 processes on 2 cores, PP = 2; each run {result['run_s']:.0f} s with faults every"
        f" {result['mtbf_s']:.0f} s on average. The simulator got the costs of the second table, which were measured in"
        " other jobs and are told in iterations with checkpoints, the pace of the run and the times of its faults: the"
        " cores are shared with others, and their speed changes by more than what is compared here. What an iteration"
        " takes without checkpoints (1 at most) is a factor of both columns, and so of their difference."
    )
    yield from (
        "",
        "| setup | seed | faults | an iteration | simulated | measured | difference |",
        "|---|---|---|---|---|---|---|",
    )
    for run in result["runs"]:
        gap = run["simulated"] - run["measured"]
        yield (
            f"| {run['setup']} | {run['seed']} | {run['faults']} | {run['iteration_s']:.3f} s | {run['simulated']:.3f}"
            f" | {run['measured']:.3f} | {gap:+.3f} |"
        )
    yield from (
        "",
        "| setup | an iteration without checkpoints | a restart | a replayed iteration |",
        "|---|---|---|---|",
    )
    for name, inputs in result["inputs"].items():
        yield f"| {name} | {inputs['plain']:.3f} | {inputs['restart']:.1f} | {inputs['replayed'] or '-':.3} |"
    near = sum(abs(run["simulated"] - run["measured"]) <= TARGET for run in result["runs"])
    yield from ("", f"{near} of {len(result['runs'])} runs are predicted within {100 * TARGET:.1f} %.")


if __name__ == "__main__":
    raise SystemExit(main())
