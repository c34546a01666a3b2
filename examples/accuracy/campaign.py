"""Accuracy after real kills under every strategy, over seeds: validation loss and two downstream tasks.

    python examples/accuracy/campaign.py [--seeds 1234 1235 1236] [--only NAME ...] [--tiny]

A small GPT-MoE is trained from each seed without faults, and with the same SIGKILLs under each strategy; torchrun
restarts the job each time. The last checkpoint then answers questions about text that no training saw (`tasks.py`).
Two controls say what can be seen: of `one bit` all that differs is a bit of one initial weight, and under `pec stale`
experts come back from long ago. Runs that docs/results has, and those that are kept under .data/accuracy as they end,
are not run again: what was cut off continues where it was, and other seeds and strategies are added to what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from demo_jobs import UNKNOWN_COMMIT, DemoRun, Size, revision, train  # noqa: E402
from tasks import CHANCE  # noqa: E402

from moe_ckpt.simulator.events import estimate  # noqa: E402

RESULTS = ROOT / "docs" / "results"
SCRATCH = ROOT / ".data" / "accuracy"
LAYOUT = {"NPROC": "2", "PP": "1", "EP": "2"}
FAULT_FREE, FULL, SELECTIVE = "fault-free", "full", "selective"
ONE_BIT, STALE = "one bit", "pec stale"
PEC = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot")
THRESHOLD, SHARE = 0.0375, 0.5
"""Of Dynamic-K; and of the bytes of `full`, what `selective` may copy."""
FLAGS: Mapping[str, tuple[str, ...]] = {
    FAULT_FREE: (),
    ONE_BIT: (),
    FULL: ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "4"),
    "sparse": ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "4"),
    "pec K=1": (*PEC, "1"),
    "pec K=2": (*PEC, "2"),
    STALE: (*PEC, "1"),
    "pec K=1 W": (*PEC, "1", "--moe-ckpt-pec-scope", "weights"),
    "pec K=1 O": (*PEC, "1", "--moe-ckpt-pec-scope", "optimizer"),
    "pec dynamic": (*PEC, "1", "--moe-ckpt-plt-threshold", str(THRESHOLD)),
    SELECTIVE: ("--moe-ckpt-strategy", "selective"),
}
EXACT = (FULL, "sparse")


def _processor() -> str:
    """By which libraries choose kernels, and with them the order of sums: name, family and model."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    known = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    family, model = (known.get(name, "?") for name in ("cpu family", "model"))
    return f"{known.get('model name', 'an unnamed CPU')} {family}.{model}"


RELEASE = f"torch {version('torch')} and Megatron-Core {version('megatron-core')} on {_processor()}"
UNKNOWN = "a release that was not recorded"
RESOLUTION = 0.003
"""Half of the interval of a loss that the campaign is after."""


