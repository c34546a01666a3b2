"""Compares what is loaded with what was saved while it is read, so that each byte is read once.

torch reads the items of a checkpoint one by one through `FileSystemReader._slice_file` (checked: 2.13); in its place an
item is read whole, compared with its checksum, and only then handed on. The disk fetches the next item meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum
from moe_ckpt.dense.integrity import Damage
from moe_ckpt.dense.items import Extent

PROBE_BYTES, PROBE_BLOCK_BYTES = 64 << 20, 8 << 20

ItemsOfFiles: TypeAlias = Mapping[Path, Mapping[Extent, str]]
"""The checksums of items by the paths of their files."""


@dataclass
class Reads:
    """What one rank read, and compared as it did: bytes, and the seconds that took it."""

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class LoadReport:
    """How fast a checkpoint was loaded.

    Attributes:
        iteration: The one after which training stands.
        stored_bytes: Of all items in its files.
        read_bytes: Of all ranks together; what several ranks need, each of them reads.
        seconds: From the first byte to the last one on all ranks.
        disk_bytes_per_s: What the disk gives to one reader past the cache; None where that cannot be measured.
    """

    iteration: int
    stored_bytes: int
    read_bytes: int
    seconds: float
    disk_bytes_per_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Of all ranks together."""
        return self.read_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        times = self.read_bytes / self.stored_bytes if self.stored_bytes else 1.0
        disk = self.disk_bytes_per_s
        beside = "not measured here" if disk is None else f"{disk / 1e9:.2f} GB/s"
        return (
            f"read and verified {self.stored_bytes / 1e9:.3f} GB {times:.2f} times in {self.seconds:.2f} s,"
            f" {self.bytes_per_s / 1e9:.2f} GB/s; the disk alone: {beside}"
        )

    def to_data(self) -> dict[str, Any]:
        """For metrics."""
        return dataclasses.asdict(self) | {"bytes_per_s": self.bytes_per_s}


@contextlib.contextmanager
def verified_reads(items: ItemsOfFiles) -> Iterator[Reads]:
    """In this block items of these files are compared with their checksums as torch reads them.

    Reading raises UnreadableCheckpoint for an item that is not what was saved, or of which nothing is known.
    """
    known = {os.path.realpath(path): of for path, of in items.items()}
    slice_file, read_data = FileSystemReader._slice_file, FileSystemReader.read_data
    reads, following = Reads(), dict[tuple[str, int], Extent]()

    def in_order(reader: Any, plan: Any, planner: Any) -> Any:
        def place(item: Any) -> tuple[str, int, int]:
            at = reader.storage_data[item.storage_index]
            return str(at.relative_path), at.offset, at.length

        ordered = sorted(plan.items, key=place)
        for (name, offset, _), (other, *extent) in pairwise(map(place, ordered)):
            if name == other:
                following[os.path.realpath(os.path.join(reader.path, name)), offset] = (extent[0], extent[1])
        return read_data(reader, dataclasses.replace(plan, items=ordered), planner)

    def verified(reader: Any, file: IO[bytes], place: Any) -> IO[bytes]:
        path = os.path.realpath(file.name)
        if path not in known:
            unknown: IO[bytes] = slice_file(reader, file, place)
            return unknown
        began_s = time.monotonic()
        if (coming := following.get((path, place.offset))) is not None:
            os.posix_fadvise(file.fileno(), *coming, os.POSIX_FADV_WILLNEED)
        file.seek(place.offset)
        data = file.read(place.length)
        _require(Path(path), (place.offset, place.length), data, known[path])
        reads.nbytes += len(data)
        reads.seconds += time.monotonic() - began_s
        return io.BytesIO(data)

    try:
        FileSystemReader.read_data, FileSystemReader._slice_file = in_order, verified
        yield reads
    finally:
        FileSystemReader.read_data, FileSystemReader._slice_file = read_data, slice_file


def _require(path: Path, extent: Extent, data: bytes, sums: Mapping[Extent, str]) -> None:
    saved, found = sums.get(extent), checksum(data)
    if saved != found:
        place = f"bytes {extent[0]} to {extent[0] + extent[1]} with checksum"
        raise UnreadableCheckpoint(str(Damage(path, f"{place} {saved}", f"its {place} {found}")))


def report(iteration: int, items: ItemsOfFiles, reads: Reads, seconds: float) -> LoadReport:
    """Of all ranks; a collective over them."""
    stored = sum(nbytes for of in items.values() for _, nbytes in of)
    largest = max(items, key=_nbytes, default=None) if dist.get_rank() == 0 else None
    own = reads.nbytes, seconds, disk_bytes_per_s(largest) if largest is not None else None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return LoadReport(iteration, stored, sum(row[0] for row in found), max(row[1] for row in found), found[0][2])


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed since it was read, by whoever tidies up: no reason for this rank alone to fail
        return 0


def disk_bytes_per_s(path: Path) -> float | None:
    """What one reader gets of the begin of a file, past the cache; None where the file system has no such reads."""
    block = mmap.mmap(-1, PROBE_BLOCK_BYTES)  # aligned as O_DIRECT wants it
    nbytes, began_s = 0, time.monotonic()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while nbytes < PROBE_BYTES and (count := os.preadv(descriptor, [block], nbytes)):
                nbytes += count
                if count % mmap.PAGESIZE:
                    break
        finally:
            os.close(descriptor)
    except OSError:
        return None
    finally:
        block.close()
    return nbytes / (time.monotonic() - began_s)
