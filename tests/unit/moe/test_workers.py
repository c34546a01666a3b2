"""What the persister removes."""

from __future__ import annotations

from typing import Any

from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.snapshot.workers import Persister

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
