"""Where two stored states differ: names, kinds and shapes first, then values, one block of each in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import torch

from ..errors import UnreadableCheckpoint
from ..store.canonical import encoded, leaves
from .values import Value

_BLOCK_ELEMENTS = 1 << 20
_SHOWN = 60
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One name under which two states differ, and how.

    what: "only in the first", "only in the second", "dtype", "shape" or "value". first, second: what is there, as a
    person reads it. Of tensors with other values besides: the index of the first element that differs, how many of
    how many do, and the largest difference between two (NaN if one of them is no number, None for other than tensors).
    """

    name: str
    what: str
    first: str = ""
    second: str = ""
    index: tuple[int, ...] | None = None
    differing: int | None = None
    elements: int | None = None
    largest: float | None = None


def structure(first: Sequence[Value], second: Sequence[Value]) -> tuple[Difference, ...]:
    """Names that only one of two states has, and tensors of other dtypes or shapes; by name. Nothing is read."""
    ours, theirs = _by_name(first), _by_name(second)
    found = []
    for name in sorted(ours.keys() | theirs.keys(), key=natural):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            where = "only in the first" if other is None else "only in the second"
            found.append(Difference(name, where, _told(one), _told(other)))
        elif one.dtype != other.dtype:
            found.append(Difference(name, "dtype", _told(one), _told(other)))
        elif one.shape != other.shape:
            found.append(Difference(name, "shape", _told(one), _told(other)))
    return tuple(found)


def differing_values(
    first: Sequence[Value], second: Sequence[Value], advance: Callable[[int], None]
) -> Iterator[Difference]:
    """The values under names that both states have with one dtype and shape, where they differ; by name, read as they
    are asked for. Every bit counts: NaNs are equal if their bits are, and 0.0 differs from -0.0.

    advance: is told the bytes that were compared. Raises UnreadableCheckpoint.
    """
    theirs = _by_name(second)
    for one in sorted(first, key=lambda value: natural(value.name)):
        other = theirs.get(one.name)
        if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            continue
        ours, others = one.read(), other.read()
        if one.dtype:
            yield from _of_tensors(one.name, one.shape, ours, others)
        else:
            yield from _of_objects(one.name, ours, others)
        advance(2 * one.nbytes)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Orders names as people do: layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def _by_name(values: Sequence[Value]) -> Mapping[str, Value]:
    found = {value.name: value for value in values}
    if len(found) != len(values):
        raise UnreadableCheckpoint("a state has two values of one name: it cannot be compared")
    return found


def _told(value: Value | None) -> str:
    if value is None:
        return ""
    return f"{_plain(value.dtype)} {list(value.shape)}" if value.dtype else "no tensor"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_tensors(
    name: str, shape: Sequence[int], ours: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> Iterator[Difference]:
    """The bits of two tensors of one dtype and shape, whose elements come in the same blocks."""
    start, count, largest = 0, 0, 0.0
    first: tuple[int, str, str] | None = None
    for one, other in _small(ours, others):
        if not len(one):
            continue
        unequal = (_bits(one) != _bits(other)).reshape(len(one), -1).any(1)
        if unequal.any():
            count += int(unequal.sum())
            at = int(unequal.nonzero()[0])
            first = first or (start + at, repr(one[at].item()), repr(other[at].item()))
            gap = _largest(one[unequal], other[unequal])
            largest = nan if isnan(gap) or isnan(largest) else max(largest, gap)
        start += len(one)
    if first:
        at, value, other_value = first
        yield Difference(name, "value", value, other_value, _index(at, shape), count, start, largest)


def _small(ours: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Smaller blocks, as what is compared of one takes several times its memory."""
    for pair in zip(ours, others, strict=True):
        yield from zip(*(block.split(_BLOCK_ELEMENTS) for block in pair), strict=True)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers; complex numbers of 16 bytes as pairs of them."""
    return tensor.view(_INTEGERS[min(8, tensor.dtype.itemsize)])


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max())


def _index(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        found.append(place)
    return tuple(reversed(found))


def _of_objects(name: str, ours: Any, others: Any) -> Iterator[Difference]:
    """Containers are compared value by value."""
    missing = object()
    mine, theirs = dict(leaves(ours)), dict(leaves(others))
    for path in sorted(mine.keys() | theirs.keys(), key=natural):
        one, other = mine.get(path, missing), theirs.get(path, missing)
        full = f"{name}.{path}" if path else name
        if other is missing or one is missing:
            where = "only in the first" if other is missing else "only in the second"
            shown = ["" if value is missing else _shown(value) for value in (one, other)]
            yield Difference(full, where, shown[0], shown[1])
        elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
            if one.dtype == other.dtype:
                yield from _of_tensors(full, one.shape, [one.reshape(-1)], [other.reshape(-1)])
            else:
                yield Difference(full, "dtype", _plain(one.dtype), _plain(other.dtype))
        elif _bytes(full, one) != _bytes(full, other):
            yield Difference(full, "value", _shown(one), _shown(other))


def _bytes(name: str, value: Any) -> bytes:
    try:
        encoding: bytes = encoded(value)
    except TypeError as error:
        raise UnreadableCheckpoint(f"{name} cannot be compared ({error})") from error
    return encoding


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
