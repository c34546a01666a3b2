"""What benchmarks share: flags, the machine, jobs whose ranks measure, jobs under faults, medians for people."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from moe_ckpt.simulator.events import student  # noqa: E402
from reproduce.machine import after, machine, where  # noqa: E402, F401

RESULTS = ROOT / "docs" / "results"
SETTINGS = "MOE_CKPT_BENCHMARK"
"""Environment variable in which ranks get what to measure, and where rank 0 leaves the result."""
STEADY = "--lr-warmup-iters 0 --lr-decay-style constant"
ENDLESS = f"--train-iters 10000 --log-interval 10000 {STEADY}"
"""Flags of a training that lasts longer than it is measured, at a constant rate."""
UNTIED = "--untie-embeddings-and-output-weights"

Work = Callable[["BenchmarkJob", dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its data in results/NAME.json, its page in docs/results, and how many turns it takes by default."""

    name: str
    turns: int
    page: str = ""

    @property
    def data(self) -> Path:
        return Path(__file__).resolve().parent / "results" / f"{self.name}.json"

    def run(
        self,
        doc: str | None,
        measure: Callable[[int, bool], dict[str, Any]],
        report: Callable[[dict[str, Any]], Sequence[str]],
        is_kept: Callable[[dict[str, Any]], bool] = lambda result: True,
    ) -> int:
        """Measure or read, print, and with --write keep the data and the page.

        Args:
            doc: of the script, whose first line is its help.
            measure: from the number of turns, and whether sizes are tiny, to the data.
            report: the page, as lines.
            is_kept: whether the figures keep what is asked for.

        Returns:
            The exit code: 1 where they do not. Tiny sizes say nothing of that, and end with 0.
        """
        parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, and judges nothing")
        parser.add_argument("--turns", type=int, default=self.turns, help="how often each is measured (%(default)s)")
        parser.add_argument("--write", action="store_true", help=f"keep {' and '.join(filter(None, self._kept))}")
        parser.add_argument("--report", action="store_true", help=f"measure nothing: show what {self.data.name} has")
        arguments = parser.parse_args()
        if arguments.report:
            result: dict[str, Any] = json.loads(self.data.read_text())
        else:
            about = machine()
            found = measure(arguments.turns, arguments.quick)
            result = {"machine": after(about)} | found
        lines = list(report(result))
        print("\n".join(lines))
        if arguments.write:
            self.data.write_text(json.dumps(result, indent=1) + "\n")
            if self.page:
                (RESULTS / self.page).write_text("\n".join(lines) + "\n")
        return 0 if arguments.quick or is_kept(result) else 1

    @property
    def _kept(self) -> tuple[str, str]:
        return self.data.name, self.page

    def head(self, title: str, shown: str = " Medians, and in brackets quartiles.") -> list[str]:
        """The first lines of its page. shown: what its cells are."""
        made = f"Made by `.venv/bin/python -W ignore benchmarks/{self.name}.py --write`"
        return [f"# {title}", "", f"{made}; all is in `benchmarks/results/{self.name}.json`.{shown}", ""]


