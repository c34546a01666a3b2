"""A checkpoint in every iteration of a model of a billion parameters: what it costs, by events of the device."""

from __future__ import annotations

import itertools
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import ENGINE, LOCAL, Job, corpus
from gpu_place import DEVICE, REHEARSED, needs_device, pinned_bytes_per_s, sized

pytestmark = needs_device

Record = Callable[..., None]
LARGE = """
--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-experts 16 --moe-ffn-hidden-size 2048
--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 16 --train-iters 12
""".split()
"""About 1.1 billion parameters; 13 GB of state."""
HAS_ENGINE = not REHEARSED and find_spec("transformer_engine") is not None
"""Its grouped experts keep the device busy; the host launches those of Megatron-Core's own layers one by one."""
SETTLED = 6
"""Iterations from this one on count: kernels are loaded, pages are locked."""
ENOUGH = 0.6
"""Copies that take this share of the passes, or less, have to cost nothing."""
EVERY = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1", "--moe-ckpt-copy-rate", "auto")
ALTERNATE = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2")
"""Iterations with a copy and without take turns, which makes pairs of one job."""
STRUCK = 11
"""The iteration in whose passes a job is killed."""
STOCK = ("--save-interval", "4", "--ckpt-format", "torch_dist")


def median(reports: list[dict[str, Any]], name: str) -> float | None:
    found = [report[name] for report in reports if report.get(name) is not None]
    return statistics.median(found) if found else None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job without checkpoints that all others are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    job = Job(
        folder / "job", folder, corpus(folder), (*(ENGINE if HAS_ENGINE else LOCAL), *(() if REHEARSED else LARGE))
    )
    assert job.run() == 0, job.last
    return job


@pytest.fixture(scope="module")
def link() -> float:
    """Bytes per second to page-locked memory."""
    source = torch.zeros(sized(1 << 30, 1 << 20), dtype=torch.uint8, device=DEVICE)
    return pinned_bytes_per_s(source, torch.empty_like(source, device="cpu", pin_memory=not REHEARSED))


def between_s(reports: list[dict[str, Any]]) -> list[float]:
    """From each report but the first, the seconds since the one before it: all that an iteration takes, saves too."""
    return [one["since_boot_s"] - before["since_boot_s"] for before, one in itertools.pairwise(reports)]


@dataclass
class Comparison:
    """Jobs with checkpoints beside the one without."""

    plain: Job
    link: float
    folder: Path
    memory: Path
    record: Record

    def cost(self, name: str, flags: tuple[str, ...]) -> None:
        """Keeps the figures of a job, and fails if it stood for copies that have room in its passes."""
        job = Job(self.folder / "job", self.memory, self.plain.data, (*self.plain.flags, *flags))
        assert job.run("--moe-ckpt-memory-dir", str(self.memory)) == 0, job.last
        alone, beside = (one.reports[SETTLED:] for one in (self.plain, job))
        figures = {name: median(beside, name) for name in ("iteration_time_s", "passes_s", "stall_s", "slowed_s")}
        nbytes, plain_s = max(report["snapshot_bytes"] for report in beside), median(alone, "iteration_time_s")
        self.record(
            f"model: {name}",
            **figures,
            plain_s=plain_s,
            plain_between_s=between_s(self.plain.reports),
            between_s=between_s(job.reports),
            by_iteration=[(report["iteration"], report.get("passes_s"), report["stall_s"]) for report in job.reports],
            snapshot_bytes=nbytes,
            grouped=HAS_ENGINE,
            link_per_s=self.link,
        )
        assert plain_s is not None and figures["stall_s"] is not None
        if not REHEARSED and nbytes / self.link < ENOUGH * (figures["passes_s"] or 0.0):
            assert figures["stall_s"] < 0.05 * plain_s


@pytest.fixture
def comparison(plain: Job, link: float, tmp_path: Path, shm: Path, record: Record) -> Comparison:
    return Comparison(plain, link, tmp_path, shm, record)


@pytest.mark.takes(60)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(EVERY, id="every iteration, auto"),
        pytest.param(
            "--moe-ckpt-strategy sparse --moe-ckpt-window 4 --moe-ckpt-replay-tolerance 0.1".split(), id="window of 4"
        ),
    ],
)
def test_a_checkpoint_costs_next_to_nothing_where_its_copy_fits_into_the_passes(
    flags: tuple[str, ...], comparison: Comparison, request: pytest.FixtureRequest
) -> None:
    comparison.cost(request.node.callspec.id, tuple(flags))


@pytest.mark.takes(60)
def test_a_killed_job_of_this_size_runs_one_more_iteration_again_at_most(
    plain: Job, tmp_path: Path, shm: Path, record: Record
) -> None:
    fault = ("--moe-ckpt-inject-fault", f"0@{STRUCK}:forward-backward")
    job = Job(tmp_path / "job", shm, plain.data, (*plain.flags, *EVERY, "--moe-ckpt-memory-dir", str(shm), *fault))
    assert job.run() == -signal.SIGKILL, job.last
    begun_s = time.monotonic()
    assert job.run() == 0, job.last
    started_s = time.monotonic() - begun_s
    expected, found = ([one.losses()[at][0] for at in (STRUCK, STRUCK + 1)] for one in (plain, job))
    record("model: killed", recoveries=job.recoveries, start_to_end_s=started_s, losses=[expected, found])
    assert re.search(rf"recovered iteration ({STRUCK - 2}|{STRUCK - 1})\b", job.said[-1]), job.last
    assert found == pytest.approx(expected, rel=1e-2), "kernels need not repeat bits"


@pytest.mark.takes(60)
@pytest.mark.parametrize("how", ["async", "sync"])
def test_what_checkpoints_of_megatron_core_cost_this_model(
    how: str, plain: Job, tmp_path: Path, shm: Path, record: Record
) -> None:
    more = ("--async-save",) if how == "async" else ()
    job = Job(tmp_path / "job", shm, plain.data, (*plain.flags, *STOCK, *more, "--save", str(shm / "checkpoints")))
    assert job.run() == 0, job.last
    record(f"model: torch_dist {how}, every fourth", between_s=between_s(job.reports))


@pytest.mark.takes(60)
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        pytest.param((*ALTERNATE, "--moe-ckpt-copy-rate", "max"), {}, id="every second, max"),
        pytest.param((*ALTERNATE, "--moe-ckpt-copy-rate", "10"), {}, id="every second, 10 GB/s"),
        pytest.param(EVERY, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="one hardware queue"),
    ],
)
def test_copies_hardly_slow_passes_at_any_rate_and_with_one_queue(
    flags: tuple[str, ...],
    variables: Mapping[str, str],
    comparison: Comparison,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    comparison.cost(request.node.callspec.id, flags)
