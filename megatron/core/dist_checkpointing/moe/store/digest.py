"""One xxh3 digest per component of a dense checkpoint, independent of how its files are laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ..errors import UnreadableCheckpoint
from .canonical import Sink, feed, feed_tensor, leaves
from .components import (
    COMMON_RULES,
    LEFT_OUT,
    OBJECT_RULES,
    TENSOR_RULES,
    Piece,
    component_of,
    in_order,
    is_bucket,
    padding_spans,
)
from .dense import DenseCheckpoint


@dataclass(frozen=True)
class ComponentDigest:
    """The xxh3_128 of one component (hexadecimal), how many entries it has, and how many bytes their values took."""

    component: str
    digest: str
    entries: int
    value_bytes: int


# Feeds a value to a hasher and returns how many bytes the value took.
_Feeder = Callable[[Sink], int]


class _CountingSink:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.count_bytes = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._sink.update(data)
        self.count_bytes += len(data)


def digest_components(checkpoint: DenseCheckpoint) -> tuple[ComponentDigest, ...]:
    """Returns the digests of the components of `checkpoint`, in a fixed order, holding one tensor at a time in memory.

    Raises UnreadableCheckpoint when something cannot be read, or is an object of a type whose content is not defined.
    """
    entries: dict[str, list[tuple[str, _Feeder]]] = defaultdict(list)
    for name in checkpoint.tensors:
        entries[component_of(name, TENSOR_RULES)].append((name, _tensor_feeder(checkpoint, name)))
    for name in checkpoint.objects:
        entries[component_of(name, OBJECT_RULES)].append((name, _object_feeder(checkpoint, name)))
    for name, value in leaves(dict(checkpoint.common)):
        entries[component_of(name, COMMON_RULES)].append((name, _value_feeder(name, value)))
    entries.pop(LEFT_OUT, None)
    return tuple(_digest(component, entries[component]) for component in in_order(tuple(entries)))


def total_digest(components: tuple[ComponentDigest, ...]) -> ComponentDigest:
    """Returns the digest over the names and digests of `components`, called `total`."""
    hasher = xxhash.xxh3_128()
    for part in components:
        hasher.update(f"{part.component}\0{part.digest}\n".encode())
    entries = sum(part.entries for part in components)
    return ComponentDigest("total", hasher.hexdigest(), entries, sum(part.value_bytes for part in components))


def _digest(component: str, entries: list[tuple[str, _Feeder]]) -> ComponentDigest:
    hasher = xxhash.xxh3_128()
    value_bytes = 0
    for name, feed_value in sorted(entries, key=lambda entry: entry[0]):
        feed(hasher, name)
        value_bytes += feed_value(hasher)
    return ComponentDigest(component, hasher.hexdigest(), len(entries), value_bytes)


def _tensor_feeder(checkpoint: DenseCheckpoint, name: str) -> _Feeder:
    def feed_value(sink: Sink) -> int:
        tensor = checkpoint.read_tensor(name)
        if is_bucket(name):
            _clear_padding(tensor, checkpoint, name)
        feed_tensor(sink, tensor)
        return tensor.nbytes

    return feed_value


def _clear_padding(bucket: torch.Tensor, checkpoint: DenseCheckpoint, name: str) -> None:
    pieces = [
        Piece(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0], _writer(chunk.extent.file))
        for chunk in checkpoint.tensors[name].chunks
    ]
    for start, stop in padding_spans(pieces):
        bucket[start:stop] = 0


def _writer(file: str) -> str:
    # __<rank>_<thread>.distcp: one rank writes several files.
    return file.rsplit("_", maxsplit=1)[0]


def _object_feeder(checkpoint: DenseCheckpoint, name: str) -> _Feeder:
    return lambda sink: _value_feeder(name, checkpoint.read_object(name))(sink)


def _value_feeder(name: str, value: Any) -> _Feeder:
    def feed_value(sink: Sink) -> int:
        counting = _CountingSink(sink)
        try:
            feed(counting, value)
        except TypeError as error:
            raise UnreadableCheckpoint(
                f"{name} cannot be hashed ({error}); save it as numbers, strings, tensors and containers of these"
            ) from error
        return counting.count_bytes

    return feed_value
