"""The memory of a rank after a recovery."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.recovery.exactness import Divergence, DivergenceNotes
from megatron.core.dist_checkpointing.moe.runtime import live_state
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo, open_memory


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
        store=None,
        room=None,
        standby_bytes=None,
        specs=(),
        free_unused_standby=lambda: None,
        **parts,
        _config=SimpleNamespace(strict=strict),
    )
    live_state.RankMemory.make_room(memory)
    assert told == [strict]


@pytest.mark.parametrize("noted", [False, True])
def test_memory_of_a_start_that_protected_nothing_goes_unless_a_replay_diverged_in_it(
    noted: bool, tmp_path: Path
) -> None:
    config, place = MoECheckpointConfig(memory_dir=str(tmp_path)), ProcessInfo(0, "node-0", "job")
    store = open_memory(config, place, [4096])
    if noted:
        DivergenceNotes(store.directory).add(
            Divergence(2, 3, (0,), alone=False, first=1, last=2, timeline=(), why="loss 1 is not 2")
        )
    memory: Any = SimpleNamespace(_memories={"slot": store}, _config=config, _place=place)
    live_state.RankMemory.close(memory, began=False)
    assert store.directory.exists() == noted
    assert bool(DivergenceNotes(store.directory).read()) == noted
