"""What the persister removes, and what it says while storage does not answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.snapshot.coordinator import Coordinator
from megatron.core.dist_checkpointing.moe.snapshot.persister import Persister, PersistTask

LAYOUT = Layout.of([Field("w", "uint8", (10,))])


def test_a_rank_removes_its_own_snapshots_of_the_named_iterations_from_storage() -> None:
    storage, nobody = FakeStore(Memory(), 0), Any
    for iteration in (4, 5):
        for rank in (0, 1):
            with storage.reserve(SnapshotId(iteration, rank), LAYOUT) as writer:
                writer.put("w", bytes(10))
                writer.seal(Facts("job", "digest", {}, {}))
    persister = Persister(storage, storage, 0, nobody, lambda piece, index: LAYOUT, clock=SystemClock())  # type: ignore[arg-type]
    persister.free({4})
    assert storage.snapshots().sealed == (SnapshotId(4, 1), SnapshotId(5, 0), SnapshotId(5, 1))


def test_a_snapshot_that_cannot_be_removed_keeps_no_other_one_in_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, nobody = FakeStore(Memory(), 0), Any
    for iteration in (4, 5):
        with storage.reserve(SnapshotId(iteration, 0), LAYOUT) as writer:
            writer.put("w", bytes(10))
            writer.seal(Facts("job", "digest", {}, {}))
    free = storage.free

    def fails(snapshot: SnapshotId) -> None:
        if snapshot.iteration == 4:
            raise StoreFailure("the device failed")
        free(snapshot)

    monkeypatch.setattr(storage, "free", fails)
    persister = Persister(storage, storage, 0, nobody, lambda piece, index: LAYOUT, clock=SystemClock())  # type: ignore[arg-type]
    with pytest.raises(StoreFailure, match="the device failed"):
        persister.free({4, 5})
    assert storage.snapshots().sealed == (SnapshotId(4, 0),)


@dataclass
class Clock:
    """Shows this time."""

    s: float = 100.0

    def now_s(self) -> float:
        return self.s


def test_a_rank_whose_storage_does_not_answer_says_since_when_and_the_others_that_it_is_another() -> None:
    storage, clock, nobody = FakeStore(Memory(), 0), Clock(), Any
    persister = Persister(storage, storage, 3, nobody, lambda piece, index: LAYOUT, clock=clock)  # type: ignore[arg-type]
    stuck = PersistTask((), (), (), running=Future(), begun_s=40.0, written_bytes=3_000_000)
    assert persister.behind(stuck) == "by rank 3: for 60 s, 3 MB are whole"
    done = PersistTask((), (), (), running=Future())
    assert done.running is not None
    done.running.set_result(None)  # type: ignore[attr-defined]
    assert persister.behind(done) == "by another rank"


def test_where_training_ends_without_a_write_nothing_more_is_written_in_its_place() -> None:
    """Whoever finishes it, such as the persist agent, writes the same folders."""
    nobody: Any = None
    persister = Persister(nobody, nobody, 0, nobody, lambda piece, index: LAYOUT, clock=SystemClock())
    background = SimpleNamespace(drain=lambda: None, close=lambda wait: None)
    job = SimpleNamespace(config=SimpleNamespace(timeout_s=1.0))
    parts: Any = SimpleNamespace(_persister=persister, _background=background, _in_contact=False, _job=job)
    parts.before_optimizer = lambda: None
    Coordinator.shutdown(parts)
    task = PersistTask((), (), ())
    persister.persist(task)
    assert task.failures == ["this process writes no more: what was being persisted is given up"]
