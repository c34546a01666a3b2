"""Reads an ordinary Megatron-Core `torch_dist` checkpoint in one process, tensor by tensor, safely."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.small_files import open_regular

from .blocks import BLOCK_ELEMENTS, Placed, blocks
from .dcp_metadata import CheckpointIndex, Chunk, ChunkExtent, TensorInfo, parse_index
from .names import COMMON, FORMAT, INDEX, INDEX_BYTES, INFORMING_BYTES, TRACKER, read_beside, read_tracker
from .safe_load import load_torch_bytes

# Since Megatron-Core 0.17 what was common.pt is an object of the sharded files.
COMMON_OBJECT = "common_state/shard_0_1"

_SHARDED_OBJECT = re.compile(r".+/shard_[\d.]+_[\d.]+")


@dataclass(frozen=True)
class DenseCheckpoint:
    """One iteration of a checkpoint. Nothing but the index and `common` is held in memory.

    `tensors`: every tensor by its name in the file. `objects`: names of the other saved objects (RNG states, optimizer
    scalars of `dp_reshardable`, extra states). `common`: the part that is the same on all ranks (arguments, iteration,
    scheduler, optimizer param groups).
    """

    directory: Path
    tensors: Mapping[str, TensorInfo]
    objects: tuple[str, ...]
    common: Mapping[str, Any]
    index: CheckpointIndex

    def read_blocks(self, name: str, most: int = BLOCK_ELEMENTS) -> Iterator[torch.Tensor]:
        """The elements of a tensor on the CPU, in row-major order, in flat blocks.

        Args:
            name: Name of the tensor in the index.
            most: Most elements of a block.
        """
        info = self.tensors[name]
        pieces = [
            Placed(chunk.offsets, chunk.sizes, partial(self.read_piece, name, info.dtype, chunk))
            for chunk in info.chunks
        ]
        return blocks(info.shape, info.dtype, pieces, most)

    def read_object(self, name: str) -> Any:
        """Returns the object `name`. Raises KeyError if there is none, UnreadableCheckpoint if it cannot be read."""
        extent = self.index.objects[name]
        value = load_torch_bytes(read_extent(self.directory, extent, name), f"{name} in {extent.file}")
        # Megatron-Core writes each sharded object as a list of what was given under its name.
        if _SHARDED_OBJECT.fullmatch(name) and isinstance(value, list) and len(value) == 1:
            return value[0]
        return value

    def read_piece(self, name: str, dtype: torch.dtype, chunk: Chunk) -> torch.Tensor:
        """Returns one piece of a tensor, on the CPU.

        Raises UnreadableCheckpoint when it cannot be read, or has another dtype or shape.

        Args:
            name: Name of the tensor in the index.
            dtype: Dtype of the tensor by the index.
            chunk: Shape of the piece by the index, and the place of its bytes.
        """
        what = f"{name} in {chunk.extent.file}"
        piece = load_torch_bytes(read_extent(self.directory, chunk.extent, name), what)
        if not isinstance(piece, torch.Tensor) or piece.dtype != dtype or tuple(piece.shape) != chunk.sizes:
            found = f"{piece.dtype} {tuple(piece.shape)}" if isinstance(piece, torch.Tensor) else type(piece).__name__
            raise UnreadableCheckpoint(
                f"{what} is {found}, the index says {dtype} {chunk.sizes}: the files are not of one save; "
                "take another iteration"
            )
        return piece.detach()


def open_dense(directory: Path | str) -> DenseCheckpoint:
    """Opens an `iter_XXXXXXX` directory, or a `--save` directory, whose tracker file then names the iteration.

    Reads the index and the common part and checks that every file is there in full length.
    Raises UnreadableCheckpoint saying what is wrong and what to do.
    """
    directory = resolve_iteration(Path(directory))
    try:
        index = require_complete(directory)
        common = _read_common(directory, index)
    except OSError as error:
        raise UnreadableCheckpoint(f"{directory} cannot be read: {error}; take another iteration") from error
    objects = tuple(sorted(name for name in index.objects if name != COMMON_OBJECT))
    return DenseCheckpoint(directory, index.tensors, objects, common, index)


def require_complete(directory: Path) -> CheckpointIndex:
    """Returns the index of an iteration of which every file is there in full length; nothing else is read.

    Raises UnreadableCheckpoint saying what is wrong and what to do, OSError.
    """
    _check_format(directory)
    index = parse_index(read_beside(directory / INDEX, INDEX_BYTES))
    _check_files(directory, index)
    return index


def resolve_iteration(directory: Path) -> Path:
    """Returns `directory`, or the iteration its tracker file names. Raises UnreadableCheckpoint if there is none."""
    try:
        return _resolved(directory)
    except OSError as error:
        raise UnreadableCheckpoint(f"{directory} cannot be read: {error}; take another iteration") from error


def _resolved(directory: Path) -> Path:
    if not directory.is_dir():
        raise UnreadableCheckpoint(f"{directory} is not a directory; give an iter_XXXXXXX or a --save directory")
    try:
        named = None if (directory / INDEX).exists() else read_tracker(directory)
    except UnreadableCheckpoint as error:
        raise UnreadableCheckpoint(f"{error}; give one of the iter_ directories instead") from error
    if named is None:
        return directory
    iteration = directory / named
    if not iteration.is_dir():
        there = ", ".join(sorted(path.name for path in directory.glob("iter_*"))[-3:]) or "no iteration"
        raise UnreadableCheckpoint(
            f"{directory / TRACKER} names {iteration.name}, which is missing (there: {there}); give one that is there"
        )
    return iteration


def _check_format(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    if not names:
        raise UnreadableCheckpoint(f"{directory} is empty; give an iter_XXXXXXX or a --save directory")
    saved = any(name.endswith(".distcp") for name in names)
    if INDEX not in names and FORMAT not in names and not saved and COMMON not in names:
        raise UnreadableCheckpoint(
            f"{directory} holds no torch_dist checkpoint (it has neither {INDEX} nor {TRACKER}); "
            "give an iter_XXXXXXX or a --save directory, saved with --ckpt-format torch_dist"
        )
    if FORMAT in names:
        backend = _backend(directory / FORMAT)
        if backend != "torch_dist":
            raise UnreadableCheckpoint(
                f"{directory} is saved in the format {backend!r}, only torch_dist can be read; save it so"
            )
    for needed in (INDEX, FORMAT):
        if needed not in names:
            raise UnreadableCheckpoint(
                f"{directory} has no {needed}: its save did not finish or files were removed; take another iteration"
            )


def _backend(path: Path) -> object:
    try:
        return json.loads(read_beside(path, INFORMING_BYTES))["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise UnreadableCheckpoint(f"{path} is damaged ({error!r:.120}); take another iteration") from error


def _check_files(directory: Path, index: CheckpointIndex) -> None:
    chunks = [(name, chunk.extent) for name, info in index.tensors.items() for chunk in info.chunks]
    sizes: dict[str, int] = {}
    for name, extent in chunks + list(index.objects.items()):
        path = directory / extent.file
        if extent.file not in sizes:
            if not path.is_file():
                raise UnreadableCheckpoint(f"{path}, which holds {name}, is missing; take another iteration")
            sizes[extent.file] = path.stat().st_size
        end_bytes = extent.offset_bytes + extent.length_bytes
        if end_bytes > sizes[extent.file]:
            raise UnreadableCheckpoint(
                f"{path} is cut short: {sizes[extent.file]} bytes, but {name} ends at byte {end_bytes}; "
                "take another iteration"
            )


def _read_common(directory: Path, index: CheckpointIndex) -> dict[str, Any]:
    path = directory / COMMON
    if os.path.lexists(path):
        common = load_torch_bytes(read_beside(path, INDEX_BYTES), str(path))
    elif COMMON_OBJECT in index.objects:
        extent = index.objects[COMMON_OBJECT]
        loaded = load_torch_bytes(read_extent(directory, extent, COMMON_OBJECT), f"{COMMON_OBJECT} in {extent.file}")
        common = loaded[0] if isinstance(loaded, list) and len(loaded) == 1 else loaded
    else:
        raise UnreadableCheckpoint(
            f"{directory} has neither {COMMON} nor an object {COMMON_OBJECT}: it is incomplete; take another iteration"
        )
    if not isinstance(common, dict):
        raise UnreadableCheckpoint(
            f"the common part of {directory} is a {type(common).__name__}, not a dict; take another iteration"
        )
    return common


def read_extent(directory: Path, extent: ChunkExtent, name: str) -> bytes:
    """The bytes of an entry. Raises UnreadableCheckpoint.

    Args:
        directory: The folder of the iteration.
        extent: File in this folder, and range of bytes in it.
        name: Name of the entry in errors.
    """
    path = directory / extent.file
    try:
        with open_regular(path, through_links=True) as file:
            file.seek(extent.offset_bytes)
            data = file.read(extent.length_bytes)
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or f"{extent.length_bytes} bytes are more than there is memory for"
        raise UnreadableCheckpoint(f"{path}, which holds {name}, cannot be read ({why})") from error
    if len(data) != extent.length_bytes:
        raise UnreadableCheckpoint(f"{path} ended {extent.length_bytes - len(data)} bytes early while reading {name}")
    return data
