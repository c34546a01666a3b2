"""Memory for snapshots and for what survivors keep: all ranks have both, or none keeps any."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Json, Layout, NoRoom, SnapshotId
from megatron.core.dist_checkpointing.moe.runtime import opening
from megatron.core.dist_checkpointing.moe.runtime.live_state import LiveState
from megatron.core.dist_checkpointing.moe.runtime.opening import JobPlaces, Leases, open_memories, parallel_layout
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo
from megatron.core.dist_checkpointing.moe.storage.lease import Holder, Lease
from megatron.core.dist_checkpointing.moe.storage.lease_files import FolderPlace
from megatron.core.dist_checkpointing.moe.types import Topology

PLACE = ProcessInfo(0, "node", "job")
SIZES = {"slot": [4096, 4096], "standby": [8192]}


class Two:
    """A transport between this rank and another one, of which it says how that fared: how many ranks failed, which,
    with what kind of error, and why."""

    rank = 0

    def __init__(self, *other: Json) -> None:
        self.other = msgspec.msgpack.encode(other)

    def merge(self, value: bytes, combine: Callable[[bytes, bytes], bytes]) -> bytes:
        return combine(value, self.other)

    def least(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)


WELL, FULL = Two(0, []), Two(1, [1], 0, "the memory is full")


def config(folder: Path) -> MoECheckpointConfig:
    return MoECheckpointConfig(strategy="sparse", memory_dir=str(folder))


def test_each_area_has_segments_of_its_own(tmp_path: Path) -> None:
    opened = open_memories(config(tmp_path), PLACE, SIZES, WELL)  # type: ignore[arg-type]
    assert {area: memory.directory.name for area, memory in opened.items()} == {
        "slot": "slot-000",
        "standby": "standby-000",
    }
    for memory in opened.values():
        memory.close()


def test_what_another_rank_cannot_have_is_given_back_here(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="rank 1: the memory is full"):
        open_memories(config(tmp_path), PLACE, SIZES, FULL)  # type: ignore[arg-type]
    assert not list(tmp_path.rglob("*-000"))


def test_snapshots_of_an_earlier_attempt_are_not_given_back_with_it(tmp_path: Path) -> None:
    opened = open_memories(config(tmp_path), PLACE, SIZES, WELL)  # type: ignore[arg-type]
    layout = Layout.of([Field("w", "uint8", (10,))])
    with opened["slot"].reserve(SnapshotId(4, 0), layout) as writer:
        writer.put("w", bytes(10))
        writer.seal(Facts("job"))
    for memory in opened.values():
        memory.close()
    with pytest.raises(NoRoom):
        open_memories(config(tmp_path), PLACE, SIZES, FULL)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.rglob("*-000")] == ["slot-000"]


def test_a_folder_that_is_named_in_two_ways_has_one_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(opening, "Lease", lambda where, *_: taken.append(where))
    monkeypatch.setattr(opening.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")

    def leases(save: str, persist_dir: str) -> list[str]:
        taken.clear()
        Leases(MoECheckpointConfig(strategy="full", persist_dir=persist_dir), save, PLACE, [])
        return taken

    for persist_dir in ("run", "run/", "./run", "link", str(tmp_path / "run")):
        assert leases("run", persist_dir) == ["run"]
    assert leases("s3://bucket/run", "s3://bucket/run/") == ["s3://bucket/run"]
    assert leases("run", "other") == ["other", "run"]


@pytest.fixture
def of_rank_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leases:
    """A folder of snapshots that its node has not got yet."""
    monkeypatch.setattr(opening.torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(opening, "SHARED_S", 0.0)
    return Leases(MoECheckpointConfig(strategy="full", persist_dir=str(tmp_path / "run")), None, PLACE, [])


def test_a_folder_that_nodes_share_is_found_though_one_sees_it_late(
    of_rank_1: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder.here("job")
    lease = Lease(str(tmp_path / "run"), holder)
    monkeypatch.setattr(opening, "SHARED_S", 60.0)
    monkeypatch.setattr(opening.time, "sleep", lambda _: lease.acquire())
    assert of_rank_1.acquire() == ""
    try:
        of_rank_1.find(holder.name)
        assert lease.name == holder.name
    finally:
        lease.release()


def test_a_folder_with_the_lease_of_another_start_is_not_that_of_rank_0(of_rank_1: Leases, tmp_path: Path) -> None:
    left = Lease(str(tmp_path / "run"), Holder.here("job"))
    left.acquire()
    left.leave()
    with pytest.raises(UsageError, match="is not the folder that rank 0 writes to"):
        of_rank_1.find(Holder.here("job").name)
    of_rank_1.find("")  # rank 0 could write none


def test_a_folder_that_cannot_be_read_now_is_not_called_another_one(
    of_rank_1: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(place: FolderPlace) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(FolderPlace, "read", read)
    with pytest.raises(StoreFailure, match="cannot be read: Stale file handle"):
        of_rank_1.find("name")


def test_a_layout_tells_apart_which_elements_ranks_step() -> None:
    class Other:
        def total(self, values: Sequence[int]) -> tuple[int, ...]:
            return tuple(value + (1 << 39) for value in values)

    def buckets(*keys: tuple[str, str]) -> str:
        tensors = [SimpleNamespace(key=f"{key}/{field}", field=field) for key, field in keys]
        state: Any = SimpleNamespace(_rank=0, live=SimpleNamespace(tensors=tensors))
        return LiveState.buckets(state, Other())  # type: ignore[arg-type]

    first = buckets(("w[0:4]", "master"), ("n[0:2]", "master"))
    assert first == buckets(("n[0:2]", "master"), ("w[0:4]", "exp_avg"), ("w[0:4]", "master"))
    assert first != buckets(("w[0:5]", "master"), ("n[0:2]", "master"))
    layout = parallel_layout(Topology(4, tp=2), "none", first)
    assert layout == dict(world_size=4, tp=2, pp=1, vpp=1, cp=1, ep=1, etp=2, buckets=first)


def test_nodes_and_units_of_a_job_are_told_by_runs_of_ranks() -> None:
    ranks = [(f"node-{rank // 4}", f"rack-{rank // 8}" if rank < 24 else "") for rank in range(32)]
    places = JobPlaces.of([*ranks[16:], *ranks[:16]])
    assert (len(places.places), places.runs) == (8, [(at, 4) for at in range(8)])
    assert places.nodes()[:2] == ("node-4", "node-5")
