"""What the tests on GPUs share: memory on a tmpfs, as segments have it in a job, and figures that are kept."""

from __future__ import annotations

import json
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"

Record = Callable[..., None]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs: some kernels lock no pages of files on disks."""
    folder = Path(tempfile.mkdtemp(prefix="moe-ckpt-gpu-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Keeps figures by the name of what was measured; written once, when all tests have ended."""
    figures: dict[str, Any] = {}
    yield lambda name, **values: figures.__setitem__(name, values)
    if not figures:
        return
    properties = torch.cuda.get_device_properties(0)
    machine = {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
