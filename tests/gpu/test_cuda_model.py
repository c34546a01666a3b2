"""A checkpoint in every iteration of a model of a billion parameters: what it costs, by events of the device."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_driver import LOCAL, Job, corpus
from gpu_place import DEVICE, REHEARSED, needs_device, pinned_bytes_per_s, sized

pytestmark = needs_device

Record = Callable[..., None]
LARGE = """
--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-experts 16 --moe-ffn-hidden-size 2048
--seq-length 1024 --max-position-embeddings 1024 --global-batch-size 16 --train-iters 12
""".split()
"""About 1.1 billion parameters; 13 GB of state."""
SETTLED = 6
"""Iterations from this one on count: kernels are loaded, pages are locked."""
ENOUGH = 0.6
"""Copies that take this share of the passes, or less, have to cost nothing."""
EVERY = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1")
ALTERNATE = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2")
"""Iterations with a copy and without take turns, which makes pairs of one job."""


def median(reports: list[dict[str, Any]], name: str) -> float | None:
    found = [report[name] for report in reports if report.get(name) is not None]
    return statistics.median(found) if found else None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The job without checkpoints that all others are compared with."""
    folder = tmp_path_factory.mktemp("plain")
    job = Job(folder / "job", folder, corpus(folder), (*LOCAL, *(() if REHEARSED else LARGE)))
    assert job.run() == 0, job.last
    return job


@pytest.fixture(scope="module")
def link() -> float:
    """Bytes per second to page-locked memory."""
    source = torch.zeros(sized(1 << 30, 1 << 20), dtype=torch.uint8, device=DEVICE)
    return pinned_bytes_per_s(source, torch.empty_like(source, device="cpu", pin_memory=not REHEARSED))


@pytest.mark.takes(90)
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        pytest.param((*EVERY, "--moe-ckpt-copy-rate", "auto"), {}, id="every iteration, auto"),
        pytest.param((*ALTERNATE, "--moe-ckpt-copy-rate", "max"), {}, id="every second, max"),
        pytest.param((*ALTERNATE, "--moe-ckpt-copy-rate", "10"), {}, id="every second, 10 GB/s"),
        pytest.param(
            (*EVERY, "--moe-ckpt-copy-rate", "auto"), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="one hardware queue"
        ),
        pytest.param(("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "4"), {}, id="window of 4"),
    ],
)
def test_a_checkpoint_costs_next_to_nothing_where_its_copy_fits_into_the_passes(
    flags: tuple[str, ...],
    variables: Mapping[str, str],
    plain: Job,
    link: float,
    tmp_path: Path,
    shm: Path,
    record: Record,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    replays = "sparse" in flags
    model = (*plain.flags, *(("--moe-ckpt-replay-tolerance", "0.1") if replays else ()))
    job = Job(tmp_path / "job", shm, plain.data, (*model, *flags, "--moe-ckpt-memory-dir", str(shm)))
    assert job.run() == 0, job.last
    alone, beside = (one.reports[SETTLED:] for one in (plain, job))
    figures = {name: median(beside, name) for name in ("iteration_time_s", "passes_s", "stall_s", "slowed_s")}
    passes_s = [(report["iteration"], report.get("passes_s")) for report in beside]
    plain_s = median(alone, "iteration_time_s")
    record(f"model: {request.node.callspec.id}", plain_s=plain_s, **figures, by_iteration=passes_s)
    assert plain_s is not None and figures["stall_s"] is not None
    copied_s = max(report["snapshot_bytes"] for report in beside) / link
    if not REHEARSED and copied_s < ENOUGH * (figures["passes_s"] or 0.0):
        assert figures["stall_s"] < 0.05 * plain_s
