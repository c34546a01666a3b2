"""What another layout left in memory, read in place or from other nodes: one record at a time, from any intact copy."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Facts, Json, Layout, PeerLost, SnapshotId
from megatron.core.dist_checkpointing.moe.resharding.record_server import RecordServer, RemoteRecords
from megatron.core.dist_checkpointing.moe.resharding.survivors import PreviousLayout, SurvivingMemory
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.types.layout import Field

BLOCK, BLOCKS = 1 << 20, 16
SHARE = SnapshotId(4, 0)
FIELDS = [Field(f"w[{at}:{at + 1}]/master", "float32", (BLOCK // 4,)) for at in range(BLOCKS)]
PAST = [["attempt", 0]]


class Ranks:
    """What ranks on threads gather."""

    def __init__(self, count: int) -> None:
        self.values: list[Json] = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)


class FakeTransport:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, len(ranks.values)

    def gather(self, value: Json) -> list[Json]:
        self._ranks.values[self.rank] = value
        self._ranks.barrier.wait()
        found = list(self._ranks.values)
        self._ranks.barrier.wait()
        return found


def filled(folder: Path, slot: int, *snapshots: SnapshotId) -> MemoryStore:
    folder.mkdir(exist_ok=True)
    layout = Layout.of(FIELDS)
    store = MemoryStore(folder, "job", slot, [layout.nbytes] * max(1, len(snapshots)))
    for snapshot in snapshots:
        with store.reserve(snapshot, layout) as writer:
            for at, field in enumerate(FIELDS):
                writer.put(field.key, np.full(BLOCK // 4, at, np.float32))
            writer.seal(Facts("job", "", {"world_size": 2}, {"timeline": PAST}))
    return store


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[SurvivingMemory]]:
    """Three ranks: two of one node, both with a copy of a share, and one of another, with none."""
    stores = [filled(tmp_path / "a", 0, SHARE), filled(tmp_path / "a", 1, SHARE), filled(tmp_path / "b", 0)]
    ranks = Ranks(3)

    def made(rank: int) -> SurvivingMemory:
        node, transport = "aab"[rank], FakeTransport(ranks, rank)
        directory, own = stores[rank].directory, stores[rank]
        return SurvivingMemory(own, directory, node, lambda manifest: True, transport, "127.0.0.1", 5.0)  # type: ignore[arg-type]

    with ThreadPoolExecutor(3) as pool, ExitStack() as held:
        memories = list(pool.map(made, range(3)))
        for memory in memories:
            held.callback(memory.close)
        yield memories
    for store in stores:
        store.close()


def damage(store_directory: Path, key: int) -> None:
    (segment,) = store_directory.glob("segment-*.bin")
    with segment.open("r+b") as file:
        file.seek(key * BLOCK + 5)
        file.write(b"\xff\xff\xff")


@pytest.mark.parametrize("reader", [0, 1, 2])
def test_a_slot_without_a_process_is_read_like_those_of_its_node(reader: int, tmp_path: Path) -> None:
    stores = [filled(tmp_path / "a", 0), filled(tmp_path / "a", 1), filled(tmp_path / "b", 0)]
    stray = filled(tmp_path / "a", 2, SHARE)
    stray.close()
    (tmp_path / "b" / "job" / "standby-001").mkdir()
    ranks = Ranks(3)

    def made(rank: int) -> SurvivingMemory:
        node, own = "aab"[rank], stores[rank]
        transport: Any = FakeTransport(ranks, rank)
        return SurvivingMemory(own, own.directory, node, lambda manifest: True, transport, "127.0.0.1", 5.0)

    with ThreadPoolExecutor(3) as pool:
        memories = list(pool.map(made, range(3)))
    assert [[*memory.strays] for memory in memories] == [[stray.directory], [], []], "the first rank of a node tells"
    with memories[reader].open(SHARE) as found:
        assert np.array_equal(np.frombuffer(found.read(FIELDS[3].key), np.float32), np.full(BLOCK // 4, 3))
    for one in (*memories, *stores):
        one.close()


@pytest.mark.parametrize("by", ["discard", "protected"])
@pytest.mark.parametrize("shares", [(), (SHARE,)])
def test_what_a_process_left_that_no_start_has_goes_once_training_does_without_it(
    shares: tuple[SnapshotId, ...], by: str, tmp_path: Path
) -> None:
    own = filled(tmp_path / "a", 0)
    filled(tmp_path / "a", 1, *shares).close()
    for slot in (0, 1, 11):
        MemoryStore(tmp_path / "a", "job", slot, (4096,), area="standby").close()
    held = MemoryStore(tmp_path / "a", "job", 0, (4096,), area="standby")
    alone: Any = FakeTransport(Ranks(1), 0)
    older = PreviousLayout("job", "a", own, None, lambda: None, {"world_size": 2}, alone, "127.0.0.1", 5.0)  # type: ignore[arg-type,return-value]
    assert [one.snapshots().sealed for one in older.strays()] == [shares]
    older.discard() if by == "discard" else older.protected(5)
    for one in threading.enumerate():
        if one.name == "moe-ckpt-strays":
            one.join(20)
    assert sorted(path.name for path in own.directory.parent.iterdir()) == ["slot-000", "standby-000", "standby-011"]
    own.close()
    held.close()


def test_a_rank_of_another_node_reads_every_record(nodes: list[SurvivingMemory]) -> None:
    assert nodes[2].snapshots().sealed == (SHARE,)
    with nodes[2].open(SHARE) as reader:
        for at, field in enumerate(FIELDS):
            assert np.array_equal(np.frombuffer(reader.read(field.key), np.float32), np.full(BLOCK // 4, at))


def test_whoever_reads_from_another_node_holds_one_block(nodes: list[SurvivingMemory]) -> None:
    with nodes[2].open(SHARE) as reader:
        reader.read(FIELDS[0].key)
        tracemalloc.start()
        try:
            for field in FIELDS:
                reader.read(field.key)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 1.5 * BLOCK, f"{peak} bytes for {BLOCKS} records of {BLOCK}"


@pytest.mark.parametrize("reader_of", [0, 2], ids=["in place", "from another node"])
def test_a_damaged_copy_is_passed_by_while_another_is_whole(
    reader_of: int, nodes: list[SurvivingMemory], tmp_path: Path
) -> None:
    damage(tmp_path / "a" / "job" / "slot-000", 3)
    with nodes[reader_of].open(SHARE) as reader:
        assert np.frombuffer(reader.read(FIELDS[3].key), np.float32)[0] == 3
    damage(tmp_path / "a" / "job" / "slot-001", 3)
    with nodes[reader_of].open(SHARE) as reader, pytest.raises(UnreadableCheckpoint, match=r"w\[3:4\]"):
        reader.read(FIELDS[3].key)


def test_whoever_does_not_know_the_secret_gets_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "a", 0, SHARE)
    server = RecordServer(store.open, "127.0.0.1", 5.0)
    address, port, secret = server.place.split()
    wrong = RemoteRecords(0, f"{address} {port} {'0' * len(secret)}", 5.0)
    with pytest.raises(PeerLost, match="memory of rank 0"):
        wrong.open(SHARE)
    server.close()
    with pytest.raises(PeerLost, match="memory of rank 0"):
        RemoteRecords(0, server.place, 5.0)
    store.close()


def test_a_connection_ends_with_whoever_asked_though_a_forked_child_has_it_too(tmp_path: Path) -> None:
    store = filled(tmp_path / "a", 0, SHARE)
    server, before = RecordServer(store.open, "127.0.0.1", 600.0), set(threading.enumerate())
    asking = RemoteRecords(0, server.place, 20.0)
    asking.open(SHARE)
    (serving,) = set(threading.enumerate()) - before
    of_child = vars(asking)["_connection"].dup()
    asking.close()
    serving.join(20)
    assert not serving.is_alive()
    for one in (of_child, server, store):
        one.close()


def test_nothing_is_served_any_more_where_a_rank_is_lost_before_all_know_the_servers(tmp_path: Path) -> None:
    store, calls, before = filled(tmp_path / "a", 0, SHARE), iter(range(2)), set(threading.enumerate())

    class Breaking(FakeTransport):
        def gather(self, value: Json) -> list[Json]:
            if next(calls):
                raise PeerLost("rank 1 is gone")
            return [value, ["b", []]]

    transport: Any = Breaking(Ranks(2), 0)
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        SurvivingMemory(store, store.directory, "a", lambda manifest: True, transport, "127.0.0.1", 5.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    store.close()


def test_a_server_ends_though_its_descriptor_could_be_given_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = filled(tmp_path / "a", 0, SHARE), set(threading.enumerate())
    is_first, is_second, is_closed = threading.Event(), threading.Event(), threading.Event()

    def arrive(*arrived: object) -> None:
        if is_first.is_set():
            is_second.set()
            is_closed.wait(20)
        is_first.set()

    monkeypatch.setattr(RecordServer, "_arrive", arrive)
    server = RecordServer(store.open, "127.0.0.1", 5.0)
    (thread,) = set(threading.enumerate()) - before
    address, port, secret = server.place.split()
    slow = socket.create_connection((address, int(port)), timeout=20)
    fast = RemoteRecords(0, server.place, 5.0)
    assert is_first.wait(20)
    slow.sendall(bytes.fromhex(secret))  # heard in a turn of its own, in which nobody is accepted
    assert is_second.wait(20)
    server.close()
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
    is_closed.set()
    thread.join(20)
    assert not thread.is_alive()
    for one in (slow, fast, *silent, store):
        one.close()


def test_a_share_that_cannot_be_freed_keeps_no_other_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [SHARE, SnapshotId(5, 0), SnapshotId(6, 0)]
    store = filled(tmp_path / "a", 0, *shares)
    free, tried = store.free, list[SnapshotId]()

    def fails_once(snapshot: SnapshotId) -> None:
        tried.append(snapshot)
        if len(tried) == 1:
            raise StoreFailure("too many open files")
        free(snapshot)

    monkeypatch.setattr(store, "free", fails_once)
    alone: Any = FakeTransport(Ranks(1), 0)
    storage: Any = SimpleNamespace(use_memory=lambda memory: None)
    older = PreviousLayout("job", "a", store, storage, Any, {"world_size": 1}, alone, "127.0.0.1", 5.0)
    older.discard()
    assert sorted(tried) == shares
    store.close()


def test_what_belongs_to_another_layout_keeps_its_memory_until_it_is_freed(tmp_path: Path) -> None:
    filled(tmp_path / "a", 0, SHARE).close()
    nbytes = Layout.of(FIELDS).nbytes
    store = MemoryStore(tmp_path / "a", "job", 0, [nbytes], is_foreign=lambda manifest: True)
    with store.reserve(SnapshotId(5, 0), Layout.of(FIELDS)) as writer:
        for field in FIELDS:
            writer.put(field.key, bytes(BLOCK))
        writer.seal(Facts("job"))
    with store.open(SHARE) as reader:
        assert not reader.verify()
    assert len(list(store.directory.glob("segment-*.bin"))) == 2
    store.free(SHARE)
    assert len(list(store.directory.glob("segment-*.bin"))) == 1
    store.close()
