"""The memory of a rank after a recovery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.runtime import live_state


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_fitted_after_a_recovery_ends_a_strict_job_where_memory_is_too_small(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    class Allocator:
        def __init__(self, *given: Any) -> None:
            told.append(given[6])

        def fit(self, strategy: object, specs: object) -> tuple[object, bool]:
            return specs, False

    monkeypatch.setattr(live_state, "BufferAllocator", Allocator)
    parts = {"_state": SimpleNamespace(capturer=None), "_control": None, "_owners": (), "_strategy": None}
    memory: Any = SimpleNamespace(
        store=None, room=None, standby_bytes=None, specs=(), **parts, _config=SimpleNamespace(strict=strict)
    )
    live_state.RankMemory.make_room(memory)
    assert told == [strict]
