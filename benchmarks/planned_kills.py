"""Recoveries that are predicted before they are measured: what `moe-ckpt plan` says of a fault, and what came of it.

A job of each layout and strategy loses a process five times, each time elsewhere between two snapshots. The unit is an
iteration of the same processes between the faults. Experts are padded to a capacity, so that shapes, and with them
kernels, stay the same. The null predictor is what the faults of all other jobs cost on average. Intervals come from
measured over predicted in all other jobs, and what a predicted iteration takes from the means of jobs. What an
iteration takes by the depth of the model is a regression: jobs of three depths predict those of a fourth, between them,
that run in the same turns.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness import STEADY, UNTIED, Benchmark, fitted, row, rule, start, under_faults, where
from localized_recovery import recoveries

from moe_ckpt.simulator.events import Estimate, estimate

BENCHMARK = Benchmark("planned_kills", 1, "planned-kills.md")
STAGES, EXPERTS = {"NPROC": "2", "PP": "2", "EP": "1"}, {"NPROC": "2", "PP": "1", "EP": "2"}
FULL, SPARSE = "full --moe-ckpt-interval 6", "sparse --moe-ckpt-window 4"
CASES = {
    "PP=2, `full`, I=6": (STAGES, FULL, "global"),
    "EP=2, `full`, I=6": (EXPERTS, FULL, "global"),
    "PP=2, `sparse`, W=4": (STAGES, SPARSE, "local"),
    "PP=2, `sparse`, W=4, all stages": (STAGES, f"{SPARSE} --moe-ckpt-recovery global", "global"),
    "EP=2, `sparse`, W=4": (EXPERTS, SPARSE, "global"),
}
"""Layout, strategy, and which stages recover."""
SHAPE = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --moe-ffn-hidden-size 256 --num-experts 8"
    f" --moe-router-topk 2 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 {UNTIED}"
)
DEPTHS, OWN_DEPTH, TRAINED, PACES = (2, 6, 8), 4, 24, 3
"""Layers of jobs that predict the iteration of one with as many as the model has, iterations of each, and jobs of each
depth, which run in turns, in another order each time."""
SMALL = SHAPE.replace("128", "32").replace("256", "64")
PADDED = f"--bf16 {STEADY} --moe-expert-capacity-factor 2.0 --moe-pad-expert-input-to-capacity"
FAULTS = ("1@15:forward-backward", "0@28:step", "1@41:start", "0@54:step", "1@67:start")
ITERATIONS, WARM = 78, 4
"""Of a job; and after a start, those that are no measure of an iteration."""


@dataclass(frozen=True)
class Outcome:
    """What a fault of a job cost, in iterations, and what was predicted: by us, by the null predictor, between which
    bounds."""

    job: str
    measured: float
    predicted: float
    null: float
    low: float
    high: float

    @property
    def is_covered(self) -> bool:
        """By the interval."""
        return self.low <= self.measured <= self.high


def main() -> int:
    """Exit code 1 unless iterations that are run again are predicted better than by the mean of the other jobs, beyond
    the interval."""
    return BENCHMARK.run(__doc__, measured, page, lambda result: beats(list(outcomes(result["cases"], again))))


def measured(turns: int, quick: bool) -> dict[str, Any]:
    """Each job so many times; quick: two jobs of a tiny model, and one fault."""
    names, faults, model = (list(CASES)[::2][:2], FAULTS[:1], SMALL) if quick else (list(CASES), FAULTS, SHAPE)
    last = ITERATIONS if not quick else 22
    found: list[dict[str, Any]] = []
    depths: dict[str, list[tuple[int, float]]] = {"PP=2": []} if quick else {"PP=2": [], "EP=2": []}
    for turn in range(turns):
        for name, layout in zip(depths, (STAGES, EXPERTS), strict=False):
            for index in range(1 if quick else PACES):
                for layers in sorted((*DEPTHS, OWN_DEPTH), reverse=bool((turn + index) % 2))[: 3 if quick else None]:
                    depths[name].append((layers, pace(model, layout, layers)))
        for name in names:
            layout, strategy, scope = CASES[name]
            expected = [predicted(model, layout, strategy, fault) for fault in faults]
            flags = f"{model} {PADDED} --train-iters {last} --moe-ckpt-strategy {strategy} --moe-ckpt-replicas 0"
            lines = under_faults(flags, layout, faults)
            came = recoveries(lines, scope)
            each = [
                {"at": at, **told, **{key: one[key] for key in ("again", "again_s", "restart_s")}}
                for at, told, one in zip(faults, expected, came, strict=True)
            ]
            found.append({"case": name, "iteration_s": iteration_s(lines), "faults": each})
            print(f"{name}: {found[-1]}", flush=True)
    return {"model": f"{model} {PADDED}", "cases": found, "depths": depths}


def pace(model: str, layout: dict[str, str], layers: int) -> float:
    """Seconds of an iteration of a job with so many layers, without checkpoints."""
    flags = f"{model.replace(f'--num-layers {OWN_DEPTH}', f'--num-layers {layers}')} {PADDED} --train-iters {TRAINED}"
    return iteration_s(under_faults(flags, layout, ()))


def predicted(model: str, layout: dict[str, str], strategy: str, fault: str) -> dict[str, float]:
    """What runs again after a fault, by `moe-ckpt plan` from the flags of the job, before it runs.

    Returns:
        predicted: in iterations of training, of which a replay with frozen operators is a part. planned: how many.
    """
    rank, _, at = fault.partition(":")[0].partition("@")
    flags = f"{model} --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 257 --world-size 2"
    flags += f" --pp {layout['PP']} --ep {layout['EP']} --ranks-per-node 1 --iteration-time 1s --moe-ckpt-replicas 0"
    command = [sys.executable, "-m", "moe_ckpt", "plan", *flags.split(), "--moe-ckpt-strategy", *strategy.split()]
    command += ["--lost-ranks", rank, "--iteration", str(int(at) - 1), "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (replay_s,) = [part["predicted_s"] for part in told["timeline"] if part["part"] == "replay"]
    return {"predicted": replay_s, "planned": told["iterations_replayed"] + told["iterations_trained_again"]}


def iteration_s(lines: Sequence[dict[str, Any]]) -> float:
    """The median of iterations that were trained once, in the same processes as what was recovered."""
    times, since, newest = [], 0, 0
    for line in lines:
        since = 0 if "recovery" in line else since + 1
        if "iteration" in line and since > WARM and line["iteration"] > newest:
            times.append(line["iteration_time_s"])
        newest = max(newest, line.get("iteration", 0))
    return statistics.median(times)


Cost = Callable[[dict[str, Any], Sequence[dict[str, Any]]], Iterator[tuple[float, float]]]
"""From a job and all others: of each fault, in iterations, what was measured and what was predicted."""


def again(case: dict[str, Any], others: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """Iterations that are run again."""
    for fault in case["faults"]:
        yield fault["again_s"] / case["iteration_s"], fault["predicted"]


def whole(case: dict[str, Any], others: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float]]:
    """From detection until training is where it was; of a restart it is predicted that it takes as long as others."""
    restart_s = statistics.median(fault["restart_s"] for other in others for fault in other["faults"])
    for fault, (found, told) in zip(case["faults"], again(case, others), strict=True):
        yield found + fault["restart_s"] / case["iteration_s"], told + restart_s / case["iteration_s"]


def outcomes(cases: Sequence[dict[str, Any]], cost: Cost) -> Iterator[Outcome]:
    """Of each fault of each job, with what the jobs of other names say of it."""
    others = [[other for other in cases if other["case"] != case["case"]] for case in cases]
    pairs = [list(cost(case, them)) for case, them in zip(cases, others, strict=True)]
    for case, own in zip(cases, pairs, strict=True):
        beside = [
            pair for one, found in zip(cases, pairs, strict=True) if one["case"] != case["case"] for pair in found
        ]
        off = estimate([math.log(found / told) for found, told in beside])
        half = off.half_width * math.sqrt(off.runs + 1)  # of one more, not of the mean
        null = statistics.fmean(found for found, _ in beside)
        for found, told in own:
            yield Outcome(
                case["case"], found, told, null, told * math.exp(off.mean - half), told * math.exp(off.mean + half)
            )


def error(found: Sequence[Outcome], which: str) -> float:
    """Mean absolute error of `predicted` or `null`, in iterations."""
    return statistics.fmean(abs(getattr(one, which) - one.measured) for one in found)


def gain(found: Sequence[Outcome]) -> Estimate:
    """By how many iterations ours is nearer than the null predictor: over jobs, as faults of one are no independent
    measurements."""
    jobs = dict.fromkeys(one.job for one in found)
    own = [[one for one in found if one.job == job] for job in jobs]
    return estimate([error(of_job, "null") - error(of_job, "predicted") for of_job in own])


def beats(found: Sequence[Outcome]) -> bool:
    """Whether ours is nearer than the null predictor, beyond the interval."""
    over_jobs = gain(found)
    return over_jobs.mean > over_jobs.half_width


def verdict(found: Sequence[Outcome]) -> str:
    """Which of the two is nearer, if one is."""
    over_jobs = gain(found)
    if abs(over_jobs.mean) <= over_jobs.half_width:
        return "no difference"
    return "better" if over_jobs.mean > 0 else "WORSE"


def page(result: dict[str, Any]) -> list[str]:
    """Each fault, and how good both predictors are."""
    cases = result["cases"]
    both = {"run again": list(outcomes(cases, again)), "until training is back": list(outcomes(cases, whole))}
    lines = [
        *BENCHMARK.head("Recoveries, predicted and then measured", ""),
        f"2 processes {where(result)}. A job of each layout and strategy loses {len(cases[0]['faults'])} processes."
        " Predicted: what `moe-ckpt plan --lost-ranks RANK --iteration N` says before the job runs, from its flags."
        " All numbers are in iterations of the same processes, between the faults. Experts are padded to a capacity.",
        "",
        row("job", "iteration, s", "fault", "run again: predicted", "measured", "interval", "until back: predicted",
            "measured", "interval"),
        rule(9),
    ]  # fmt: skip
    of_both = zip(*both.values(), strict=True)
    for case in cases:
        for fault in case["faults"]:
            cells = [
                cell
                for one in next(of_both)
                for cell in (f"{one.predicted:.1f}", f"{one.measured:.1f}", f"{one.low:.1f} to {one.high:.1f}")
            ]
            lines.append(row(case["case"], f"{case['iteration_s']:.3f}", f"`{fault['at']}`", *cells))
    titles = ("predicted", "null predictor", "gain over the jobs", "within the interval")
    lines += ["", row("mean error, in iterations", *titles), rule(5)]
    for name, found in both.items():
        covered = f"{sum(one.is_covered for one in found)} of {len(found)}"
        over_jobs = gain(found)
        errors = (f"{error(found, which):.2f}" for which in ("predicted", "null"))
        lines.append(row(name, *errors, f"{over_jobs:+.2f}", covered))
    lines += ["", *regressions(result, both["run again"])]
    better = [f"{name}: {verdict(found)}" for name, found in both.items()]
    sparse = [one for one in both["run again"] if "`sparse`" in one.job]
    return [
        *lines,
        "Null predictor: the mean of what the faults of all other jobs cost, which knows no layout, no strategy and not"
        f" where the fault lies between two snapshots. Ours is, beyond the 95 % interval of the gain over"
        f" {gain(both['run again']).runs} jobs, {'; '.join(better)}. The gain of run again"
        f" is {gain(both['run again']):+.4f}, in jobs with `sparse` alone {gain(sparse):+.2f}: {verdict(sparse)}."
        " Intervals (95 %, for one more fault) are from measured by predicted in all other jobs. Seconds of a restart"
        " are not predicted: they are the median of the other jobs. Nor are iteration times: they are the unit.",
    ]


def measured_by_predicted(found: Sequence[Outcome]) -> dict[str, float]:
    """Of each job, over its faults, which are no independent measurements of it."""
    jobs = {one.job: [each for each in found if each.job == one.job] for one in found}
    return {job: sum(one.measured for one in own) / sum(one.predicted for one in own) for job, own in jobs.items()}


def regressions(result: dict[str, Any], found: Sequence[Outcome]) -> list[str]:
    """What an iteration that is predicted takes, how many were run again as planned, and what depths say."""
    by_job = measured_by_predicted(found)
    each = ", ".join(f"{ratio:.2f} ({job})" for job, ratio in by_job.items())
    lines = [
        f"An iteration that is predicted to run again takes {estimate(list(by_job.values())):.2f} iterations, the mean"
        f" of jobs with half of its 95 % interval: {each}.",
        "",
    ]
    if counted := [one for case in result["cases"] for one in case["faults"] if "planned" in one]:
        right = sum(one["planned"] == one["again"] for one in counted)
        lines += [f"As many iterations as planned were run again after {right} of {len(counted)} faults.", ""]
    if not (depths := result.get("depths")):
        return lines
    lines += [
        f"Seconds of an iteration without checkpoints by the depth of the model. Jobs of {OWN_DEPTH} layers are"
        " predicted by the line through those of other depths; ± is half of the 95 % interval for the mean of as many"
        " as were measured, and of a layer the standard error. The null predictor scales the deepest.",
        "",
        row("layout", "layers of the line", "jobs of each", "of a layer", "predicted", "measured", "within",
            "null predictor"),
        rule(8, 2),
    ]  # fmt: skip
    for name, jobs in depths.items():
        others = [(layers, took_s) for layers, took_s in jobs if layers != OWN_DEPTH]
        line, deepest = fitted(others), max(layers for layers, _ in others)
        own, of_deepest = ([took_s for layers, took_s in jobs if layers == at] for at in (OWN_DEPTH, deepest))
        own_s, told_s, half = statistics.fmean(own), line.at(OWN_DEPTH), line.half_width_at(OWN_DEPTH, len(own))
        lines.append(
            row(name, ", ".join(map(str, sorted({layers for layers, _ in others}))), len(own),
                f"{line.slope:.4f} ± {line.slope_error:.4f}", f"{told_s:.3f} ± {half:.3f}", f"{own_s:.3f}",
                "yes" if abs(own_s - told_s) <= half else "**no**",
                f"{statistics.fmean(of_deepest) * OWN_DEPTH / deepest:.3f}")
        )  # fmt: skip
    return [*lines, ""]


if __name__ == "__main__":
    start(main)
