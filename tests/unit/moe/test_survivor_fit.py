"""Before the store for logs and parked state gives memory up, everyone lets go of it who may have page-locked it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def resize(self, segment_bytes: Sequence[int], before: Callable[[], None]) -> None:
        before()
        self.calls.append(f"resized to {len(segment_bytes)}")
        if self.is_full:
            raise NoRoom("the tmpfs is full")


def survivor(calls: list[str], store: Standby) -> SimpleNamespace:
    """As much of one as `resize_logs` uses."""
    return SimpleNamespace(
        _plan=PLAN, _refused=0, _identity=object(), _buffers=SurvivorBuffers((100,), 10), store=store,
        _recorder=SimpleNamespace(release=lambda: calls.append("recorder let go")),
        settle=lambda: calls.append("settled"), _logs_of=lambda identity: None,
    )  # fmt: skip


def test_both_copy_engines_let_go_before_any_memory_goes() -> None:
    calls: list[str] = []
    Survivor.resize_logs(survivor(calls, Standby(calls)), 6, lambda: calls.append("snapshots let go"))  # type: ignore[arg-type]
    assert calls == ["settled", "recorder let go", "snapshots let go", "resized to 9"]


def test_logs_that_find_no_room_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    one = survivor(calls, Standby(calls, is_full=True))
    for _ in range(3):
        Survivor.resize_logs(one, 6)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1 and "find no room" in caplog.messages[0]
