"""Faults that cost nothing: train, kill a worker with SIGKILL, see training continue in place, compare every loss.

In Megatron-LM's own loop, first with the whole state copied to memory in each iteration, then with a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS, WINDOW, KILL_AT, KILLED_RANK = 60, 4, 40, 2
LOSS_TO_REACH = 3.4
AT_MOST_AGAIN = 2
"""Iterations that are trained again after a fault with `full`: the copy of the last one may not have been complete."""
# Tied embeddings would couple the first stage to the last one, and both would have to come back together.
COMMON = ("--train-iters", str(ITERATIONS), "--untie-embeddings-and-output-weights")
LEVELS = ("unprotected", "degraded", "protected")
ENDS_WHEN = {
    "aborted": "a second fault ended the recovery",
    "detect": "the last survivor heard of the fault",
    "park": "the survivors put their state aside in memory",
    "restart": "the standby had the rank of the lost process",
    "import": "it had read its flags",
    "rendezvous": "all ranks were connected",
    "build": "model, optimizer and memory were there",
    "inventory": "all knew what each one holds",
    "plan": "it was decided who restores what",
    "fetch": "state was verified and restored",
    "replay": "the lost stage had caught up",
    "rejoin": "all stood at the same iteration",
}

Report = dict[str, Any]


@dataclass(frozen=True)
class ProtectedRun:
    """A strategy, how it comes back, and what the demo says of it."""

    name: str
    flags: tuple[str, ...]
    does: str
    replays: bool


FULL = ProtectedRun(
    "full",
    ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1"),
    f"all ranks go back to the newest complete snapshot, at most {AT_MOST_AGAIN} iterations",
    replays=False,
)
SPARSE = ProtectedRun(
    "sparse",
    ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", str(WINDOW)),
    "only the lost pipeline stage runs iterations again",
    replays=True,
)


def main() -> int:
    """Exit code: 0 if both jobs came back in place and every loss is bit-equal to the undisturbed run, else 1."""
    folder = _arguments().folder
    folder.mkdir(parents=True, exist_ok=True)
    say("1. An undisturbed run: GPT-MoE, 8 experts, PP=2 x EP=2, distributed optimizer, 4 processes, real text.")
    undisturbed, _ = train(folder / "undisturbed.jsonl", COMMON)
    runs = {kind: struck(folder, number, kind, undisturbed) for number, kind in ((2, FULL), (3, SPARSE))}
    if runs[FULL] is None or runs[SPARSE] is None:
        return 1
    plot(undisturbed, runs[SPARSE], folder / "demo.png")
    last = undisturbed[-1]["lm_loss"]
    say(f"Loss, stall and protection are drawn in {folder / 'demo.png'}; the last loss is {last:.3f} nats/byte.")
    say(f"`moe-ckpt report {folder}` makes a page of all runs.")
    if last >= LOSS_TO_REACH:
        say(f"The model did not learn: expected less than {LOSS_TO_REACH} nats/byte.")
    return 0 if last < LOSS_TO_REACH else 1


def struck(folder: Path, number: int, kind: ProtectedRun, undisturbed: Sequence[Report]) -> list[Report] | None:
    """Run a protected job and kill a rank of it; its reports, None where it did not come back as it should."""
    say(f"\n{number}. The same with `{kind.name}`; rank {KILLED_RANK} gets SIGKILL: {kind.does}.")
    fault = f"{KILLED_RANK}@{KILL_AT}:forward-backward"
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-demo-", dir="/dev/shm") as memory:
        flags = (*COMMON, *kind.flags, "--moe-ckpt-memory-dir", memory, "--moe-ckpt-inject-fault", fault)
        killed, recoveries = train(folder / f"{kind.name}.jsonl", flags, STANDBYS="1")
    if len(recoveries) != 1 or recoveries[0]["stayed"] != recoveries[0]["ranks"] - 1:
        say(f"One recovery in place was expected, but there were {[each['stayed'] for each in recoveries]}.")
        return None
    if kind.replays != bool(recoveries[0]["replayed"]) or (kind.replays and recoveries[0]["scope"] != "local"):
        say(f"Expected was that {kind.does}, but it was {recoveries[0]['scope']}.")
        return None
    show_timeline(recoveries[0])
    expected = {report["iteration"]: report["lm_loss"] for report in undisturbed}
    equal = compare(expected, killed, 0 if kind.replays else AT_MOST_AGAIN)
    stalls_s = [report["stall_s"] for report in killed if not report["replayed"]]
    length_s = statistics.median(report["iteration_time_s"] for report in killed)
    say(f"Training waited {1000 * statistics.median(stalls_s):.1f} ms of each iteration of {1000 * length_s:.0f} ms.")
    return killed if equal else None


def train(metrics: Path, flags: Sequence[str], **variables: str) -> tuple[list[Report], list[dict[str, Any]]]:
    """Run the launcher; the reports of iterations in the order of training, and the timelines of recoveries."""
    metrics.unlink(missing_ok=True)
    command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags, "--metrics-jsonl", str(metrics)]
    started_s = time.monotonic()
    log = metrics.with_suffix(".log")
    with log.open("w") as output:
        environment = os.environ | {"MOE_CKPT_PYTHON": sys.executable} | variables
        ended = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        sys.stderr.write("".join(log.read_text().splitlines(keepends=True)[-20:]))
        sys.exit(f"Training ended with an error; the lines above say why, and {log} has all.")
    say(f"   took {time.monotonic() - started_s:.0f} s")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    recoveries = [line["recovery"] for line in lines if "recovery" in line]
    return [line for line in lines if "iteration" in line], recoveries


def show_timeline(recovery: dict[str, Any]) -> None:
    """Print where the time of the recovery went."""
    again = f"{recovery['ranks_back']} of {recovery['ranks']} ranks ran {recovery['replayed']} iterations again"
    say(
        f"   Recovered in {recovery['total_s']:.1f} s. {recovery['stayed']} of {recovery['ranks']} ranks kept their"
        f" processes, a standby took the place of the lost one; {again if recovery['replayed'] else 'none replayed'}."
    )
    for name, length_s in recovery["parts"].items():
        bar = "#" * round(30 * length_s / recovery["total_s"])
        say(f"   {name:<10} {length_s:6.2f} s  {bar:<30}  until {ENDS_WHEN.get(name, name)}")


def compare(undisturbed: dict[int, float], killed: Sequence[Report], most_again: int = 0) -> bool:
    """Print the losses around the fault; whether all are bit-equal, and at most `most_again` were trained again."""
    say(f"{'iteration':>9}  {'undisturbed':>20}  {'with the fault':>20}  equal?")
    again = [index for index, report in enumerate(killed) if report["replayed"]]
    around = again or [index for index, report in enumerate(killed) if report["iteration"] == KILL_AT]
    unequal = 0
    for index, report in enumerate(killed):
        iteration, loss = report["iteration"], report["lm_loss"]
        equal = undisturbed[iteration] == loss
        unequal += not equal
        if around[0] - 3 <= index <= around[-1] + 3 or not equal:
            verdict = f"{'yes' if equal else 'NO'}{', replayed' if report['replayed'] else ''}"
            say(f"{iteration:>9}  {undisturbed[iteration]!r:>20}  {loss!r:>20}  {verdict}")
    trained = [report["iteration"] for report in killed if not report["replayed"]]
    repeated = len(trained) - len(set(trained))
    complete = sorted(set(trained)) == list(range(1, ITERATIONS + 1)) and repeated <= most_again
    say(
        f"\n{len(killed)} losses, {len(again)} of them replayed, {repeated} of iterations that were trained again:"
        f" {f'{unequal} NOT' if unequal else 'all'} bit-equal."
    )
    if not complete:
        say("Iterations were lost, or trained again.")
    return complete and not unequal


def plot(undisturbed: Sequence[Report], killed: Sequence[Report], path: Path) -> None:
    """Draw loss, stall and protection over iterations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trained = [report for report in killed if not report["replayed"]]
    figure, (loss, stall, safety) = plt.subplots(
        3, figsize=(8, 8), sharex=True, layout="constrained", height_ratios=(3, 1.5, 1)
    )
    loss.plot(*_points(undisturbed, "lm_loss"), linewidth=5, alpha=0.3, label="undisturbed")
    loss.plot(*_points(trained, "lm_loss"), linewidth=1, color="black", label="with the fault")
    again = [report for report in killed if report["replayed"]]
    loss.plot(*_points(again, "lm_loss"), "o", markersize=4, color="tab:orange", label="replayed by the lost stage")
    loss.set(ylabel="loss (nats/byte)", title="A fault in the middle changes nothing")
    stall.bar([report["iteration"] for report in trained], [1000 * report["stall_s"] for report in trained], width=1)
    stall.set(ylabel="stall (ms)")
    levels = [LEVELS.index(report["protection"] or LEVELS[0]) for report in trained]
    safety.step([report["iteration"] for report in trained], levels, where="mid", color="tab:green")
    safety.set(xlabel="iteration", yticks=range(len(LEVELS)), yticklabels=LEVELS, ylim=(-0.3, len(LEVELS) - 0.7))
    for axes in (loss, stall, safety):
        axes.axvline(KILL_AT, color="tab:red", linestyle=":", label=f"SIGKILL to rank {KILLED_RANK}")
    loss.legend()
    figure.savefig(path, dpi=120)


def _points(reports: Sequence[Report], name: str) -> tuple[list[int], list[float]]:
    return [report["iteration"] for report in reports], [report[name] for report in reports]


def say(text: str) -> None:
    """Print at once, in order with what the training processes write."""
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".demo", help="where reports and plot go (default: .demo)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
