"""How much a test tries, and which of its cases `make test`, `make test-ci` and `make test-full` run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(most: int) -> int:
    """How many of at most so many examples a property takes under the profile of this run, which has up to 100."""
    return max(1, most * settings().max_examples // 100)


def cases(every: Iterable[Any], *, fast: Collection[Any], full: Collection[Any] = ()) -> list[Any]:
    """All cases of a product, for `parametrize`: `make test` runs the fast ones, `make test-ci` what is neither."""
    listed = [*every]
    strange = [one for one in (*fast, *full) if one not in listed]
    assert not strange, f"no such cases: {strange}"
    marked = {one: pytest.mark.full if one in full else pytest.mark.ci for one in listed if one not in fast}
    return [pytest.param(one, marks=marked[one]) if one in marked else one for one in listed]
