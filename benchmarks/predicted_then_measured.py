"""Eight small jobs, each predicted before it runs: iteration time, overhead of checkpoints, and recovery.

    python benchmarks/predicted_then_measured.py [--jobs N] [--write]

First `moe-ckpt profile` measures this machine, once for each model and layout, with as many ranks at once as the jobs
have. Then everything is predicted by the simulator, from these profiles alone, and written to predictions.json. Only
then the jobs run, each with one SIGKILL at a time that was planned. What is there is not done again: a run that was cut
off goes on where it was, and `--again` forgets it. --jobs: only the first N.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, machine

from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape, Topology
from moe_ckpt.drills.job import STOP_SIGNAL, DrillJob, JobPlan
from moe_ckpt.drills.schedule import Kind, PlannedKill
from moe_ckpt.simulator.behaviour import Behaviour
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.inputs import TrainingJob
from moe_ckpt.simulator.profiles import load_profile
from moe_ckpt.simulator.systems import Gemini, MoEvement, NoCheckpoints
from moe_ckpt.simulator.systems.links import SystemSetting
from moe_ckpt.simulator.systems.pec import PecCosts

BENCHMARK = Benchmark("predicted_then_measured", "predicted-then-measured.md")
FOLDER = ROOT / ".data" / "predicted_then_measured"
"""Where profiles, predictions and measurements lie until all is there."""
RANKS, SEQ_LENGTH, SIZES = 2, 128, (1, 2, 4)
PLAIN_S, KILL_S, AFTER_S = 12.0, 15.0, 12.0
"""How long a job trains without checkpoints; when a rank is killed in the one with them, after the first iteration; and
how long that goes on afterwards."""
WARM = 4
NEAR, NEAR_SHARE, FEWEST = 0.10, 0.10, 6
"""What counts as met: an error of 10 %, for overhead 10 % of an iteration; and in how many jobs."""
TIMES = ("iteration_s", "recovery_s")


def _shape(name: str, hidden: int, experts_ffn: int) -> ModelShape:
    return ModelShape(
        name, 2, hidden, 4, 384, experts_ffn, num_experts=8, moe_ffn_hidden_size=experts_ffn,
        gated_linear_unit=True, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


SHAPES = {"narrow": _shape("narrow", 192, 384), "wide": _shape("wide", 256, 768)}
LAYOUTS = {"pp": (1, 2, 1), "ep": (1, 1, 2), "tp": (2, 1, 1)}
"""Degrees of tensor, pipeline and expert parallelism, of two ranks."""


@dataclass(frozen=True)
class SmallJob:
    """One of the jobs. every: iterations between snapshots, or of a window; of `pec` experts of each layer in one."""

    shape: str
    layout: str
    layers: int
    micro_batch: int
    global_batch: int
    strategy: str
    every: int = 0

    @property
    def name(self) -> str:
        """For people."""
        what = {"none": "none", "full": "full, I", "sparse": "sparse, W", "pec": "pec, K"}[self.strategy]
        every = f" = {self.every}" if self.every else ""
        batch = f"batch {self.global_batch} by {self.micro_batch}"
        return f"{self.shape}, {self.layers} layers, {self.layout.upper()} = 2, {batch}, {what}{every}"

    @property
    def training(self) -> TrainingJob:
        """As the simulator sees it."""
        tp, pp, ep = LAYOUTS[self.layout]
        topology = Topology(RANKS, tp=tp, pp=pp, ep=ep, ranks_per_node=RANKS)
        shape = ModelShape(**asdict(SHAPES[self.shape]) | {"num_layers": self.layers})
        microbatches = self.global_batch // (self.micro_batch * topology.dp)
        return TrainingJob(shape, topology, FP32, self.global_batch, microbatches, SEQ_LENGTH)


JOBS = (
    SmallJob("narrow", "pp", 4, 2, 8, "none"),
    SmallJob("wide", "ep", 4, 1, 8, "pec", 2),
    SmallJob("narrow", "tp", 2, 2, 8, "full", 4),
    SmallJob("narrow", "pp", 6, 1, 8, "sparse", 4),
    SmallJob("wide", "ep", 2, 2, 16, "full", 2),
    SmallJob("narrow", "tp", 4, 1, 4, "pec", 1),
    SmallJob("narrow", "pp", 8, 2, 16, "full", 8),
    SmallJob("wide", "ep", 6, 2, 8, "sparse", 2),
)


def main() -> int:
    """Exit code 1 unless enough jobs come out as predicted."""
    parser = BENCHMARK.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=len(JOBS))
    parser.add_argument("--again", action="store_true", help="forget what an earlier run has left")
    arguments = parser.parse_args()
    result = BENCHMARK.result(arguments, lambda: measured(JOBS[: arguments.jobs], FOLDER, again=arguments.again))
    BENCHMARK.show(arguments, result, list(page(result)))
    return 0 if len(list(met(result))) >= min(FEWEST, arguments.jobs) else 1


def measured(jobs: Sequence[SmallJob], folder: Path, *, again: bool = False) -> dict[str, Any]:
    """Profile, predict all, then run all; what `folder` has is kept."""
    if again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    about = _kept(folder / "machine.json", machine)
    for shape, layout in dict.fromkeys((job.shape, job.layout) for job in jobs):
        profile(shape, layout, folder)
    predictions = folder / "predictions.json"
    predicted = json.loads(predictions.read_text()) if predictions.exists() else {}
    predicted |= {job.name: prediction(job, folder) for job in jobs if job.name not in predicted}
    predictions.write_text(json.dumps(predicted, indent=1) + "\n")
    rows = []
    for number, job in enumerate(jobs):
        found = _kept(folder / f"job{number}-{job.shape}-{job.strategy}.json", lambda job=job: run(job))
        rows.append({"job": job.name, "predicted": predicted[job.name], "measured": found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"machine": about, "jobs": rows}


def _kept(path: Path, make: Any) -> dict[str, Any]:
    if not path.exists():
        path.write_text(json.dumps(make(), indent=1) + "\n")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def profile(shape: str, layout: str, folder: Path) -> Path:
    """What `moe-ckpt profile` says of this machine for one model and layout."""
    out = folder / f"profile-{shape}-{layout}.json"
    if out.exists():
        return out
    model = folder / f"{shape}.json"
    model.write_text(json.dumps(asdict(SHAPES[shape])))
    degrees = zip(("--tp", "--pp", "--ep"), map(str, LAYOUTS[layout]), strict=True)
    given = ["--out", str(out), "--model", str(model), "--ranks", str(RANKS), "--seq-length", str(SEQ_LENGTH)]
    given += [part for pair in degrees for part in pair]
    given += [part for size in SIZES for part in ("--micro-batch-size", str(size))]
    command = [sys.executable, "-m", "moe_ckpt", "profile", *given, "--storage", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return out


def prediction(job: SmallJob, folder: Path) -> dict[str, float]:
    """Seconds of an iteration with its checkpoints, what of it these add, and of the recovery from the planned kill."""
    found = load_profile(folder / f"profile-{job.shape}-{job.layout}.json")
    setting = found.setting(job.training, THIS_PROJECT)
    behaviour = system_of(job, setting)
    overhead_s = overhead_of(job, setting, behaviour)
    iteration_s = behaviour.iteration_s + overhead_s
    return {
        "iteration_s": iteration_s,
        "overhead_s": overhead_s,
        "recovery_s": recovery_of(job, behaviour, 1 + KILL_S / iteration_s) + iteration_s / 2,
    }


def system_of(job: SmallJob, setting: SystemSetting) -> Behaviour:
    """What the simulator says of the job's strategy. All ranks are on one node, so there are no replicas; `pec` goes
    back as `full` with a snapshot in each iteration."""
    systems = {
        "none": NoCheckpoints(),
        "full": Gemini(interval=job.every, replicas=0),
        "sparse": MoEvement(window=job.every, local=False, replicas=0),
        "pec": Gemini(interval=1, replicas=0),
    }
    return systems[job.strategy].behaviour(setting, 3600.0)


def overhead_of(job: SmallJob, setting: SystemSetting, behaviour: Behaviour) -> float:
    """Seconds that checkpoints add to an iteration; of partial ones by their bytes, as of all others."""
    if job.strategy != "pec":
        return behaviour.overhead_s
    share = job.every / setting.job.shape.num_experts
    nbytes = max(dense + share * experts for dense, experts in PecCosts(setting, share).rank_bytes)
    return setting.slowed_s(nbytes, 0)


def recovery_of(job: SmallJob, behaviour: Behaviour, iteration: float) -> float:
    """Mean over the iterations around the one that the kill should cut off: it may be a few earlier or later."""
    around = range(max(0, round(iteration) - 4), round(iteration) + 4)
    node = frozenset({0})
    # Processes are lost, and no memory: nothing has to come from anywhere else.
    costs = [behaviour.recover(one, node, frozenset()) for one in around]
    return statistics.fmean(cost.total_s for cost in costs)


def run(job: SmallJob) -> dict[str, float]:
    """Train without checkpoints, then with them and the kill; what the reports of both say."""
    calm_s = 0.0 if job.strategy == "none" else pace_s(trained(job, (), PLAIN_S, protected=False))
    kills = (PlannedKill(KILL_S, Kind.RANK, RANKS - 1),)
    again_s = KILL_S if job.strategy == "none" else 0.0
    found = taken(trained(job, kills, KILL_S + again_s + AFTER_S, protected=True))
    return found | {"overhead_s": found["iteration_s"] - calm_s if calm_s else 0.0}


def trained(
    job: SmallJob, kills: Sequence[PlannedKill], run_s: float, *, protected: bool
) -> Sequence[Mapping[str, Any]]:
    """Train for so long; the reports of all iterations. protected: whether with checkpoints."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="predicted-") as name:
        folder = Path(name)
        checkpoints = _checkpoints(job, folder) if protected else []
        flags = [*_model(job), *checkpoints, "--exit-signal-handler", "--exit-signal", STOP_SIGNAL.name]
        tp, pp, ep = map(str, LAYOUTS[job.layout])
        layout = {"NPROC": str(RANKS), "TP": tp, "PP": pp, "EP": ep, "MAX_RESTARTS": "3"}
        plan = JobPlan(job.name, [str(ROOT / "scripts" / "train_cpu.sh"), *flags], layout, kills, run_s)
        with DrillJob(plan, folder / "job", folder / "memory", lambda text: None) as running:
            outcome = running.run()
    return outcome.journal.reports


