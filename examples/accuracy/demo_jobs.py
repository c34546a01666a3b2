"""The demo model trained with a strategy and with real kills, and what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from reproduce.machine import UNKNOWN_COMMIT, after, machine, revision, where  # noqa: E402, F401


@dataclass(frozen=True)
class Size:
    """How long is trained, when is evaluated on how many batches, and where ranks are killed (RANK@ITER:PHASE)."""

    iterations: int
    eval_interval: int
    eval_iters: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class DemoRecovery:
    """One line of the story: the iteration training came back to, lost tokens per MoE layer, PLT of all faults."""

    restored: int
    lost_tokens: tuple[int, ...]
    plt: float


@dataclass(frozen=True)
class DemoRun:
    """One training: `losses` in the order of training as (iteration, loss), repeated iterations included.

    validation: loss by iteration. snapshots: (iteration, share of the largest snapshot that one rank copied).
    replayed: how many of the repeated iterations were replayed with frozen operators.
    """

    seed: int
    name: str
    recoveries: tuple[DemoRecovery, ...]
    validation: tuple[tuple[int, float], ...]
    losses: tuple[tuple[int, float], ...] = field(repr=False)
    snapshots: tuple[tuple[int, float], ...] = field(repr=False)
    duration_s: float = 0.0
    replayed: int = 0
    largest_bytes: int = 0

    @property
    def final(self) -> float:
        """Validation loss at the end of training, nats per byte."""
        return self.validation[-1][1]

    @property
    def plt(self) -> float:
        """Proportion of lost tokens, all faults."""
        return self.recoveries[-1].plt if self.recoveries else 0.0

    @property
    def mean_snapshot(self) -> float:
        """Mean share of the largest snapshot that snapshots had; 0 without any."""
        return statistics.mean(share for _, share in self.snapshots) if self.snapshots else 0.0


def train(
    seed: int,
    name: str,
    size: Size,
    folder: Path,
    strategy: Sequence[str],
    *,
    model: Sequence[str] = (),
    layout: Mapping[str, str] = MappingProxyType({}),
) -> DemoRun:
    """Run the launcher of the demo to the end of training, restarts included; without a strategy nobody is killed.

    model: flags of the model. layout: environment variables of the launcher, such as NPROC. Raises SystemExit for a job
    that failed, with what it printed.
    """
    metrics = folder / f"{seed}-{name.replace(' ', '')}.jsonl"
    sizes = {"--train-iters": size.iterations, "--eval-interval": size.eval_interval, "--eval-iters": size.eval_iters}
    flags = [str(part) for pair in sizes.items() for part in pair]
    flags += ["--seed", str(seed), "--metrics-jsonl", str(metrics), "--log-interval", "50", *model, *strategy]
    faults = size.faults if strategy else ()
    flags += [part for point in faults for part in ("--moe-ckpt-inject-fault", point)]
    environment = os.environ | dict(layout) | {"MOE_CKPT_PYTHON": sys.executable, "MAX_RESTARTS": str(len(faults))}
    memory = Path(tempfile.mkdtemp(prefix="demo-jobs-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    if strategy:
        flags += ["--moe-ckpt-memory-dir", str(memory)]
    begun_s = time.monotonic()
    try:
        command = [str(ROOT / "scripts" / "train_cpu.sh"), *flags]
        ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    recoveries = tuple(recovered(ended.stdout))
    if ended.returncode or len(recoveries) != len(faults):
        said = f"exit code {ended.returncode}, {len(recoveries)} recoveries of {len(faults)} faults"
        raise SystemExit(f"{ended.stdout}\n{name}: {said}")
    reports = [line for line in map(json.loads, metrics.read_text().splitlines()) if "iteration" in line]
    largest = max(report["snapshot_bytes"] for report in reports)
    copied = [(report["iteration"], report["snapshot_bytes"]) for report in reports if report["snapshot_bytes"]]
    return DemoRun(
        seed,
        name,
        recoveries,
        tuple(evaluated(ended.stdout)),
        tuple((report["iteration"], report["lm_loss"]) for report in reports),
        tuple((iteration, nbytes / largest) for iteration, nbytes in copied),
        time.monotonic() - begun_s,
        sum(bool(report.get("replayed")) for report in reports),
        largest,
    )


def evaluated(log: str) -> Iterator[tuple[int, float]]:
    """Iteration and loss of each evaluation while training; that at the end, of the same iteration, is none of them."""
    for iteration, loss in re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", log):
        yield int(iteration), float(loss)


def recovered(log: str) -> Iterator[DemoRecovery]:
    """What the recovery tables in a log say; a table without a PLT is one of an exact recovery, which adds nothing."""
    plt = 0.0
    for table in re.split(r"(?=recovered iteration \d+)", log)[1:]:
        (restored,) = re.findall(r"\Arecovered iteration (\d+)", table)
        lost = re.findall(r"lost in layer \d+: the updates of (\d+)", table)
        so_far = re.findall(r"proportion of lost tokens, all faults so far: (\S+) %", table)
        plt = float(so_far[-1]) / 100 if so_far else plt
        yield DemoRecovery(int(restored), tuple(map(int, lost)), plt)
