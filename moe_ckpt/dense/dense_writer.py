"""Writes the shards and the index of a dense checkpoint, entry by entry."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
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

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.system import write_atomically

from .dcp_metadata import Chunk, ChunkExtent
from .dense import DenseCheckpoint, read_extent
from .names import FORMAT, INDEX

_DATA = "__0_0.distcp"


class DenseWriter:
    """One file with the bytes of all entries, and the index of torch.distributed.checkpoint for it."""

    def __init__(self, folder: Path, advance: Callable[[int], None]) -> None:
        self._path, self._advance = folder / _DATA, advance
        self._file: BinaryIO
        self._entries: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> DenseWriter:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Announce a tensor; again for each expert of a stacked one.

        Args:
            name: Name of the tensor in the index.
            shape: Shape of the whole tensor.
            dtype: Dtype of the tensor.
        """
        known = self._entries.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks=[])
        )
        if known.size != torch.Size(shape) or known.properties.dtype != dtype:
            raise UnreadableCheckpoint(f"{name} is {shape} {dtype} for one expert, {known.size} for another")

    def piece(self, name: str, chunk: Chunk, place: _StorageInfo) -> None:
        """Add a piece of an announced tensor to the index.

        Args:
            name: Name of the tensor in the index.
            chunk: Offsets and sizes of the piece in the tensor; its extent is not used.
            place: Where its bytes were written.
        """
        offsets = torch.Size(chunk.offsets)
        entry = self._entries[name]
        self._places[MetadataIndex(name, offsets, len(entry.chunks))] = place
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))

    def object(self, name: str, place: _StorageInfo) -> None:
        """Add an object to the index.

        Args:
            name: Name of the object in the index.
            place: Where its bytes were written.
        """
        self._entries[name] = BytesStorageMetadata()
        self._places[MetadataIndex(name)] = place

    def copied(self, part: DenseCheckpoint, extent: ChunkExtent, name: str) -> _StorageInfo:
        """Write bytes of another checkpoint unchanged. Returns their place.

        Args:
            part: The other checkpoint.
            extent: File in its folder, and range of bytes in it.
            name: Name of the entry in errors.
        """
        return self.put(read_extent(part.directory, extent, name))

    def saved(self, tensor: torch.Tensor) -> _StorageInfo:
        """A tensor as torch.distributed.checkpoint stores it."""
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return self.put(buffer.getvalue())

    def write_index(self, folder: Path) -> None:
        """Write the index and the mark of the format. Raises OSError."""
        index = Metadata(state_dict_metadata=self._entries, planner_data={}, storage_data=self._places)
        write_atomically(folder / INDEX, pickle.dumps(index))
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        marker |= {"common_backend": "torch", "common_backend_version": 1}
        write_atomically(folder / FORMAT, json.dumps(marker).encode())

    def put(self, content: bytes) -> _StorageInfo:
        """Bytes as they are."""
        place = _StorageInfo(_DATA, self._file.tell(), len(content))
        self._file.write(content)
        self._advance(len(content))
        return place
