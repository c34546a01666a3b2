"""The stock loop needs Megatron-Core 0.17 or later, and with it Python 3.12: elsewhere its tests say so and are
skipped."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from stock_jobs import FOUR, Kind, Records, StockJob
from stock_recording import unprotected
from world import World, node_memory

HERE = Path(__file__).parent
MISSING = (
    ""
    if importlib.util.find_spec("megatron.training")
    else f"Megatron-Core {version('megatron-core')} has no megatron.training; `make setup` installs one that has"
)

NewJob = Callable[..., StockJob]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if MISSING:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    started = World(tmp_path_factory.mktemp("stock-world"))
    yield started
    started.kill()


@pytest.fixture(scope="session")
def new_job(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewJob]:
    """Makes jobs that know nothing of each other: `new_job(shape)`."""
    numbers = itertools.count()
    with node_memory() as folder:

        def make(shape: Kind = FOUR) -> StockJob:
            memory = folder / f"{folder.name}-{next(numbers)}"
            memory.mkdir()
            return StockJob(world, memory, tmp_path_factory.mktemp("records"), shape)

        yield make


@pytest.fixture(scope="session")
def undisturbed(new_job: NewJob) -> Callable[[Kind], Records]:
    """What the stock loop comes to by itself, with nothing around it."""
    known: dict[Kind, Records] = {}

    def records(shape: Kind) -> Records:
        if shape not in known:
            job = new_job(shape)
            job.run(hooks=[unprotected])
            known[shape] = job.records()
        return known[shape]

    return records
