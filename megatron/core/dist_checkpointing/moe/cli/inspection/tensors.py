"""Reports on single tensors: name, dtype, shape, and what their numbers look like; a block of one is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch

from moe_ckpt.report import Columns, Fact, Report, Table
from moe_ckpt.report.progress import progress

from ...errors import UnreadableCheckpoint, UsageError
from ...examine.areas import slots
from ...examine.statistics import statistics
from ...examine.values import read_tensor
from ...examine.verification.snapshots import batches
from ...ports import Reader, Record, SnapshotId, Store
from ...store.dense import open_dense
from ...store.digest import state_entries
from ...types import STANDBY

Open = Callable[[SnapshotId], Reader]
"""Opens one snapshot, wherever it lies."""

_COLUMNS: Columns = (
    *(("tensor", "text"), ("dtype", "text"), ("shape", "text"), ("size", "bytes"), ("min", "number")),
    *(("max", "number"), ("mean", "number"), ("std", "number"), ("non-finite", "count")),
)
_HELD_BYTES = 256_000_000
"""Snapshots in memory are let go of after so many bytes, so that a running job gets its segments back soon."""


def dense_tensors(folder: Path, pattern: str) -> Report:
    """Tensors of one dense checkpoint whose names match. Raises UnreadableCheckpoint, UsageError if none does."""
    checkpoint = open_dense(folder)
    chosen = [one for one in state_entries(checkpoint) if one.tensor is not None and fnmatchcase(one.name, pattern)]
    sizes = [prod(one.tensor.shape) * one.tensor.dtype.itemsize for one in chosen if one.tensor is not None]
    with progress("reading tensors", sum(sizes)) as advance:
        rows = []
        for entry, nbytes in sorted(zip(chosen, sizes, strict=True), key=lambda one: one[0].name):
            assert entry.tensor is not None
            rows.append(_row(entry.name, entry.tensor.dtype, entry.tensor.shape, entry.read()))
            advance(nbytes)
    return _report(f"Tensors of {checkpoint.directory}", rows, pattern)


def snapshot_tensors(place: str, snapshots: Mapping[SnapshotId, Open], pattern: str) -> Report:
    """Tensors of these snapshots whose keys match. Raises UnreadableCheckpoint for bytes that are not as sealed."""
    chosen = {snapshot: _matching(open_, snapshot, pattern) for snapshot, open_ in snapshots.items()}
    rows: list[tuple[Any, ...]] = []
    with progress("reading tensors", sum(record.nbytes for found in chosen.values() for record in found)) as advance:
        for snapshot, found in chosen.items():
            prefix = f"rank {snapshot.rank}: " if len(snapshots) > 1 else ""
            for batch in batches(found, _HELD_BYTES):
                with snapshots[snapshot](snapshot) as reader:
                    for record in batch:
                        tensor = read_tensor(reader, record)
                        rows.append(_row(prefix + record.key, tensor.dtype, tensor.shape, [tensor]))
                        advance(record.nbytes)
    iterations = sorted({snapshot.iteration for snapshot in snapshots})
    return _report(f"Tensors of {place} after iteration {', '.join(map(str, iterations))}", rows, pattern)


def newest_in_storage(store: Store) -> dict[SnapshotId, Open]:
    """The snapshots of the newest iteration that is there. Raises UnreadableCheckpoint if nothing is."""
    return _newest({snapshot: store.open for snapshot in store.snapshots().sealed})


def newest_in_memory(folder: Path) -> dict[SnapshotId, Open]:
    """As `newest_in_storage`, of all slots below a folder; one copy of each."""
    shelves = [slot.shelf for slot in slots(folder)]
    return _newest({snapshot: shelf.open for shelf in shelves for snapshot in shelf.snapshots().sealed})


def _newest(found: Mapping[SnapshotId, Open]) -> dict[SnapshotId, Open]:
    if not found:
        raise UnreadableCheckpoint(
            "no snapshot is sealed here: there are no tensors to look at; moe-ckpt inspect says why"
        )
    states = sorted(snapshot for snapshot in found if snapshot.kind not in STANDBY) or sorted(found)
    return {snapshot: found[snapshot] for snapshot in states if snapshot.iteration == states[-1].iteration}


def _matching(open_: Open, snapshot: SnapshotId, pattern: str) -> list[Record]:
    with open_(snapshot) as reader:
        return [record for record in reader.manifest.records if fnmatchcase(record.key, pattern)]


def _row(name: str, dtype: torch.dtype, shape: Sequence[int], blocks: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    found, nbytes = statistics(blocks), prod(shape) * dtype.itemsize
    said = str(dtype).removeprefix("torch."), "x".join(map(str, shape)) or "scalar"
    return name, *said, nbytes, found.minimum, found.maximum, found.mean, found.std, found.non_finite


def _report(title: str, rows: Sequence[tuple[Any, ...]], pattern: str) -> Report:
    if not rows:
        raise UsageError(f"{title.removeprefix('Tensors of ')} has no tensor that matches {pattern!r}; try '*'")
    facts = (
        Fact("Tensors", len(rows), "count"),
        Fact("Bytes", sum(row[3] for row in rows), "bytes"),
        Fact("Tensors with non-finite numbers", sum(bool(row[8]) for row in rows), "count"),
    )
    return Report(title, facts, (Table("Statistics", _COLUMNS, tuple(rows)),))
