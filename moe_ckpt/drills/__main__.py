"""Kills random ranks and nodes of a running job, and checks that it ends as if nothing had happened.

The job trains for --minutes while faults strike at exponentially distributed times, then ends with a checkpoint. A run
without faults to the same iteration gives what every loss and the digest of the checkpoint must be, to the last bit.
Beside the share of time that was useful (ETTR) stands that of the same job under stock torch_dist checkpoints, written
synchronously at the interval that is best under these very faults, which strike it at the same times.

Flags after `--` go to the training script, those that begin with --moe-ckpt- only to the job that is examined;
TP, PP, EP and the like are those of scripts/train_cpu.sh.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moe_ckpt.drills.drill import Drill, DrillSettings, judged, wrong_components
from moe_ckpt.drills.job import DrillFailure, DrillOutcome
from moe_ckpt.drills.reports import iteration_s
from moe_ckpt.drills.schedule import FaultRates, schedule

TMPFS = Path("/dev/shm")
MARK = ".moe-ckpt-drill"
"""File in a folder whose jobs are those of drills."""
SHOWN = 5
"""Differences that are shown of many."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 if all came out as without faults, 1 if not, or if a job hung or failed."""
    at = argv.index("--") if "--" in argv else len(argv)
    arguments, flags = _parser().parse_args(argv[:at]), tuple(argv[at + 1 :])
    signal.signal(signal.SIGTERM, _interrupt)  # so that what was started is ended too
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-chaos-", dir=TMPFS if TMPFS.is_dir() else None) as memory:
        folder = arguments.folder or Path(tempfile.mkdtemp(prefix="moe-ckpt-chaos-"))
        if strange := made_room(folder):
            sys.stderr.write(f"{strange} is of no earlier drill and would be overwritten: give another --folder\n")
            return 2
        settings = _settings(arguments, folder, Path(memory), flags)
        _say(f"{len(settings.kills)} faults in {settings.run_s:.0f} s; jobs are kept in {folder}")
        try:
            result = run(settings, arguments)
        except (DrillFailure, KeyboardInterrupt) as error:
            sys.stderr.write(f"{error or 'interrupted'}\n")
            return 1
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    _say("\n".join(page(result)))
    return int(not is_right(result))


def made_room(folder: Path) -> Path | None:
    """Removes what an earlier drill left; returns a folder of anybody else, and then removes nothing.

    Args:
        folder: Of the drill.
    """
    jobs = [folder / name for name in ("subject", "baseline", "calibration-plain", "calibration-saving")]
    if not (folder / MARK).exists():
        if strange := next((job for job in jobs if job.exists()), None):
            return strange
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    for job in jobs:
        shutil.rmtree(job, ignore_errors=True)
    return None


