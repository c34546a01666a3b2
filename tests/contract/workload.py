"""Snapshots with known bytes, and a seeded sequence of everything that can be done with a store."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from simulated_world.memory import Memory
from simulated_world.storage import FakeStore

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, NoRoom, SnapshotId, StoreFailure
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.objects import ObjectStore
from megatron.core.dist_checkpointing.moe.storage.system import OperatingSystem
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, Part, expert

SEGMENTS = (4096,) * 3
JOB, RANK = "job-7", 3

LAYOUT = Layout.of(
    [
        Field("embedding.weight", "bfloat16", (9, 8), Part.COMPUTE, OperatorId(-1, OperatorKind.EMBEDDING)),
        Field("layers.0.experts.5.weight/exp_avg", "float32", (7, 31), Part.MOMENTS, expert(0, 5)),
        Field("layers.0.experts.6.weight/exp_avg", "float32", (0, 31), Part.MOMENTS, expert(0, 6)),
        Field("step", "int64", ()),
        Field("rng", "uint8", (1201,)),
    ]
)
FACTS = Facts(
    JOB, "9f" * 16, {"world_size": 8, "ep": 4}, {"consumed_samples": 96, "grad_norm": float("inf"), "lr": 0.1}
)


def new_store(kind: str, place: Path, system: OperatingSystem | None = None, segments: Sequence[int] = SEGMENTS) -> Any:
    """A store of one of the kinds below `place`."""
    if kind.startswith("simulated"):
        return FakeStore(simulated_memory(place), RANK, segments if kind == "simulated memory" else None)
    if kind == "memory":
        return MemoryStore(place, JOB, RANK, segments, system=system)
    if kind == "filesystem":
        return FilesystemStore(place / "disk", RANK, system=system)
    return ObjectStore(f"memory://{place}" if kind == "objects" else f"file://{place}/objects", RANK)


@cache
def simulated_memory(place: Path) -> Memory:
    """What a simulated node keeps, one for each place."""
    return Memory()


def content(snapshot: SnapshotId, version: int = 0, layout: Layout = LAYOUT) -> dict[str, bytes]:
    """The bytes of each record, different for each snapshot and version."""
    source = np.random.default_rng([snapshot.iteration, snapshot.rank, version])
    return {field.key: source.bytes(field.nbytes) for field in layout.fields}


def write(store: Any, snapshot: SnapshotId, version: int = 0, layout: Layout = LAYOUT) -> Any:
    """Reserve, put every record, seal; returns the manifest."""
    with store.reserve(snapshot, layout) as writer:
        for key, data in content(snapshot, version, layout).items():
            writer.put(key, data)
        return writer.seal(FACTS)


def read(store: Any, snapshot: SnapshotId) -> dict[str, bytes]:
    """All records of a sealed snapshot."""
    with store.open(snapshot) as reader:
        return {record.key: bytes(reader.read(record.key)) for record in reader.manifest.records}


def operations(seed: int) -> Iterator[tuple[str, SnapshotId, int]]:
    """A seeded sequence of things to do: what, to which snapshot, and with which version of its bytes."""
    source = random.Random(seed)
    for version in range(9):
        snapshot = SnapshotId(source.randrange(3), RANK)
        yield "free", snapshot, version
        yield source.choice(("write", "write", "write", "abandon", "sweep", "read", "list")), snapshot, version
    yield "write", SnapshotId(9, RANK), 99


def perform(store: Any, what: str, snapshot: SnapshotId, version: int) -> None:
    """One operation. Raises what the store raises."""
    if what == "write":
        write(store, snapshot, version)
    elif what == "abandon":
        with store.reserve(snapshot, LAYOUT) as writer:
            writer.put("step", content(snapshot, version)["step"])
    elif what == "free":
        store.free(snapshot)
    elif what == "sweep":
        store.sweep()
    elif what == "list":
        store.snapshots()
    elif snapshot in store.snapshots().sealed:
        read(store, snapshot)


class Expected:
    """What may and what must be in a store, from a journal of what was begun and what was done."""

    def __init__(self) -> None:
        self.must: dict[SnapshotId, int] = {}
        self.may: dict[SnapshotId, set[int]] = {}

    def begun(self, what: str, snapshot: SnapshotId, version: int) -> None:
        if what == "write":
            self.may.setdefault(snapshot, set()).add(version)
        elif what == "free":
            self.must.pop(snapshot, None)

    def done(self, what: str, snapshot: SnapshotId, version: int) -> None:
        if what == "write":
            self.must[snapshot] = version
            self.may[snapshot] = {version}
        elif what == "free":
            self.may.pop(snapshot, None)

    def compare(self, store: Any) -> None:
        """Everything sealed is complete and bit-equal to what was written; nothing acknowledged is gone."""
        sealed = store.snapshots().sealed
        for snapshot in sealed:
            found = read(store, snapshot)
            versions = {self.must[snapshot]} if snapshot in self.must else self.may.get(snapshot, set())
            assert found in [content(snapshot, version) for version in versions], f"wrong bytes in the {snapshot}"
        assert not set(self.must) - set(sealed), "a sealed snapshot is gone"


REFUSALS = (StoreFailure, NoRoom, UnreadableCheckpoint, UsageError)


def run(store: Any, seed: int, journal: Any) -> None:
    """All operations of a seed; `journal(event, *operation)` is told before and after each that succeeded."""
    for operation in operations(seed):
        journal("begun", *operation)
        try:
            perform(store, *operation)
        except REFUSALS:
            continue
        journal("done", *operation)
