"""How much a test tries: all in `make test-full`, a share of it in `make test`."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int) -> int:
    """How many of at most so many examples a property takes under the profile of this run, which has up to 100."""
    return max(1, most * settings().max_examples // 100)