def needs_gb(needed: float) -> None:
    """Raise SystemExit unless so much memory is free, or would be once caches are dropped."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9
    if available < needed:
        raise SystemExit(f"{available:.1f} GB of memory are available, but {needed:.0f} GB are needed: free some")


def ends(values: Iterable[int]) -> str:
    """The least and the most, for people."""
    found = sorted(values)
    return " to ".join(str(end) for end in dict.fromkeys((found[0], found[-1])))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value itself."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, and the quartiles in brackets."""
    low, median, high = quartiles(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


@dataclass(frozen=True)
class Line:
    """A line of least squares through so many points, whose x have this mean and sum of squares about it.

    variance: of the points about the line; 0 where two points define it.
    """

    slope: float
    intercept: float
    points: int
    mean: float
    around: float
    variance: float

    @property
    def slope_error(self) -> float:
        """Standard error of the slope."""
        return math.sqrt(self.variance / self.around)

    def at(self, x: float) -> float:
        """The line there."""
        return self.intercept + self.slope * x

    def error_at(self, x: float) -> float:
        """Standard error of the line there."""
        return math.sqrt(self.variance * (1 / self.points + (x - self.mean) ** 2 / self.around))

    def half_width_at(self, x: float, of: int) -> float:
        """Half of the 95 % interval in which the mean of so many more points there lies."""
        error = math.sqrt(self.error_at(x) ** 2 + self.variance / of)
        return student(max(1, self.points - 2)) * error


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """The line of least squares through points (x, y), at two values of x or more."""
    xs, ys = zip(*points, strict=True)
    line, mean = statistics.linear_regression(xs, ys), statistics.fmean(xs)
    left = sum((y - line.slope * x - line.intercept) ** 2 for x, y in points)
    around = sum((x - mean) ** 2 for x in xs)
    return Line(line.slope, line.intercept, len(points), mean, around, left / max(1, len(points) - 2))


def row(*cells: object) -> str:
    """Of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def rule(columns: int, first: int = 1) -> str:
    """Below the heads of so many columns, of which the first are texts and the others numbers."""
    return f"|{'---|' * first}{'---:|' * (columns - first)}"


def laid_out(layout: Mapping[str, str]) -> str:
    """Processes, nodes and parallel sizes of a job with these variables of scripts/train_cpu.sh, for people."""
    nodes = int(layout.get("NNODES", "1"))
    played = f" on {nodes} played nodes" if nodes > 1 else ""
    return f"{nodes * int(layout['NPROC'])} processes{played} (PP={layout['PP']}, EP={layout['EP']})"


def run_ranks(script: str | Path, settings: Mapping[str, Any], layout: Mapping[str, str], flags: str) -> dict[str, Any]:
    """Start `script` on all ranks, in the environment of scripts/train_cpu.sh, and return what they measured.

    Args:
        script: calls `start` with its work.
        settings: what the ranks get; `folder` is added, one on a tmpfs for their files.
        layout: environment variables of scripts/train_cpu.sh, such as NPROC and PP.
        flags: of the training.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="moe-ckpt-benchmark-") as folder:
        result = Path(folder) / "result.json"
        environment = (
            os.environ
            | dict(layout)
            | {"MOE_CKPT_PYTHON": sys.executable, "MOE_CKPT_SCRIPT": str(script), "MAX_RESTARTS": "0"}
        )
        environment[SETTINGS] = json.dumps({**settings, "folder": folder, "result": str(result)})
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags.split()]
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def under_faults(flags: str, layout: Mapping[str, str], faults: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a job that these faults struck, its snapshots on a tmpfs.

    Args:
        flags: of the training, strategy included.
        layout: environment variables of scripts/train_cpu.sh; `{folder}` in them is the job's own folder.
        faults: each RANK@ITERATION:PHASE.

    Raises:
        SystemExit: Where it did not come to its end, or not every fault led to a recovery.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="moe-ckpt-benchmark-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        words = [*flags.split(), "--metrics-jsonl", str(metrics), "--log-interval", "1000"]
        words += ["--moe-ckpt-memory-dir", folder] * ("--moe-ckpt-strategy" in flags)
        words += [part for one in faults for part in ("--moe-ckpt-inject-fault", one)]
        environment = os.environ | {"TP": "1", "MOE_CKPT_PYTHON": sys.executable, "TMPDIR": folder}
        environment |= {name: value.replace("{folder}", folder) for name, value in layout.items()}
        environment["MAX_RESTARTS"] = str(2 * len(faults))
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *words]
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    found = sum("recovery" in line for line in lines)
    if ended.returncode or found != len(faults):
        raise SystemExit(f"{ended.stdout}\n{len(faults)} faults led to {found} recoveries, exit {ended.returncode}")
    return lines


def start(main: Callable[[], int], work: Work | None = None) -> NoReturn:
    """Run a script: `main` where it was called; where `run_ranks` starts it, `work` in the place of training's first
    iteration, of which rank 0 leaves what it found."""
    if work is None or SETTINGS not in os.environ:
        sys.exit(main())
    import pretrain_gpt_moe
    from megatron.pretrain.device import device_of
    from megatron.pretrain.initialize import use_cpu

    if device_of(sys.argv[1:]) == "cpu":
        use_cpu()  # before Megatron-LM is imported
    sys.path.append(str(ROOT / "tests" / "process"))
    from stock_trainer import Trainer, before_training

    settings = json.loads(os.environ[SETTINGS])

    def examine(trainer: Trainer) -> NoReturn:
        job = BenchmarkJob(trainer, Path(settings["folder"]))
        result = work(job, settings)
        if job.rank == 0:
            Path(settings["result"]).write_text(json.dumps(result))
        raise SystemExit(0)

    with before_training(examine):
        sys.exit(pretrain_gpt_moe.train(sys.argv[1:]))


@dataclass(frozen=True)
class BenchmarkJob:
    """The live training that everything is measured on: model, optimizer, data and iterations of Megatron-LM's loop."""

    trainer: Any
    folder: Path

    @property
    def rank(self) -> int:
        """Of this process."""
        import torch

        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        import torch

        return torch.distributed.get_world_size()

    def iterating(self, manager: Any = None) -> Callable[[], None]:
        """One iteration of the loop with this manager, which counts its own ones, or with one that does nothing."""
        manager = manager or self.trainer.managed()

        def iterate() -> None:
            self.trainer.manager = manager
            self.trainer.iterate()
            manager.after_step()
            manager.reported()
            manager.detach()  # others train with the same optimizer

        return iterate
