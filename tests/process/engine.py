"""A process world with Transformer Engine, for fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

from megatron.pretrain.testing import te_on_cpu


def world_with_engine(folder: Path) -> Iterator[World]:
    """A world in which Transformer Engine's own Python runs, over kernels for the CPU."""
    try:
        te_on_cpu.find()
    except te_on_cpu.MissingWheel as error:
        pytest.skip(str(error))
    started = World(folder, with_engine=True)
    yield started
    started.kill()
