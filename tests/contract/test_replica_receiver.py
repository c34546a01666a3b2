"""What a rank takes from its peers: their own snapshots only, and what it has already only if every byte is intact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from workload import JOB, LAYOUT, RANK, SEGMENTS, write

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Manifest, SnapshotId
from megatron.core.dist_checkpointing.moe.replication.receiver import ReplicaReceiver, Room
from megatron.core.dist_checkpointing.moe.storage.manifest import encode
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore

OWNER = RANK + 1
SNAPSHOT = SnapshotId(4, OWNER)
ROOM = Room(SystemClock(), 60.0, lambda: False)


@pytest.fixture
def kind() -> str:
    return "memory"


@pytest.fixture
def store(place: Path) -> MemoryStore:
    return MemoryStore(place, JOB, RANK, SEGMENTS)


def test_an_intact_replica_is_held_and_need_not_be_sent_again(store: MemoryStore) -> None:
    manifest = encode(write(store, SNAPSHOT))
    receiver = ReplicaReceiver(store, ROOM)
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
    receiver = ReplicaReceiver(store, ROOM)
    assert not receiver.holds(receiver.manifest(OWNER, manifest))
    assert SNAPSHOT not in store.snapshots().sealed


def test_a_rank_cannot_send_the_snapshot_of_another(store: MemoryStore) -> None:
    manifest = encode(write(store, SNAPSHOT))
    with pytest.raises(UnreadableCheckpoint, match=f"rank {OWNER + 1} sent the .* not its own"):
        ReplicaReceiver(store, ROOM).manifest(OWNER + 1, manifest)
    assert SNAPSHOT in store.snapshots().sealed


def test_a_replica_waits_for_room_until_an_older_one_is_freed(store: MemoryStore) -> None:
    wanted = offered_to_a_full(store)

    class Freeing(SystemClock):
        def sleep(self, seconds: float) -> None:
            store.free(replace(SNAPSHOT, iteration=5))

    replica = ReplicaReceiver(store, Room(Freeing(), 60.0, lambda: False)).begin(wanted)
    assert replica is not None
    replica.abandon()


def test_a_replica_waits_no_longer_than_its_owner_nor_after_training_has_ended(store: MemoryStore) -> None:
    wanted = offered_to_a_full(store)
    slept: list[float] = []

    class Watched(SystemClock):
        def now_s(self) -> float:
            return sum(slept)

        def sleep(self, seconds: float) -> None:
            slept.append(seconds)

    receiver = ReplicaReceiver(store, Room(Watched(), 2.0, lambda: False))
    assert receiver.begin(wanted) is None
    assert 2.0 <= sum(slept) < 2.1
    assert receiver.begin(wanted) is None
    assert sum(slept) < 2.1, "all pieces of an exchange wait for one time together"
    slept.clear()
    assert ReplicaReceiver(store, Room(Watched(), 2.0, lambda: len(slept) == 3)).begin(wanted) is None
    assert len(slept) == 3


def offered_to_a_full(store: MemoryStore) -> Manifest:
    """The manifest of a snapshot of which there is nothing here, and no segment is left."""
    wanted = ReplicaReceiver(store, ROOM).manifest(OWNER, encode(write(store, SNAPSHOT)))
    store.free(SNAPSHOT)
    for iteration in range(5, 5 + len(SEGMENTS)):
        write(store, SnapshotId(iteration, OWNER))
    return wanted