@dataclass(frozen=True)
class Scale:
    """How much is trained and asked. kills: RANK@ITERATION:PHASE."""

    iterations: int
    eval_iters: int
    evaluations: int
    questions: int
    kills: tuple[str, ...]

    @property
    def size(self) -> Size:
        """As the demo has it."""
        return Size(self.iterations, self.iterations // self.evaluations, self.eval_iters, self.kills)

    @property
    def stale_interval(self) -> int:
        """Iterations between the snapshots of `STALE`, of which each has one expert of a layer."""
        return max(2, self.iterations // 10)


WHOLE = Scale(320, 40, 8, 400, ("1@60:forward-backward", "0@121:step", "1@190:start", "0@262:end"))
TINY = Scale(16, 1, 2, 4, ("1@6:forward-backward", "0@11:step"))


def main() -> int:
    """Exit code 1 if a run that must be exact is not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235, 1236])
    parser.add_argument("--only", nargs="+", choices=list(FLAGS), help="of the strategies; fault-free comes first")
    parser.add_argument("--tiny", action="store_true", help="a few iterations and questions: shows that it runs")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="where runs are kept (default: .data/accuracy)")
    parser.add_argument("--results", type=Path, help="for the page, figures and picture (default: docs/results)")
    arguments = parser.parse_args()
    scale = TINY if arguments.tiny else WHOLE
    names = [name for name in FLAGS if not arguments.only or name in (FAULT_FREE, *arguments.only)]
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    found = published(arguments.results or RESULTS, scale)
    for seed in arguments.seeds:
        for name in names:
            if (seed, name) not in found:
                own = [run for run in found.values() if run["seed"] == seed]
                one_release([*own, {"seed": seed, "release": RELEASE}])
                found[seed, name] = kept(seed, name, scale, arguments.scratch)
                one_release([*own, found[seed, name]])
            print({key: value for key, value in found[seed, name].items() if key != "validation"}, flush=True)
    runs = [found[key] for key in sorted(found, key=lambda key: (key[0], list(FLAGS).index(key[1])))]
    failures = list(broken(runs))
    if not failures and (arguments.results or not arguments.tiny):
        write(runs, scale, arguments.results or RESULTS)
    print("\n".join(failures) or "Exact where it must be.")
    return 1 if failures else 0


def with_results(parser: argparse.ArgumentParser, tiny: str) -> argparse.Namespace:
    """The flags of a script that keeps its data, with what its --tiny trains. Its folder `results` is made: what cannot
    be written is known before hours of training. None with --tiny alone."""
    parser.add_argument("--tiny", action="store_true", help=f"{tiny}: shows that it runs")
    parser.add_argument("--results", type=Path, help="for the data (default: docs/results)")
    arguments = parser.parse_args()
    arguments.results = arguments.results or (None if arguments.tiny else RESULTS)
    if arguments.results:
        arguments.results.mkdir(parents=True, exist_ok=True)
    return arguments


def published(folder: Path, scale: Scale) -> dict[tuple[int, str], dict[str, Any]]:
    """By seed and name, the runs of this scale that a page is made of."""
    path = folder / "accuracy-campaign.json"
    data = json.loads(path.read_text()) if path.exists() else {"runs": ()}
    same = data.get("iterations") == scale.iterations and data.get("kills") == list(scale.kills)
    return {(run["seed"], run["name"]): run for run in data["runs"] if same}


def one_release(runs: Sequence[Mapping[str, Any]]) -> None:
    """Raise SystemExit where runs of one seed, which are compared bit by bit, are of several releases."""
    releases = {run.get("release", UNKNOWN) for run in runs}
    if len(releases) > 1:
        raise SystemExit(f"runs of seed {runs[0]['seed']} are of {' and of '.join(sorted(releases))}: give another one")


def kept(seed: int, name: str, scale: Scale, scratch: Path) -> dict[str, Any]:
    """A run as it was kept, or as it is made now."""
    path = scratch / f"{seed}-{name.replace(' ', '-').replace('=', '')}-{scale.iterations}.json"
    if not path.exists():
        full = scratch / f"{seed}-{FULL}-{scale.iterations}.json"
        largest = json.loads(full.read_text())["largest_bytes"] if full.exists() else None
        found = made(seed, name, scale, largest)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(path)
    run: dict[str, Any] = json.loads(path.read_text())
    return run


def made(seed: int, name: str, scale: Scale, largest_bytes: int | None) -> dict[str, Any]:
    """Train with the kills, and ask. largest_bytes: of a snapshot of `full`, which `selective` needs."""
    flags, at = FLAGS[name], revision()
    if name == SELECTIVE:
        if largest_bytes is None:
            raise SystemExit(f"{SELECTIVE} needs a run of {FULL} from the same seed, which gives its budget")
        flags = (*flags, "--moe-ckpt-budget-local", str(int(SHARE * largest_bytes)), "--moe-ckpt-replicas", "0")
    if name == STALE:
        flags = (*flags, "--moe-ckpt-interval", str(scale.stale_interval))
    layout = LAYOUT | ({"MOE_CKPT_SCRIPT": str(HERE / "one_bit.py")} if name == ONE_BIT else {})
    with tempfile.TemporaryDirectory(prefix="accuracy-", dir=scratch_disk()) as folder:
        checkpoint = Path(folder) / "checkpoint"
        saved = ("--save", str(checkpoint), "--save-interval", str(scale.iterations))
        run = train(seed, "run", scale.size, Path(folder), flags, model=saved, layout=layout)
        shares = asked(checkpoint, seed, scale, Path(folder))
    return described(run, name, shares, at)


def scratch_disk() -> str | None:
    """Memory where there is some for files: checkpoints of this model are small."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def asked(
    checkpoint: Path,
    seed: int,
    scale: Scale,
    folder: Path,
    more: Sequence[str] = (),
    layout: Mapping[str, str] = LAYOUT,
) -> dict[str, float]:
    """Shares of the questions of each task that the model answers rightly. more: flags of its training; layout:
    environment of the launcher."""
    result = folder / "shares"
    flags = ["--load", str(checkpoint), "--exit-on-missing-checkpoint", "--no-load-optim", "--no-load-rng"]
    flags += ["--seed", str(seed), "--train-iters", str(scale.iterations), *more]
    environment = (
        os.environ
        | dict(layout)
        | {"MOE_CKPT_PYTHON": sys.executable, "MAX_RESTARTS": "0", "MOE_CKPT_SCRIPT": str(HERE / "score.py")}
    )
    environment |= {"ACCURACY_QUESTIONS": str(scale.questions), "ACCURACY_RESULT": str(result)}
    command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags]
    ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode or not result.exists():
        raise SystemExit(f"{ended.stdout}\nno answers from the checkpoint of seed {seed}")
    shares: dict[str, float] = json.loads(result.read_text())
    return shares


