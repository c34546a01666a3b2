"""Before the store for logs and parked state gives memory up, nothing is copied to it any more."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import LogPlan
from megatron.core.dist_checkpointing.moe.local_recovery.survivor import Survivor, SurvivorBuffers
from megatron.core.dist_checkpointing.moe.ports import NoRoom
from megatron.core.dist_checkpointing.moe.types import Topology

PLAN = LogPlan(Topology(2, pp=2), 0, (4,), "uint8", 3)


class Standby:
    def __init__(self, calls: list[str], *, is_full: bool = False) -> None:
        self.calls, self.is_full = calls, is_full

    def resize(self, segment_bytes: Sequence[int]) -> None:
        self.calls.append(f"resized to {len(segment_bytes)}")
        if self.is_full:
            raise NoRoom("the tmpfs is full")


def survivor(calls: list[str], store: Standby) -> SimpleNamespace:
    """As much of one as `resize_logs` uses."""
    return SimpleNamespace(
        _plan=PLAN, _refused=0, _identity=object(), _buffers=SurvivorBuffers((100,), 10), store=store,
        _recorder=SimpleNamespace(settle=lambda: calls.append("recorder settled")),
        settle=lambda: calls.append("settled"), _logs_of=lambda identity: None,
    )  # fmt: skip


def test_copies_of_logs_have_ended_before_any_memory_goes() -> None:
    calls: list[str] = []
    Survivor.resize_logs(survivor(calls, Standby(calls)), 6)  # type: ignore[arg-type]
    assert calls == ["settled", "recorder settled", "resized to 9"]


def test_logs_that_find_no_room_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    one = survivor(calls, Standby(calls, is_full=True))
    for _ in range(3):
        Survivor.resize_logs(one, 6)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1 and "find no room" in caplog.messages[0]