def pace_s(reports: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds from one report to the next, without the first ones."""
    calm = reports[WARM:]
    return float((calm[-1]["since_boot_s"] - calm[0]["since_boot_s"]) / (len(calm) - 1))


def taken(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From the reports of a job that was struck once: means of iterations without the fault, and the recovery.

    The recovery is the time from the last iteration before the fault to the first one that had not been trained, less
    the time of that one: the iteration that the fault cut off is in it.
    """
    back = next(at for at in range(1, len(reports)) if reports[at]["iteration"] <= reports[at - 1]["iteration"])
    before = reports[back - 1]
    beyond = next((report for report in reports[back:] if report["iteration"] > before["iteration"]), None)
    if beyond is None:
        raise SystemExit(f"training was not beyond iteration {before['iteration']} again in time: is the machine idle?")
    between_s = pace_s(reports[:back])
    return {
        "iteration_s": between_s,
        "recovery_s": beyond["since_boot_s"] - before["since_boot_s"] - between_s,
        "struck_after": before["iteration"],
        "load": os.getloadavg()[0],
    }


def _model(job: SmallJob) -> list[str]:
    shape = SHAPES[job.shape]
    sizes = {
        "num-layers": job.layers,
        "hidden-size": shape.hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "moe-ffn-hidden-size": shape.moe_ffn_hidden_size,
        "num-experts": shape.num_experts,
        "seq-length": SEQ_LENGTH,
        "micro-batch-size": job.micro_batch,
        "global-batch-size": job.global_batch,
        "train-iters": 20_000,
        "attention-dropout": 0,
        "lr-warmup-iters": 0,
        "lr-decay-style": "constant",
        "eval-iters": 0,
    }
    pairs = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return [*pairs, "--untie-embeddings-and-output-weights"]


def _checkpoints(job: SmallJob, folder: Path) -> list[str]:
    if job.strategy == "none":
        return []
    every = {"full": "--moe-ckpt-interval", "sparse": "--moe-ckpt-window", "pec": "--moe-ckpt-pec-k-snapshot"}
    given = ["--moe-ckpt-strategy", job.strategy, every[job.strategy], str(job.every)]
    return [*given, "--moe-ckpt-replicas", "0", "--moe-ckpt-memory-dir", str(folder / "memory"),
            *(["--moe-ckpt-recovery", "global"] if job.strategy == "sparse" else [])]  # fmt: skip


def error(row: Mapping[str, Any], what: str) -> float:
    """Of a time as a share of what was measured; of overhead as a share of the measured iteration."""
    base = row["measured"]["iteration_s" if what == "overhead_s" else what]
    return float((row["predicted"][what] - row["measured"][what]) / base)


def met(result: Mapping[str, Any]) -> Iterator[str]:
    """Jobs all of whose figures are as near as they should be."""
    for row in result["jobs"]:
        if all(abs(error(row, what)) <= NEAR for what in TIMES) and abs(error(row, "overhead_s")) <= NEAR_SHARE:
            yield row["job"]


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for people."""
    about, rows = result["machine"], result["jobs"]
    yield from ("# Predicted, then measured", "")
    yield (
        "Made by `benchmarks/predicted_then_measured.py --write`; all figures are in"
        " `benchmarks/results/predicted_then_measured.json`."
    )
    yield from ("", _STORY.format(ranks=RANKS, kill=KILL_S, cores=about["cores"], cpu=about["cpu"]), "")
    yield (
        "| job | iteration, s: predicted | measured | off | overhead, %: predicted | measured | recovery, s: predicted"
        " | measured | off |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        said, found = row["predicted"], row["measured"]
        shares = [100 * one["overhead_s"] / one["iteration_s"] for one in (said, found)]
        cells = [
            row["job"],
            f"{said['iteration_s']:.3f}",
            f"{found['iteration_s']:.3f}",
            f"{100 * error(row, 'iteration_s'):+.0f} %",
            *(f"{share:.1f}" for share in shares),
            f"{said['recovery_s']:.1f}",
            f"{found['recovery_s']:.1f}",
            f"{100 * error(row, 'recovery_s'):+.0f} %",
        ]
        yield f"| {' | '.join(cells)} |"
    counts = {what: sum(abs(error(row, what)) <= NEAR for row in rows) for what in (*TIMES, "overhead_s")}
    yield ""
    yield (
        f"Within 10 %: iteration {counts['iteration_s']} of {len(rows)}, recovery {counts['recovery_s']} of"
        f" {len(rows)}; overhead within 10 % of an iteration {counts['overhead_s']} of {len(rows)};"
        f" all three {len(list(met(result)))} of {len(rows)} (asked: {FEWEST})."
    )
    lowest = min(row["measured"]["overhead_s"] / row["measured"]["iteration_s"] for row in rows)
    if lowest < -NEAR / 2:
        yield (
            f"Checkpoints make no iteration faster: an overhead of {100 * lowest:.0f} % says how much the same job"
            " differs here from one minute to the next. No prediction can be nearer than that."
        )


_STORY = """{ranks} ranks on {cores} cores ({cpu}), which others may use too. `moe-ckpt profile` timed layers of each
model in each layout, with one and two layers per stage and batches of chance; the jobs have other depths and batches.
Everything was predicted and written down before the first job ran. In each job a rank was killed {kill:.0f} s after the
first iteration. Iteration: with checkpoints. Overhead: what these add to iterations of the same job
without them. Recovery: from the fault until training is beyond where it was."""


if __name__ == "__main__":
    sys.exit(main())
