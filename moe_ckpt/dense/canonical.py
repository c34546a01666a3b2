"""One byte string per value: what a checkpoint's objects are hashed as."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from enum import Enum
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch


class Sink(Protocol):
    """Takes bytes in order: a hasher, or something that counts."""

    def update(self, data: bytes | memoryview, /) -> object: ...


def feed(sink: Sink, value: Any) -> None:
    """Feeds `value` to `sink` so that equal values give equal bytes, and different values different ones.

    Dicts go by sorted key, lists and tuples alike, floats by their exact repr, tensors and arrays by dtype, shape and
    raw bytes. Raises TypeError for a type whose content it does not know.

    Args:
        sink: Takes the bytes in order, such as a hasher.
        value: Nested dicts, lists, tuples, sets, numbers, texts, tensors and arrays.
    """
    match value:
        case torch.Tensor():
            feed_blocks(sink, value.dtype, tuple(value.shape), [value])
        case np.ndarray() | np.generic() if not isinstance(value, str | bytes | float):
            feed_array(sink, np.asarray(value))
        case dict():
            _feed_sorted(sink, b"dict", [encoded(key) + encoded(item) for key, item in value.items()])
        case set() | frozenset():
            _feed_sorted(sink, b"set", [encoded(item) for item in value])
        case list() | tuple():
            _frame(sink, b"list", str(len(value)).encode())
            for item in value:
                feed(sink, item)
        case _:
            _frame(sink, *_scalar(value))


def feed_blocks(sink: Sink, dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[torch.Tensor]) -> None:
    """Feeds dtype, shape and raw bytes of a dense tensor.

    Args:
        sink: Takes the bytes in order, such as a hasher.
        dtype: Dtype of the tensor.
        shape: Shape of the whole tensor.
        blocks: Its elements in row-major order, in one tensor or several, of any shape and on any device.
    """
    _frame(sink, b"tensor", str(dtype).encode(), repr(shape).encode())
    for block in blocks:
        flat = block.detach().cpu().contiguous().reshape(-1)
        sink.update(flat.view(torch.uint8).numpy().data)


def feed_array(sink: Sink, array: np.ndarray[Any, Any]) -> None:
    """Feeds dtype, shape and raw bytes of an array. Raises TypeError for arrays of objects.

    Args:
        sink: Takes the bytes in order, such as a hasher.
        array: The array, of any shape.
    """
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects has no defined bytes")
    _frame(sink, b"array", array.dtype.str.encode(), repr(array.shape).encode())
    sink.update(array.tobytes())


def _scalar(value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, Enum):
        return b"enum", type(value).__name__.encode() + b"." + value.name.encode()
    if value is None or isinstance(value, bool | int | float | complex):
        return type(value).__name__.encode(), repr(value).encode()
    if isinstance(value, str):
        return b"str", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        return b"bytes", bytes(value)
    if isinstance(value, BytesIO):
        return b"bytes", value.getvalue()
    if isinstance(value, torch.dtype | torch.device):
        return b"torch", str(value).encode()
    if isinstance(value, Namespace | SimpleNamespace):
        return b"namespace", encoded(vars(value))
    raise TypeError(f"an object of {type(value).__module__}.{type(value).__qualname__} has no defined bytes")


class _Buffer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def update(self, data: bytes | memoryview, /) -> None:
        self.parts.append(bytes(data))


def encoded(value: Any) -> bytes:
    """What `feed` gives for `value`. Raises TypeError as it does."""
    buffer = _Buffer()
    feed(buffer, value)
    return b"".join(buffer.parts)


def _feed_sorted(sink: Sink, tag: bytes, encodings: list[bytes]) -> None:
    _frame(sink, tag, str(len(encodings)).encode())
    for encoding in sorted(encodings):
        _frame(sink, encoding)


def _frame(sink: Sink, *parts: bytes) -> None:
    for part in parts:
        sink.update(len(part).to_bytes(8, "little"))
        sink.update(part)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (keys joined with dots, leaf) of nested dicts, lists and namespaces; an empty container is a leaf.

    Args:
        value: The nested containers.
        path: Keys of the containers around `value`, outermost first.
    """
    if isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    nested = [(key, item) for key, item in items]
    if not nested:
        yield ".".join(path), value
    for key, item in nested:
        yield from leaves(item, (*path, str(key)))
