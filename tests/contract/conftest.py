"""Every implementation of the Store port, in places that are empty at first."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workload import SEGMENTS, new_store

KINDS = ("memory", "filesystem", "objects", "objects in files", "simulated memory", "simulated disk")


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder on tmpfs, where there is one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="moe-ckpt-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_store(kind: str, place: Path) -> Iterator[Callable[[], Any]]:
    """Opens a new Store object over the same place; the one before is closed."""
    opened: list[Any] = []

    def make() -> Any:
        if opened:
            opened.pop().close()
        opened.append(new_store(kind, place, segments=SEGMENTS))
        return opened[-1]

    yield make
    if opened:
        opened.pop().close()


@pytest.fixture
def store(open_store: Callable[[], Any]) -> Any:
    return open_store()
