"""Bytes that peers hold in their own snapshots are not sent to them, and any r nodes can be lost all the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_replicator import FakeTransport, Network

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock
from megatron.core.dist_checkpointing.moe.megatron_state.operators import ShardSpread, holders
from megatron.core.dist_checkpointing.moe.policy.placement import Placement, place_replicas
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.replication.receiver import ReplicaReceiver, Room
from megatron.core.dist_checkpointing.moe.replication.replicator import Exchange, ReplicaOffer, Replicator
from megatron.core.dist_checkpointing.moe.storage.manifest import encode
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types import Topology

ITERATION = 3
ROOM = Room(SystemClock(), 5.0, lambda: False)
SIZES = {"dense": 900, "router": 1, "expert": 400, "random": 64}

TOPOLOGIES = {
    "a data-parallel rank on each node": Topology(4, ranks_per_node=1),
    "experts on two nodes each": Topology(4, ep=2, ranks_per_node=1),
    "stages on nodes of their own": Topology(4, pp=2, ranks_per_node=2),
    "two stages on each of three nodes": Topology(6, pp=2, nodes=(0, 1, 2, 0, 1, 2)),
    "nodes of unequal sizes": Topology(6, tp=2, ep=1, nodes=(0, 0, 0, 1, 2, 2)),
}


def owned(topology: Topology, rank: int, *, distributed: bool) -> dict[str, tuple[int, ...]]:
    """The records of a rank, with the ranks that hold the same bytes, by the sharding of its optimizer."""
    spreads = {
        "dense": ShardSpread(False, True, distributed),
        "router": ShardSpread(False, False, False),
        "expert": ShardSpread(True, True, distributed),
    }
    found = {name: holders(topology, rank, spread) for name, spread in spreads.items()}
    return found | {"random": (rank,)}


def content(name: str, ranks: tuple[int, ...]) -> bytes:
    return np.random.default_rng([ranks[0], *name.encode()]).bytes(4 * SIZES[name])


class Job:
    """All ranks of a job with a store each, after one exchange of replicas."""

    def __init__(self, place: Path, topology: Topology, r: int, *, distributed: bool) -> None:
        world = range(topology.world_size)
        self.topology, self.placement = topology, place_replicas(topology, r)
        self.records = [owned(topology, rank, distributed=distributed) for rank in world]
        kept = max(map(len, self.placement.kept_by))
        self.stores = [self._stored(place, rank, 1 + kept) for rank in world]
        network = Network()
        with ThreadPoolExecutor(len(world)) as threads:
            self.exchanges = list(threads.map(lambda rank: self._exchanged(network, rank), world))

    def key(self, rank: int, name: str) -> str:
        # As `Shard.key`: what others hold as well has a key that is the same there.
        return f"{name}{self.records[rank][name][0]}/master"

    def _stored(self, place: Path, rank: int, segments: int) -> MemoryStore:
        layout = Layout.of(Field(self.key(rank, name), "float32", (SIZES[name],)) for name in self.records[rank])
        store = MemoryStore(place, "job", rank, (layout.nbytes,) * segments)
        with store.reserve(SnapshotId(ITERATION, rank), layout) as writer:
            for name, ranks in self.records[rank].items():
                writer.put(self.key(rank, name), content(name, ranks))
            writer.seal(Facts("job"))
        return store

    def _exchanged(self, network: Network, rank: int) -> Exchange:
        transport: Any = FakeTransport(network, rank, self.topology.world_size)
        replicator = Replicator(transport, self.placement.peers[rank], self.placement.kept_by[rank])
        receiver = ReplicaReceiver(self.stores[rank], ROOM, rank=rank)
        with self.stores[rank].open(SnapshotId(ITERATION, rank)) as reader:
            return replicator.exchange(
                ITERATION, [ReplicaOffer("snapshot", encode(reader.manifest), reader.raw())], receiver
            )

    def copy(self, owner: int, at: int) -> Mapping[str, bytes]:
        with self.stores[at].open(SnapshotId(ITERATION, owner)) as reader:
            return {key: bytes(reader.read(key)) for key in reader.manifest.by_key}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_whichever_r_nodes_are_lost_all_state_is_left_and_nothing_was_sent_twice(
    topology: Topology, r: int, distributed: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, topology, r, distributed=distributed)
    nodes = topology.ranks_by_node
    for rank, done in enumerate(job.exchanges):
        assert set(done.acknowledged.values()) == {True}
        assert not done.failures
        assert done.sent_bytes == expected_bytes(job, job.placement, rank)
    for lost in itertools.combinations(nodes, min(r, len(nodes) - 1)):
        left = [rank for node, ranks in nodes.items() if node not in lost for rank in ranks]
        for owner, records in enumerate(job.records):
            at = next(rank for rank in left if rank == owner or rank in job.placement.peers[owner])
            copy = job.copy(owner, at)
            for name, ranks in records.items():
                assert copy[job.key(owner, name)] == content(name, ranks)


def expected_bytes(job: Job, placement: Placement, rank: int) -> int:
    """What no peer holds by itself; gaps between records that are sent are shorter than 64 bytes."""
    sent = 0
    for peer in placement.peers[rank]:
        missing = [peer not in ranks for ranks in job.records[rank].values()]
        sizes = [4 * size for size in SIZES.values()]
        for at, (is_missing, nbytes) in enumerate(zip(missing, sizes, strict=True)):
            gap = -nbytes % 64 if at + 1 < len(missing) and missing[at + 1] else 0
            sent += nbytes + gap if is_missing else 0
    return sent


def test_a_peer_whose_own_bytes_are_damaged_is_sent_them(tmp_path: Path) -> None:
    topology = Topology(2, ranks_per_node=1)

    class Damaged(Job):
        def _stored(self, place: Path, rank: int, segments: int) -> MemoryStore:
            store = super()._stored(place, rank, segments)
            if rank == 1:
                (path,) = [path for path in store.directory.glob("*.bin") if any(path.read_bytes())]
                with path.open("r+b") as segment:
                    segment.seek(100)
                    segment.write(b"\xff\x00\xff\x00")
            return store

    job = Damaged(tmp_path, topology, 1, distributed=False)
    assert job.exchanges[0].acknowledged == {1: True}
    assert job.exchanges[0].sent_bytes > 4 * SIZES["dense"]
    assert job.copy(0, 1)[job.key(0, "dense")] == content("dense", (0, 1))
