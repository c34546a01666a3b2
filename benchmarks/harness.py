"""What benchmarks share: flags, the machine, jobs whose ranks measure, the live training, medians for people."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = "MOE_CKPT_BENCHMARK"
"""Environment variable in which ranks get what to measure, and where rank 0 leaves the result."""
ENDLESS = "--train-iters 10000 --log-interval 10000 --lr-warmup-iters 0 --lr-decay-style constant"
"""Flags of a training that lasts longer than it is measured, at a constant rate."""


@dataclass(frozen=True)
class Benchmark:
    """Flags of a benchmark, and where its result is kept: as data in results/, as a page in docs/results/."""

    name: str
    page: str = ""

    @property
    def data(self) -> Path:
        return Path(__file__).resolve().parent / "results" / f"{self.name}.json"

    def parser(self, doc: str | None, *, quick: str = "") -> argparse.ArgumentParser:
        """With the flags that benchmarks share. doc: of the script. quick: what --quick does, if it has that."""
        parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        if quick:
            parser.add_argument("--quick", action="store_true", help=f"{quick}: shows that it runs")
        kept = " and ".join(filter(None, (self.data.name, self.page)))
        parser.add_argument("--write", action="store_true", help=f"keep the result in {kept}")
        parser.add_argument("--report", action="store_true", help=f"measure nothing: show what {self.data.name} has")
        return parser

    def result(self, arguments: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was kept with --report, else what is measured now."""
        result: dict[str, Any] = json.loads(self.data.read_text()) if arguments.report else measure()
        return result

    def show(self, arguments: argparse.Namespace, result: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Print the page; with --write keep it and the data."""
        print("\n".join(lines))
        if arguments.write:
            self.keep(result)
            if self.page:
                (ROOT / "docs" / "results" / self.page).write_text("\n".join(lines) + "\n")

    def keep(self, result: Mapping[str, Any]) -> None:
        """Write the data."""
        self.data.parent.mkdir(exist_ok=True)
        self.data.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the numbers depend on, and how busy it was."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "kernel": platform.release(),
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
        "load_before": os.getloadavg()[0],
    }


def available_gb() -> float:
    """Memory that is free, or would be once caches are dropped."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9


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


def run_ranks(script: str | Path, settings: Mapping[str, Any], layout: Mapping[str, str], flags: str) -> dict[str, Any]:
    """Start `script` on all ranks, in the environment of scripts/train_cpu.sh, and return what they measured.

    Args:
        script: calls `on_ranks` where `SETTINGS` is in the environment.
        settings: what the ranks get; `folder` is added, one on a tmpfs for their files.
        layout: environment variables of scripts/train_cpu.sh, such as NPROC and PP.
        flags: of the training.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="moe-ckpt-benchmark-") as folder:
        result = Path(folder) / "result.json"
        environment = os.environ | dict(layout) | {"PYTHON": sys.executable, "SCRIPT": str(script), "MAX_RESTARTS": "0"}
        environment[SETTINGS] = json.dumps({**settings, "folder": folder, "result": str(result)})
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags.split()]
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def on_ranks(argv: Sequence[str], measure: Callable[[BenchmarkJob, dict[str, Any]], dict[str, Any]]) -> None:
    """What each rank does: start training as the driver does, and where its first iteration would be `measure(job,
    settings)` instead, leave what rank 0 found, and end."""
    import pretrain_gpt_moe
    from megatron.pretrain.device import device_of
    from megatron.pretrain.initialize import use_cpu

    if device_of(argv) == "cpu":
        use_cpu()  # before Megatron-LM is imported
    sys.path.append(str(ROOT / "tests" / "process"))
    from stock_trainer import Trainer, before_training

    settings = json.loads(os.environ[SETTINGS])

    def examine(trainer: Trainer) -> NoReturn:
        job = BenchmarkJob(trainer, Path(settings["folder"]))
        result = measure(job, settings)
        if job.rank == 0:
            Path(settings["result"]).write_text(json.dumps(result))
        raise SystemExit(0)

    with before_training(examine):
        sys.exit(pretrain_gpt_moe.train(argv))


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
