"""Where two stored states differ: names, kinds and shapes first, then values, one block of each in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

import torch

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

from ..dense.canonical import encoded, leaves
from .values import LoadedValue

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


def structure(first: Sequence[LoadedValue], second: Sequence[LoadedValue]) -> tuple[Difference, ...]:
    """Names that only one of two states has, and tensors of other dtypes or shapes; by name. Nothing is read.

    Args:
        first: Values of the first state.
        second: Values of the second state.
    """
    ours, theirs = _by_name(first), _by_name(second)
    found = []
    for name in sorted(ours.keys() | theirs.keys(), key=natural):
        own, other = ours.get(name), theirs.get(name)
        what = ""
        if own is None or other is None:
            what = "only in the first" if other is None else "only in the second"
        elif own.dtype != other.dtype:
            what = "dtype"
        elif own.shape != other.shape:
            what = "shape"
        if what:
            found.append(Difference(name, what, _described(own), _described(other)))
    return tuple(found)


def differing_values(
    first: Sequence[LoadedValue], second: Sequence[LoadedValue], advance: Callable[[int], None]
) -> Iterator[Difference]:
    """The values under names that both states have with one dtype and shape, where they differ; by name, read only as
    the iterator advances. Every bit counts: NaNs are equal if their bits are, and 0.0 differs from -0.0.

    Raises UnreadableCheckpoint.

    Args:
        first: Values of the first state.
        second: Values of the second state.
        advance: Called with the number of bytes that were compared since its last call.
    """
    theirs = _by_name(second)
    for own in sorted(first, key=lambda value: natural(value.name)):
        other = theirs.get(own.name)
        if other is None or (own.dtype, own.shape) != (other.dtype, other.shape):
            continue
        ours, others = own.read(), other.read()
        if own.dtype:
            yield from _of_tensors(own.name, own.shape, ours, others)
        else:
            yield from _of_objects(own.name, ours, others)
        advance(2 * own.nbytes)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Orders names as people do: layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def _by_name(values: Sequence[LoadedValue]) -> Mapping[str, LoadedValue]:
    found = {value.name: value for value in values}
    if len(found) != len(values):
        raise UnreadableCheckpoint("a state has two values of one name: it cannot be compared")
    return found


def _described(value: LoadedValue | None) -> str:
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
    for own, other in _small(ours, others):
        if not len(own):
            continue
        unequal = (_bits(own) != _bits(other)).reshape(len(own), -1).any(1)
        if unequal.any():
            count += int(unequal.sum())
            at = int(unequal.nonzero()[0])
            first = first or (start + at, repr(own[at].item()), repr(other[at].item()))
            gap = _largest(own[unequal], other[unequal])
            largest = nan if isnan(gap) or isnan(largest) else max(largest, gap)
        start += len(own)
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


def _largest(own: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if own.is_complex() else torch.float64
    return float((own.to(wide) - other.to(wide)).abs().max())


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
        own, other = mine.get(path, missing), theirs.get(path, missing)
        full = f"{name}.{path}" if path else name
        if other is missing or own is missing:
            where = "only in the first" if other is missing else "only in the second"
            shown = ["" if value is missing else _shown(value) for value in (own, other)]
            yield Difference(full, where, shown[0], shown[1])
        elif isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor) and own.shape == other.shape:
            if own.dtype == other.dtype:
                yield from _of_tensors(full, own.shape, [own.reshape(-1)], [other.reshape(-1)])
            else:
                yield Difference(full, "dtype", _plain(own.dtype), _plain(other.dtype))
        elif _bytes(full, own) != _bytes(full, other):
            yield Difference(full, "value", _shown(own), _shown(other))


def _bytes(name: str, value: Any) -> bytes:
    try:
        encoding: bytes = encoded(value)
    except TypeError as error:
        raise UnreadableCheckpoint(f"{name} cannot be compared ({error})") from error
    return encoding


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
