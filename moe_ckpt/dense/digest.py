"""One xxh3 digest per component of a dense checkpoint, independent of how its files are laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import xxhash

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

from .canonical import Sink, encoded, feed, feed_blocks, leaves
from .components import (
    COMMON_RULES,
    LEFT_OUT,
    OBJECT_RULES,
    TENSOR_RULES,
    ComponentSlice,
    component_of,
    in_order,
    is_bucket,
    padding_spans,
)
from .dcp_metadata import TensorInfo
from .dense import DenseCheckpoint


@dataclass(frozen=True)
class ComponentDigest:
    """The xxh3_128 of one component (hexadecimal), how many entries it has, and how many bytes their values took."""

    component: str
    digest: str
    entries: int
    value_bytes: int


@dataclass(frozen=True)
class DigestEntry:
    """One named value of a checkpoint, and the component that it belongs to.

    tensor: what it is, None for no tensor. read: the value; of a tensor its blocks, as `DenseCheckpoint.read_blocks`.
    """

    component: str
    name: str
    tensor: TensorInfo | None
    read: Callable[[], Any]


def state_entries(checkpoint: DenseCheckpoint) -> Iterator[DigestEntry]:
    """All that belongs to the training state of `checkpoint`: tensors, other objects, the parts common to all ranks.

    Tensors are read with the alignment padding between parameters cleared, which Megatron-Core never initialises.
    Reading raises UnreadableCheckpoint.
    """
    return (entry for entry in _all_entries(checkpoint) if entry.component != LEFT_OUT)


def _all_entries(checkpoint: DenseCheckpoint) -> Iterator[DigestEntry]:
    for name, info in checkpoint.tensors.items():
        yield DigestEntry(component_of(name, TENSOR_RULES), name, info, partial(_read_blocks, checkpoint, name))
    for name in checkpoint.objects:
        yield DigestEntry(component_of(name, OBJECT_RULES), name, None, partial(checkpoint.read_object, name))
    try:
        for name, value in leaves(dict(checkpoint.common)):
            yield DigestEntry(component_of(name, COMMON_RULES), name, None, partial(_given, value))
    except RecursionError as error:
        raise UnreadableCheckpoint(f"the common part of {checkpoint.directory} is nested without end") from error


def _given(value: Any) -> Any:
    return value


def digest_components(checkpoint: DenseCheckpoint) -> tuple[ComponentDigest, ...]:
    """Returns the digests of the components of `checkpoint`, in a fixed order, holding one block of a tensor in memory.

    Raises UnreadableCheckpoint when something cannot be read, or is an object of a type whose content is not defined.
    """
    entries: dict[str, list[DigestEntry]] = defaultdict(list)
    for entry in state_entries(checkpoint):
        entries[entry.component].append(entry)
    return tuple(_digest(component, entries[component]) for component in in_order(tuple(entries)))


def total_digest(components: tuple[ComponentDigest, ...]) -> ComponentDigest:
    """Returns the digest over the names and digests of `components`, called `total`."""
    hasher = xxhash.xxh3_128()
    for part in components:
        hasher.update(f"{part.component}\0{part.digest}\n".encode())
    entries = sum(part.entries for part in components)
    return ComponentDigest("total", hasher.hexdigest(), entries, sum(part.value_bytes for part in components))


def _digest(component: str, entries: list[DigestEntry]) -> ComponentDigest:
    hasher = xxhash.xxh3_128()
    value_bytes = 0
    for entry in sorted(entries, key=lambda entry: entry.name):
        feed(hasher, entry.name)
        value_bytes += _feed_entry(hasher, entry)
    return ComponentDigest(component, hasher.hexdigest(), len(entries), value_bytes)


def _feed_entry(sink: Sink, entry: DigestEntry) -> int:
    """Feeds the value and returns how many bytes it took."""
    if entry.tensor is not None:
        feed_blocks(sink, entry.tensor.dtype, entry.tensor.shape, entry.read())
        return int(prod(entry.tensor.shape) * entry.tensor.dtype.itemsize)
    try:
        encoding = encoded(entry.read())
    except (TypeError, RecursionError) as error:
        raise UnreadableCheckpoint(
            f"{entry.name} cannot be hashed ({error}); save it as numbers, strings, tensors and containers of these"
        ) from error
    sink.update(encoding)
    return len(encoding)


def _read_blocks(checkpoint: DenseCheckpoint, name: str) -> Iterator[torch.Tensor]:
    read = checkpoint.read_blocks(name)
    return _without_padding(read, checkpoint, name) if is_bucket(name) else read


def _without_padding(bucket: Iterator[torch.Tensor], checkpoint: DenseCheckpoint, name: str) -> Iterator[torch.Tensor]:
    pieces = [
        ComponentSlice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0], _writer(chunk.extent.file))
        for chunk in checkpoint.tensors[name].chunks
    ]
    spans, first = padding_spans(pieces), 0
    for block in bucket:
        for start, stop in spans:
            block[max(start - first, 0) : max(stop - first, 0)] = 0
        first += len(block)
        yield block


def _writer(file: str) -> str:
    # __<rank>_<thread>.distcp: one rank writes several files.
    return file.rsplit("_", maxsplit=1)[0]
