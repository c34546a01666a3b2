"""What the tests on GPUs share: memory on a tmpfs, figures that are kept at once, and the time that is left."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_check import Results

ROOT = Path(__file__).parents[2]

Record = Callable[..., None]


def results() -> Results:
    """What figures and outcomes are added to."""
    folder = Path(os.environ.get("MOE_CKPT_GPU_OUT", ROOT / "build" / "gpu-check"))
    folder.mkdir(parents=True, exist_ok=True)
    return Results(folder / "results.jsonl")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs: some kernels lock no pages of files on disks."""
    folder = Path(tempfile.mkdtemp(prefix="moe-ckpt-gpu-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def record() -> Record:
    """Keeps a figure by the name of what was measured, on disk when it returns: the run may be cut off."""
    part = os.environ.get("MOE_CKPT_GPU_PART", "")
    return lambda name, **values: results().add({"part": part, "figure": name} | values)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what would not end in the time that is left."""
    takes, until = item.get_closest_marker("takes"), os.environ.get("MOE_CKPT_GPU_UNTIL_S")
    left_s = float(until) - time.monotonic() if until else float("inf")
    needed_s = takes.args[0] if takes is not None and "MOE_CKPT_GPU_REHEARSAL" not in os.environ else 0
    if left_s < needed_s:
        pytest.skip(f"the budget: {item.name} takes {needed_s} s, {left_s:.0f} s are left")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of each test of a part as soon as it is known."""
    if "MOE_CKPT_GPU_OUT" not in os.environ or (report.when != "call" and report.passed):
        return
    why = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        why = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()[0]
    name, part = report.nodeid.removeprefix("tests/gpu/"), os.environ["MOE_CKPT_GPU_PART"]
    line = {"part": part, "test": name, "outcome": report.outcome, "took_s": round(report.duration, 2)}
    results().add(line | ({"why": why} if why else {}))
