"""Reads the index (`.metadata`) of a torch.distributed.checkpoint without running anything that is in it."""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import combinations
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

_DCP = "torch.distributed.checkpoint"

# Classes of the index, by module. They are read as inert records, never as the real classes, so that a crafted file can
# neither call nor change anything outside the values that are being read.
_RECORDS = {
    f"{_DCP}.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    # Megatron-Core keeps the save plans of all ranks in the index.
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    # Where older releases of torch kept the same classes.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "pathlib": ("PosixPath",),
}


@dataclass(frozen=True)
class ChunkExtent:
    """A range of bytes of one file of the checkpoint; `file` is relative to its directory."""

    file: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: where it lies in the tensor (elements per axis) and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: ChunkExtent


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the checkpoint: its global shape, its dtype, and the pieces it is stored in, by offset."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds: tensors, and serialized objects, by name."""

    tensors: dict[str, TensorInfo]
    objects: dict[str, ChunkExtent]


class _PickledClass:
    """Holds what the pickle says about one object."""

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(BytesIO(data))
        self._names, self._left = _allowed_names(), len(data)
        self._names["torch", "Size"] = partial(self._copied, tuple)
        self._names["collections", "OrderedDict"] = partial(self._copied, dict)

    def _copied(self, kind: Callable[..., Any], *given: Any) -> Any:
        """As `kind`; each element of an index stands in it once: copies of others are none of its own."""
        self._left -= sum(map(len, given))
        if self._left < 0:
            raise UnreadableCheckpoint(
                "the index (.metadata) copies more than is in it: it is damaged, or made to fill the memory; take"
                " another iteration"
            )
        return kind(*given)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return self._names[module, name]
        except KeyError:
            raise UnreadableCheckpoint(
                f"the index (.metadata) names {module}.{name}, which no checkpoint index contains; it was not run: "
                "do not load this checkpoint with other tools unless you know who wrote it"
            ) from None


def _allowed_names() -> dict[tuple[str, str], Callable[..., Any]]:
    # Made again for each file: what a file does to these classes ends with it.
    names: dict[tuple[str, str], Callable[..., Any]] = {
        (module, name): type(name, (_PickledClass,), {}) for module, found in _RECORDS.items() for name in found
    }
    names["torch.serialization", "_get_layout"] = lambda name: name
    # Some releases of Python 3.11 pickle enum members as getattr(class, name).
    names["builtins", "getattr"] = lambda owner, name: _PickledClass(owner, name)
    return names


def _refuse_huge_memo(data: bytes) -> None:
    """A few bytes can have pickle make room for 2^32 remembered objects. Raises UnreadableCheckpoint, ValueError."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(data):
            raise UnreadableCheckpoint(
                f"the index (.metadata) remembers object {argument} in {len(data)} bytes: it is damaged, or made to"
                " fill the memory; take another iteration"
            )


def parse_index(data: bytes) -> CheckpointIndex:
    """Reads the bytes of a `.metadata` file.

    Raises UnreadableCheckpoint when they are not an index, or name anything that an index does not contain.
    """
    try:
        _refuse_huge_memo(data)
        metadata = _IndexUnpickler(data).load()
        where = {(key.fqn, _offset(key)): _extent(info) for key, info in metadata.storage_data.items()}
        entries = dict(metadata.state_dict_metadata)
    except UnreadableCheckpoint:
        raise
    except Exception as error:
        said = " ".join(str(error).split())  # some of pickle's own take several lines
        raise UnreadableCheckpoint(
            f"the index (.metadata) is damaged or is not one of torch.distributed.checkpoint ({said}); take another"
            " iteration"
        ) from error
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, ChunkExtent] = {}
    for name, entry in entries.items():
        try:
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor_info(name, entry, where)
            else:
                objects[name] = where[name, None]
        except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
            raise UnreadableCheckpoint(
                f"the index (.metadata) does not say where {name} is stored ({error!r}); take another iteration"
            ) from error
    return CheckpointIndex(tensors, objects)


def _offset(key: Any) -> tuple[int, ...] | None:
    offset = key.__dict__.get("offset")
    return None if offset is None else tuple(offset)


def _extent(info: Any) -> ChunkExtent:
    if info.__dict__.get("transform_descriptors"):
        raise UnreadableCheckpoint(
            f"{info.relative_path} is compressed or encrypted by a stream transform ({info.transform_descriptors}), "
            "which is not supported; save the checkpoint without it"
        )
    place = (info.offset, info.length)
    if not isinstance(info.relative_path, str) or not all(type(value) is int and value >= 0 for value in place):
        raise ValueError(f"bad location {info.__dict__}")
    if re.fullmatch(r"[^/\\\0]+", info.relative_path) is None or info.relative_path in (".", ".."):
        raise UnreadableCheckpoint(
            f"the index (.metadata) points outside the checkpoint, at {info.relative_path!r}; do not trust it"
        )
    return ChunkExtent(info.relative_path, info.offset, info.length)


def _tensor_info(name: str, entry: Any, where: dict[tuple[str, tuple[int, ...] | None], ChunkExtent]) -> TensorInfo:
    shape = tuple(entry.size)
    chunks = {
        tuple(chunk.offsets): Chunk(tuple(chunk.offsets), tuple(chunk.sizes), where[name, tuple(chunk.offsets)])
        for chunk in entry.chunks
    }
    numbers = (*shape, *(value for chunk in chunks.values() for value in (*chunk.offsets, *chunk.sizes)))
    if any(type(value) is not int or value < 0 for value in numbers):
        raise ValueError("its shape, or that of a piece, is none")
    for chunk in chunks.values():
        axes = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(offset + size > length for offset, size, length in axes):
            raise ValueError(f"piece at {chunk.offsets} of {chunk.sizes} lies outside {shape}")
    covered = sum(math.prod(chunk.sizes) for chunk in chunks.values())
    if covered != math.prod(shape):
        raise UnreadableCheckpoint(
            f"the pieces of {name} cover {covered} of its {math.prod(shape)} elements: some rank's part was not saved; "
            "take another iteration"
        )
    if (pair := _overlapping(list(chunks.values()), len(shape))) is not None:
        raise UnreadableCheckpoint(
            f"the pieces of {name} at {pair[0].offsets} and {pair[1].offsets} overlap, so that others are missing: the"
            " index (.metadata) is damaged; take another iteration"
        )
    properties = entry.properties.__dict__
    dtype = properties["dtype"] if "dtype" in properties else properties["state"][0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is not a dtype")
    return TensorInfo(shape, dtype, tuple(chunks[offset] for offset in sorted(chunks)))


def _overlapping(chunks: list[Chunk], axes: int) -> tuple[Chunk, Chunk] | None:
    """Two pieces of a tensor that have an element in common."""
    todo = [[chunk for chunk in chunks if math.prod(chunk.sizes)]]
    while todo:
        some = todo.pop()
        apart = next((groups for axis in range(axes) if len(groups := _groups(some, axis)) > 1), None)
        if apart is not None:
            todo += apart
        elif len(some) > 1:  # no axis tells them apart: rare, unless they do overlap
            for pair in combinations(some, 2):
                if all(len(_groups(list(pair), axis)) == 1 for axis in range(axes)):
                    return pair
    return None


def _groups(chunks: list[Chunk], axis: int) -> list[list[Chunk]]:
    """Groups of pieces that have no index of this axis in common with those of another group."""
    groups: list[list[Chunk]] = []
    stop = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        if not groups or chunk.offsets[axis] >= stop:
            groups.append([])
        groups[-1].append(chunk)
        stop = max(stop, chunk.offsets[axis] + chunk.sizes[axis])
    return groups
