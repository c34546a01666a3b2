"""What a rank takes from its peers: their own snapshots only, and what it has already only if every byte is intact."""

from __future__ import annotations

from pathlib import Path

import pytest
from workload import JOB, LAYOUT, RANK, SEGMENTS, write

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.replication.receiver import ReplicaReceiver
from megatron.core.dist_checkpointing.moe.storage.manifest import encode
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

OWNER = RANK + 1
SNAPSHOT = SnapshotId(4, OWNER)


@pytest.fixture
def kind() -> str:
    return "memory"


@pytest.fixture
def store(place: Path) -> MemoryStore:
    return MemoryStore(place, JOB, RANK, SEGMENTS)


def test_an_intact_replica_is_held_and_need_not_be_sent_again(store: MemoryStore) -> None:
    manifest = encode(write(store, SNAPSHOT))
    receiver = ReplicaReceiver(store, SystemClock())
    assert receiver.holds(receiver.manifest(OWNER, manifest))
    assert SNAPSHOT in store.snapshots().sealed


def test_a_damaged_replica_is_given_up_so_that_it_is_sent_again(store: MemoryStore) -> None:
    manifest = encode(write(store, SNAPSHOT))
    (damaged,) = [path for path in store.directory.glob("*.bin") if any(path.read_bytes())]
    data = bytearray(damaged.read_bytes())
    at = LAYOUT.nbytes // 2
    data[at] ^= 1
    with damaged.open("r+b") as file:
        file.write(data)
    receiver = ReplicaReceiver(store, SystemClock())
    assert not receiver.holds(receiver.manifest(OWNER, manifest))
    assert SNAPSHOT not in store.snapshots().sealed


def test_a_rank_cannot_send_the_snapshot_of_another(store: MemoryStore) -> None:
    manifest = encode(write(store, SNAPSHOT))
    with pytest.raises(UnreadableCheckpoint, match=f"rank {OWNER + 1} sent the .* not its own"):
        ReplicaReceiver(store, SystemClock()).manifest(OWNER + 1, manifest)
    assert SNAPSHOT in store.snapshots().sealed
