"""What holds for all tests: how many examples a property takes, and which files come first."""

from __future__ import annotations

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

FIRST = ("process", "simulation", "contract")
"""Folders of long files: side by side, two workers end at about the same time if short files come last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=turn)
