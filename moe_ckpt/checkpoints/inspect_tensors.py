"""Reports on single tensors: name, dtype, shape, and what their numbers look like; a block of one is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Reader, Record, SnapshotId
from megatron.core.dist_checkpointing.moe.types import STANDBY
from moe_ckpt.checkpoints.values import read_tensor
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.digest import state_entries
from moe_ckpt.report import Fact, Report, table
from moe_ckpt.report.progress import progress

from .records import batches

Open = Callable[[SnapshotId], Reader]
"""Opens one snapshot, wherever it lies."""

_COLUMNS = "tensor | dtype | shape | size:bytes | min:number | max:number | mean:number | std:number | non-finite:count"
_HELD_BYTES = 256_000_000
"""Snapshots in memory are release after so many bytes, so that a running job gets its segments back soon."""

_BLOCK = 1 << 22
"""Elements that are looked at together, so that a tensor takes little more memory than its own."""


def dense_tensors(folder: Path, pattern: str) -> Report:
    """Tensors of one dense checkpoint whose names match. Raises UnreadableCheckpoint, UsageError if none does.

    Args:
        folder: The folder of the iteration.
        pattern: A glob for names of tensors, in which case counts.
    """
    checkpoint = open_dense(folder)
    entries = (entry for entry in state_entries(checkpoint) if fnmatchcase(entry.name, pattern))
    chosen = sorted((entry.name, entry.tensor, entry.read) for entry in entries if entry.tensor is not None)
    sizes = [math.prod(tensor.shape) * tensor.dtype.itemsize for _, tensor, _ in chosen]
    with progress("reading tensors", sum(sizes)) as advance:
        rows = []
        for (name, tensor, read), nbytes in zip(chosen, sizes, strict=True):
            rows.append(_row(name, tensor.dtype, tensor.shape, read()))
            advance(nbytes)
    return _report(f"Tensors of {checkpoint.directory}", rows, pattern)


def snapshot_tensors(place: str, snapshots: Mapping[SnapshotId, Open], pattern: str) -> Report:
    """Tensors of these snapshots whose keys match. Raises UnreadableCheckpoint for bytes that are not as sealed.

    Args:
        place: The snapshots' place as the user gave it, for the title.
        snapshots: The snapshots to look at, each with the function that opens it.
        pattern: A glob for keys of records, in which case counts.
    """
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


def newest_iteration(found: Mapping[SnapshotId, Open]) -> dict[SnapshotId, Open]:
    """Those of the newest iteration, without logs and parked states if there is anything else.

    Raises UnreadableCheckpoint if nothing was found.
    """
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
    found, nbytes = statistics(blocks), math.prod(shape) * dtype.itemsize
    described = str(dtype).removeprefix("torch."), "x".join(map(str, shape)) or "scalar"
    return name, *described, nbytes, found.minimum, found.maximum, found.mean, found.std, found.non_finite


def _report(title: str, rows: Sequence[tuple[Any, ...]], pattern: str) -> Report:
    if not rows:
        raise UsageError(f"{title.removeprefix('Tensors of ')} has no tensor that matches {pattern!r}; try '*'")
    facts = (
        Fact("Tensors", len(rows), "count"),
        Fact("Bytes", sum(row[3] for row in rows), "bytes"),
        Fact("Tensors with non-finite numbers", sum(bool(row[8]) for row in rows), "count"),
    )
    return Report(title, facts, (table("Statistics", _COLUMNS, rows),))


@dataclass(frozen=True)
class Statistics:
    """Of the finite elements of a tensor, in double precision; None where there are none.

    std: standard deviation of the elements themselves (divided by their number). non_finite: infinities and NaN.
    Complex numbers count as their two parts.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    non_finite: int


def statistics(tensors: Iterable[torch.Tensor]) -> Statistics:
    """Look at every element of these tensors of any one dtype and any shapes, on the CPU."""
    count, mean, squares, non_finite = 0, 0.0, 0.0, 0
    minimum, maximum = math.inf, -math.inf
    for block in (block for tensor in tensors for block in _blocks(tensor)):
        finite = block[block.isfinite()]
        non_finite += block.numel() - finite.numel()
        if not finite.numel():
            continue
        # Means and squared deviations of two sets give those of their union (Chan, Golub, LeVeque 1979).
        own, block_mean = finite.numel(), finite.mean().item()
        apart = block_mean - mean
        squares += (finite - block_mean).square_().sum().item() + apart * apart * count * own / (count + own)
        mean += apart * own / (count + own)
        count += own
        minimum, maximum = min(minimum, finite.min().item()), max(maximum, finite.max().item())
    if not count:
        return Statistics(None, None, None, None, non_finite)
    return Statistics(minimum, maximum, mean, math.sqrt(squares / count), non_finite)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    for start in range(0, flat.numel(), _BLOCK):
        yield flat[start : start + _BLOCK].to(torch.float64)
