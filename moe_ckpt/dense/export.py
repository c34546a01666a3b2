"""Writes an ordinary complete `torch_dist` checkpoint from a partial iteration and those that it needs, offline."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.atomic import sync_directory, write_atomically
from megatron.core.dist_checkpointing.moe.types import OperatorId

from .chain import stacked_name, stacked_object_name
from .dcp_metadata import Chunk, ChunkExtent
from .dense import DenseCheckpoint, read_extent
from .integrity import damaged, seal, sums_of
from .merged import MergedCheckpoint, open_merged
from .names import COMMON, FORMAT, INDEX, TRACKER, new_iteration_folder

_DATA = "__0_0.distcp"

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Given the bytes that there are to do, a context with a function that takes bytes as they are done."""


def _unwatched(nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda done_bytes: None)


def export_merged(source: Path | str, target: Path | str, watch: Watch = _unwatched) -> Path:
    """Writes the merged checkpoint that `source` stands for into the folder `target`, and its tracker beside it.

    Memory is needed for one piece of a tensor at a time.

    Args:
        source: an iteration, or a `--save` directory, whose tracker then names it.
        watch: is called with the bytes that are to be compared with their checksums and written; what it yields is
            called with the bytes that are done.

    Returns:
        `target/iter_XXXXXXX`, published by one rename, with tensors named as in an iteration that was saved whole.

    Raises:
        UsageError: there is nothing to merge, or something is in the way.
        UnreadableCheckpoint: files have changed since they were saved, or as `open_merged`.
        OSError: `target` cannot be written.
    """
    merged = open_merged(source)
    if merged is None or merged.chain.is_complete:
        raise UsageError(f"{source} was saved whole, there is nothing to merge; use it as it is")
    root = Path(target)
    final = new_iteration_folder(root, merged.chain.iteration)
    sums = sums_of(merged.parts.values())
    with watch(sum(saved.nbytes for saved in sums.values()) + _entry_bytes(merged)) as advance:
        # What is written gets checksums of its own, so this is the last place where damage can be told.
        if damage := damaged(sums, advance):
            raise UnreadableCheckpoint(f"{damage[0]}; restore the file or take another iteration")
        staging = root / f".{final.name}.merging"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            _write(merged, staging, advance)
            os.rename(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    sync_directory(root)
    write_atomically(root / TRACKER, str(merged.chain.iteration).encode())
    return final


def _entry_bytes(merged: MergedCheckpoint) -> int:
    """Bytes of all tensors as they are stored, which is nearly everything."""
    of_experts = merged.experts[merged.chain.iteration].names
    chunks = [chunk for name, info in merged.newest.tensors.items() if name not in of_experts for chunk in info.chunks]
    for iteration, held in merged.experts.items():
        for operator in merged.chain.held_by(iteration):
            chunks += [chunk for tensor in held.tensors[operator].values() for chunk in tensor.stored]
    return sum(chunk.extent.length_bytes for chunk in chunks)


def _write(merged: MergedCheckpoint, folder: Path, advance: Callable[[int], None]) -> None:
    with _Writer(folder, advance) as writer:
        of_experts = merged.experts[merged.chain.iteration].names
        newest = merged.newest
        for name, info in newest.tensors.items():
            if name not in of_experts:
                writer.tensor(name, info.shape, info.dtype)
                for chunk in info.chunks:
                    writer.piece(name, chunk, writer.copied(newest, chunk.extent, name))
        for name, extent in newest.index.objects.items():
            if name not in of_experts:
                writer.object(name, writer.copied(newest, extent, name))
        for iteration in sorted(merged.chain.iterations):
            for operator in merged.chain.held_by(iteration):
                _write_expert(merged, operator, writer)
    common = newest.directory / COMMON
    if common.is_file():
        write_atomically(folder / COMMON, common.read_bytes())
    write_atomically(folder / INDEX, writer.index())
    marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    marker |= {"common_backend": "torch", "common_backend_version": 1}
    write_atomically(folder / FORMAT, json.dumps(marker).encode())
    seal(folder)


def _write_expert(merged: MergedCheckpoint, operator: OperatorId, writer: _Writer) -> None:
    chain, iteration = merged.chain, merged.chain.holder(operator)
    part, held = merged.parts[iteration], merged.experts[iteration]
    for common, tensor in held.tensors[operator].items():
        name = stacked_name(common, operator.layer, chain.stacked_layers)
        writer.tensor(name, (*chain.leading_axes, *tensor.shape), tensor.dtype)
        for piece, stored in merged.stacked_pieces(operator, tensor):
            if stored.sizes == piece.sizes:
                place = writer.copied(part, stored.extent, name)
            else:
                place = writer.saved(part.read_piece(name, tensor.dtype, stored).clone().reshape(piece.sizes))
            writer.piece(name, piece, place)
    for common, stored_name in held.objects.get(operator, {}).items():
        name = stacked_object_name(chain, common, operator)
        writer.object(name, writer.copied(part, part.index.objects[stored_name], name))


class _Writer:
    """One file with the bytes of all entries, and the index of torch.distributed.checkpoint for it."""

    def __init__(self, folder: Path, advance: Callable[[int], None]) -> None:
        self._path, self._advance = folder / _DATA, advance
        self._file: BinaryIO
        self._entries: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> _Writer:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Announce a tensor; again for each expert of a stacked one."""
        known = self._entries.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks=[])
        )
        if known.size != torch.Size(shape) or known.properties.dtype != dtype:
            raise UnreadableCheckpoint(f"{name} is {shape} {dtype} for one expert, {known.size} for another")

    def piece(self, name: str, chunk: Chunk, place: _StorageInfo) -> None:
        """A piece of an announced tensor, whose bytes are at `place`."""
        offsets = torch.Size(chunk.offsets)
        entry = self._entries[name]
        self._places[MetadataIndex(name, offsets, len(entry.chunks))] = place
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))

    def object(self, name: str, place: _StorageInfo) -> None:
        """An object, whose bytes are at `place`."""
        self._entries[name] = BytesStorageMetadata()
        self._places[MetadataIndex(name)] = place

    def copied(self, part: DenseCheckpoint, extent: ChunkExtent, name: str) -> _StorageInfo:
        """The bytes of another checkpoint as they are."""
        return self._put(read_extent(part.directory, extent, name))

    def saved(self, tensor: torch.Tensor) -> _StorageInfo:
        """A tensor as torch.distributed.checkpoint stores it."""
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return self._put(buffer.getvalue())

    def index(self) -> bytes:
        """The content of `.metadata`."""
        return pickle.dumps(Metadata(state_dict_metadata=self._entries, planner_data={}, storage_data=self._places))

    def _put(self, content: bytes) -> _StorageInfo:
        place = _StorageInfo(_DATA, self._file.tell(), len(content))
        self._file.write(content)
        self._advance(len(content))
        return place
