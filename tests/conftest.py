"""What holds for all tests: how many examples a property takes, which files come first, and what a test may compute."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: tests have a timeout as a whole, not a limit for each example. Examples that a test asks
# for with `examples(n)` are cut in proportion to those of the profile; `make test-full` takes the profile `full`.
# Whether a health check fails depends on the machine's pace, or on luck where most of what is drawn is filtered out.
_BY_CHANCE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("sample", deadline=None, max_examples=25, suppress_health_check=_BY_CHANCE)
settings.register_profile("full", deadline=None, max_examples=100, suppress_health_check=_BY_CHANCE)
settings.load_profile("sample")

HERE = Path(__file__).parent

FIRST = ("process", "simulation", "contract")
"""Folders of long files: side by side, two workers end at about the same time if short files come last."""

REAL = ("process", "stock", "install", "gpu")
"""Folders of real jobs, which cost what a job costs: the limits are for the others."""

TEST_CPU_S, FILE_CPU_S = 5.0, 20.0
"""What a test of `make test` may compute, and all of its file: with children and fixtures, but those of the session."""

SHARED = 3.0
"""How many times as many CPU seconds the same work takes where others share cores and caches: then nothing fails."""

LOOP_S = 0.037
"""CPU seconds of a million additions on the machine of these limits: on a slower one they are longer."""

DEARER = {
    "test_staged_recovery.py": "kills at many events of a simulated job, in place of as many real ones",
    "test_sparse_windows.py": "the same",
}
"""Names of tests and of files that may compute for longer, and why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(HERE).parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=turn)


def cpu_s() -> float:
    """Seconds that this process and its children that ended have computed: unlike a clock's, not those of others."""
    return sum(os.times()[:4])


@cache
def pace() -> float:
    """How many times as long as on the machine of the limits the same work takes here, at least 1."""
    times = list[float]()
    for _ in range(3):
        begun_s, total = time.thread_time(), 0
        for one in range(250_000):
            total += one
        times.append(time.thread_time() - begun_s)
    return max(1.0, 4 * min(times) / LOOP_S)


class _Meter:
    """When the file and the test of now began, by `cpu_s`; fixtures of the session put both off."""

    path: Path | None = None
    file_s = test_s = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    before = cpu_s()
    try:
        return (yield)
    finally:
        if fixturedef.scope == "session":
            _Meter.file_s += cpu_s() - before
            _Meter.test_s += cpu_s() - before


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    _Meter.test_s = cpu_s()
    if _Meter.path != item.path:
        _Meter.path, _Meter.file_s = item.path, _Meter.test_s
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    test_s, file_s = cpu_s() - _Meter.test_s, cpu_s() - _Meter.file_s
    item.user_properties.append(("cpu_s", round(test_s, 2)))  # in `--junitxml`
    if _is_limited(item):
        if test_s > pace() * SHARED * TEST_CPU_S and item.name not in DEARER:
            pytest.fail(f"computed for {test_s:.1f} s, more than {TEST_CPU_S:.0f}: make it cheaper, or mark it `ci`")
        if file_s > pace() * SHARED * FILE_CPU_S and item.path.name not in DEARER:
            _Meter.file_s = float("inf")  # is told once
            pytest.fail(
                f"the tests of {item.path.name} computed for {file_s:.1f} s, more than {FILE_CPU_S:.0f}: make them "
                "cheaper, or mark some of them `ci`"
            )


def _is_limited(item: pytest.Item) -> bool:
    sampled = settings().max_examples == settings.get_profile("sample").max_examples
    marked = any(item.get_closest_marker(name) for name in ("ci", "full"))
    return sampled and not marked and item.path.relative_to(HERE).parts[0] not in REAL
