"""How a recovery writes into live state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.megatron_state.restore import LiveRestorer
from megatron.core.dist_checkpointing.moe.recovery.kept_state import KeptState, keep, take
from megatron.core.dist_checkpointing.moe.recovery.restoring import RestoreTask, _MeasuredReads
from megatron.core.dist_checkpointing.moe.types import PARKED, RecoveryPlan, ReplaySegment, Scope, Topology


def test_state_that_no_copy_gives_is_nan_after_a_recovery_and_never_what_it_was() -> None:
    live = torch.ones(8)
    restorer = LiveRestorer((), lambda recast: None, derived=[live])
    ports: Any = SimpleNamespace(transport=SimpleNamespace(rank=0), restorer=restorer, kept=KeptState(), clock=None)
    plan = RecoveryPlan(4, Scope.GLOBAL, (ReplaySegment((0,), 4, 4),), ())
    RestoreTask(ports, plan, (), Topology(1)).restore()
    assert bool(live.isnan().all())


def snapshot(kind: str = PARKED, iteration: int = 4, attempt: str = "first") -> Any:
    facts = SimpleNamespace(scalars={"timeline": [[attempt, 0]]})
    named = SimpleNamespace(kind=kind, iteration=iteration)
    return SimpleNamespace(manifest=SimpleNamespace(snapshot=named, facts=facts))


def test_state_is_kept_where_it_is_the_very_snapshot_that_would_be_copied_back() -> None:
    kept = KeptState(4, [["first", 0]])
    assert kept.is_that_of([snapshot()])
    others = [snapshot(kind="full"), snapshot(iteration=3), snapshot(attempt="second")]
    assert not any(kept.is_that_of(found) for found in ([], *([other] for other in others), [snapshot(), others[0]]))


def test_state_is_no_longer_that_of_a_snapshot_once_another_was_restored() -> None:
    kept = KeptState(4, [["first", 0]])
    kept.forget()
    assert not kept.is_that_of([snapshot()])


def test_what_a_process_kept_is_taken_once() -> None:
    optimizer, kept = type("Optimizer", (), {})(), KeptState(4, [["first", 0]])
    keep(optimizer, kept)
    assert take(optimizer) is kept
    assert take(optimizer) == KeptState()


def test_how_fast_state_was_read_counts_the_bytes_and_the_seconds_of_reads_alone() -> None:
    clock = SimpleNamespace(now_s=iter((10.0, 10.5, 40.0, 40.5)).__next__)
    reader: Any = SimpleNamespace(read=lambda key: memoryview(bytes(1_000_000_000 // 2)))
    measured = _MeasuredReads(clock)
    for key in ("one", "other"):
        measured.of(reader)(key)
    assert str(measured) == "restore: rank 0 read and verified 1 GB at 1 GB/s"