def described(run: DemoRun, name: str, shares: Mapping[str, float], at: str) -> dict[str, Any]:
    """What is kept of a run. at: the commit that was run, and the day. losses: a digest of the last loss of each
    iteration; repeated: whether iterations that were trained again had the same loss each time."""
    last = dict(run.losses)
    return {
        "seed": run.seed,
        "name": name,
        "release": RELEASE,
        "made": at,
        "faults": len(run.recoveries),
        "plt": run.plt,
        "snapshot": run.mean_snapshot,
        "largest_bytes": run.largest_bytes,
        "replayed": run.replayed,
        "validation": list(run.validation),
        "loss": run.final,
        **shares,
        "losses": hashlib.sha256(repr(sorted(last.items())).encode()).hexdigest(),
        "repeated": all(loss == last[iteration] for iteration, loss in run.losses),
        "duration_s": run.duration_s,
    }


def broken(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each run that must be exact and is not."""
    reference = {run["seed"]: run for run in runs if run["name"] == FAULT_FREE}
    for run in runs:
        same = run["losses"] == reference[run["seed"]]["losses"] and run["loss"] == reference[run["seed"]]["loss"]
        if run["name"] in EXACT and not (same and run["repeated"]):
            yield f"seed {run['seed']}, {run['name']}: the losses are not those of the fault-free run"
        if run["name"] == ONE_BIT and same:
            yield f"seed {run['seed']}, {run['name']}: the bit made no difference"


def changes(runs: Sequence[Mapping[str, Any]], name: str, what: str) -> list[float]:
    """By how much runs of a strategy are above the fault-free ones of the same seeds: loss as a share, tasks in
    points of a hundred."""
    reference = {run["seed"]: run[what] for run in runs if run["name"] == FAULT_FREE}
    pairs = [(run[what], reference[run["seed"]]) for run in runs if run["name"] == name]
    return [one / other - 1 if what == "loss" else one - other for one, other in pairs]


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean; None for a single value."""
    return estimate(values).half_width if len(values) > 1 else None


def seeds_needed(values: Sequence[float]) -> int | None:
    """Seeds until half of the interval is `RESOLUTION`, by the spread of these; None where nothing spreads."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    normal = statistics.NormalDist().inv_cdf(0.975)
    # What the quantile of Student's distribution is above the normal one takes two more.
    return math.ceil((normal * spread / RESOLUTION) ** 2 + normal**2 / 2) if spread else None


def interval(values: Sequence[float]) -> str:
    """The mean in per cent, with half of its 95 % confidence interval where there is one."""
    mean, half = 100 * statistics.fmean(values), half_interval(values)
    return f"{mean:+.2f}" if half is None else f"{mean:+.2f} ± {100 * half:.2f}"


def beyond(values: Sequence[float]) -> bool:
    """Whether the mean is beyond its own interval."""
    half = half_interval(values)
    return half is not None and abs(statistics.fmean(values)) > half


def resolved(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the intervals of validation losses let one say of strategies that lose something; empty without any."""
    apart = (FAULT_FREE, *EXACT, ONE_BIT, STALE)
    lossy = [name for name in dict.fromkeys(run["name"] for run in runs) if name not in apart]
    found = {name: values for name in lossy if len(values := changes(runs, name, "loss")) > 1}
    if not found:
        return ""
    halves = [half_interval(values) or 0.0 for values in found.values()]
    clear = [f"`{name}` ({interval(values)} %)" for name, values in found.items() if beyond(values)]
    told = f"beyond its own interval is {', '.join(clear)}" if clear else "no change is beyond its own interval"
    return (
        f"- Of strategies that lose something, the mean loss is known to within {100 * min(halves):.1f} to"
        f" {100 * max(halves):.1f} %; {told}. One of twenty such intervals leaves 0 out by chance.\n"
    )


def controlled(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the controls say of the power of the comparison; empty without them."""
    null, stale = (changes(runs, name, "loss") for name in (ONE_BIT, STALE))
    if min(len(null), len(stale)) < 2:
        return ""
    needed = seeds_needed(null) or 2
    enough = "which is what there is" if len(null) >= needed else f"of which there are {len(null)}"
    return (
        f"- `{ONE_BIT}`, the null control, has no faults: the last bit of one initial weight is flipped, and the loss"
        f" is {interval(null)} % off. So runs that lose nothing differ by {100 * statistics.stdev(null):.2f} %"
        f" (standard deviation), and an interval of ± {_RESOLUTION} % takes {needed} seeds, {enough}.\n"
        f"- `{STALE}`, the positive control, has a snapshot of one expert in so many iterations that experts come back"
        f" from long ago. Its loss is {interval(stale)} % off: the harm is"
        f" {'seen' if beyond(stale) and statistics.fmean(stale) > 0 else 'NOT seen'}.\n"
    )


def write(runs: Sequence[Mapping[str, Any]], scale: Scale, folder: Path) -> None:
    """The page, its figures, and its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"iterations": scale.iterations, "kills": scale.kills, "questions": scale.questions, "runs": list(runs)}
    (folder / "accuracy-campaign.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "accuracy-campaign.md").write_text(page(runs, scale))
    plot(runs, folder / "accuracy-campaign.png")


def page(runs: Sequence[Mapping[str, Any]], scale: Scale) -> str:
    """The results for people."""
    releases = list(dict.fromkeys(run.get("release", UNKNOWN) for run in runs))
    lines, undisturbed = [], []
    for release in releases:
        of_release = [run for run in runs if run.get("release", UNKNOWN) == release]
        for name in dict.fromkeys(run["name"] for run in of_release):
            own = [run for run in of_release if run["name"] == name]
            means = [statistics.fmean(run[what] for run in own) for what in ("loss", *CHANCE)]
            seeds = ", ".join(str(run["seed"]) for run in own)
            cells = [name, seeds, f"{100 * statistics.fmean(run['plt'] for run in own):.2f}", f"{means[0]:.4f}"]
            off = [
                interval(changes(of_release, name, what)) if name != FAULT_FREE else "" for what in ("loss", *CHANCE)
            ]
            needed = seeds_needed(changes(of_release, name, "loss")) or ""
            cells += [off[0], str(needed), f"{100 * means[1]:.1f}", off[1], f"{100 * means[2]:.1f}", off[2]]
            lines.append(f"| {' | '.join(cells)} |")
            undisturbed += [f"{means[0]:.2f}"] * (name == FAULT_FREE)
    apart = (
        f"- Without faults losses are {', '.join(undisturbed)}. Seeds of {UNKNOWN} trained in another loop than all"
        " others: the controls, which ran in this one, say nothing of strategies that only ran in that.\n"
    ) * (UNKNOWN in releases and len(releases) > 1)
    alike: dict[str, set[int]] = {}
    for run in runs:
        alike.setdefault(f"{run.get('release', UNKNOWN)}, {run.get('made', UNKNOWN_COMMIT)}", set()).add(run["seed"])
    seeds = "; ".join(f"{', '.join(map(str, sorted(some)))} with {name}" for name, some in alike.items())
    return _PAGE.format(
        table="\n".join(lines), iterations=scale.iterations, kills=len(scale.kills), questions=scale.questions,
        points=", ".join(f"`{point}`" for point in scale.kills), seeds=seeds, head=_HEAD,
        resolved=apart + controlled(runs) + resolved(runs), stale=scale.stale_interval, resolution=_RESOLUTION,
    )  # fmt: skip


_RESOLUTION = f"{100 * RESOLUTION:.1f}"
_HEAD = (
    f"| strategy | seeds | lost tokens, % | validation loss | off fault-free, % | seeds for ± {_RESOLUTION} % | cloze,"
    f" % | off, points | original, % | off, points |\n|---|{'---:|' * 9}"
)
_PAGE = """# Accuracy after faults, over seeds

Made by `python examples/accuracy/campaign.py`, to whose runs `--seeds` and `--only` add others;
every run is in [accuracy-campaign.json](accuracy-campaign.json).

The demo model (GPT-MoE with 4 layers, 8 experts, top 2; two expert-parallel processes on CPU) is trained for
{iterations} iterations of 2,048 bytes of Python's standard library. {kills} times a process gets
SIGKILL and torchrun restarts the job: {points}
(rank@iteration:phase). The memory of the node survives. Seeds: {seeds}.

{head}
{table}

- Lost tokens: share of all routed tokens whose updates experts lost (MoC eq. 7). Validation loss: nats per byte, the
  mean over its seeds.
- Cloze: which of four words of the same length continues (25 % by chance); original: which of two texts has not had two
  words swapped (50 % by chance); {questions} questions of each, from the last twentieth of the corpus, which is not
  trained on, answered by likelihood.
- Off: mean over seeds of the difference to the fault-free run of the same seed, ± half of its 95 % confidence interval.
- Seeds for ± {resolution} %: how many make half of the interval so small, by the spread of the seeds there are.
- K: experts per layer in a snapshot; stale: one, every {stale} iterations; W, O: only weights or only moments are left
  out; dynamic: K grows to keep the lost tokens below 3.75 %. `selective` may copy half of the bytes of `full`.
{resolved}
MoC-System reports losses within noise of the fault-free run below 3.75 % of lost tokens (Fig. 5), and downstream
accuracy as good as with full checkpoints (Table 3); MOETION (Fig. 8) spikes after a recovery that training makes up.
`full` and `sparse` equal the fault-free run to the last bit, or the script fails.

![Validation loss](accuracy-campaign.png)
"""


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """By how much the validation loss of the first seed is off the fault-free run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    own = [run for run in runs if run["seed"] == runs[0]["seed"]]
    reference = {iteration: loss for iteration, loss in own[0]["validation"]}
    for run in own[1:]:
        last = {iteration: 100 * (loss / reference[iteration] - 1) for iteration, loss in run["validation"]}
        axes.plot(list(last), list(last.values()), label=run["name"])
    axes.set(xlabel="iteration", ylabel="validation loss off the fault-free run (%)")
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