def run(settings: DrillSettings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all jobs. Returns their results as JSON values.

    Raises DrillFailure when the subject or the reference hangs or fails.

    Args:
        settings: The faults, the flags of the jobs and their folders.
        arguments: The parsed command line.
    """
    drill = Drill(settings, _say)
    subject = drill.subject()
    baseline: DrillOutcome | None = None
    stock: dict[str, Any] = {}
    if arguments.baseline:
        try:
            stock |= drill.best_interval()
            baseline = drill.baseline(int(stock["interval"]))
        except DrillFailure as error:
            stock["failed"] = str(error)
    reference_folder = arguments.reference or settings.folder / "reference"
    last = max(subject.last, baseline.last if baseline else 0)
    reference = drill.reference(reference_folder, last, subject.last)
    # The machine may have been busy during one of them; the same figure for both jobs keeps them comparable.
    useful_s = min(iteration_s(reference), stock.get("iteration_s", float("inf")))
    result = {
        "seed": arguments.seed,
        "mtbf_s": settings.mtbf_s,
        "minutes": arguments.minutes,
        "nodes": settings.nodes,
        "nproc": settings.nproc,
        "standbys": settings.standbys,
        "flags": list(settings.flags),
        "subject": judged(subject, reference, useful_s),
    }
    result["subject"]["wrong_components"] = list(wrong_components(subject.folder, reference_folder, subject.last))
    if arguments.baseline:
        result["baseline"] = stock | (judged(baseline, reference, useful_s) if baseline else {})
    return result


def is_right(result: Mapping[str, Any]) -> bool:
    """Whether the job that was examined came out as without faults."""
    return not result["subject"]["wrong"] and not result["subject"]["wrong_components"]


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for people."""
    subject, stock = result["subject"], result.get("baseline", {})
    standbys = f" and {result['standbys']} standbys" if result["standbys"] else ""
    yield (
        f"seed {result['seed']}, {result['nodes']} nodes x {result['nproc']} ranks{standbys}, a fault every"
        f" {result['mtbf_s']:g} s on average:"
    )
    yield _line("this subsystem", subject)
    if "interval" in stock:
        yield (
            f"stock torch_dist, synchronous: a checkpoint costs {stock['checkpoint_s']:.3f} s and a restart"
            f" {stock['restart_s']:.1f} s, so under these faults one every {stock['interval']} iterations is best"
        )
    if "failed" in stock:
        yield f"stock torch_dist failed: {stock['failed']}"
    if "ettr" in stock:
        yield _line("stock torch_dist", stock)
    for text in [*subject["wrong"][:SHOWN], *(f"digest of {name} differs" for name in subject["wrong_components"])]:
        yield f"WRONG: {text}"
    yield "as without faults, to the last bit" if is_right(result) else "NOT as without faults"


def _line(name: str, job: Mapping[str, Any]) -> str:
    recoveries = ", ".join(f"{count} {scope}" for scope, count in job["recoveries"].items()) or "none"
    kinds = [fault["kind"] for fault in job["faults"]]
    return (
        f"{name}: ETTR {job['ettr']:.3f} (iteration {job['iterations']} in {job['wall_s']:.1f} s;"
        f" {kinds.count('rank')} ranks and {kinds.count('node')} nodes killed; recoveries: {recoveries};"
        f" {job['trained_again']} iterations trained again, {job['replayed']} replayed)"
    )


def _settings(arguments: argparse.Namespace, folder: Path, memory: Path, flags: tuple[str, ...]) -> DrillSettings:
    run_s = 60 * arguments.minutes
    odds = FaultRates(arguments.mtbf, arguments.node_share, arguments.nodes, arguments.nodes * arguments.nproc)
    kills = schedule(arguments.seed, odds, run_s)
    size, times = (arguments.nodes, arguments.nproc), (run_s, arguments.mtbf, arguments.patience)
    return DrillSettings(folder.resolve(), memory, *size, *times, kills, flags, arguments.standbys)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos_cpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = parser.add_argument
    number("--minutes", type=_positive, default=10.0, help="how long faults strike (default: 10)")
    number("--mtbf", type=_positive, default=30.0, help="seconds between faults on average (default: 30)")
    number("--seed", type=int, default=0, help="of the times and victims (default: 0)")
    number("--nodes", type=int, default=2, choices=(1, 2, 3, 4), help="nodes, each an agent (default: 2)")
    number("--nproc", type=int, default=4, help="ranks per node (default: 4)")
    number(
        "--standbys", type=int, default=0, metavar="N",
        help="processes per node that wait to take the place of lost ranks; with any, the other ranks of the job that"
        " is examined keep their processes, and the one with stock checkpoints has a standby per rank (default: 0)",
    )  # fmt: skip
    number("--node-share", type=float, default=0.2, help="share of faults that take a whole node (default: 0.2)")
    number("--patience", type=_positive, default=180.0, help="seconds without an iteration that are a hang (180)")
    number("--folder", type=Path, help="where jobs leave logs and checkpoints (default: a new temporary one)")
    number(
        "--reference", type=Path, help="a run without faults, kept from one drill to the next (default: in --folder)"
    )
    number("--no-baseline", dest="baseline", action="store_false", help="leave stock torch_dist out")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
