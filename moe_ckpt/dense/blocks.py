"""Tensors as blocks in row-major order, put together from the pieces they are stored in: no tensor is too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

BLOCK_ELEMENTS = 1 << 27
"""Elements of a block: half a GB of fp32, which takes in nearly every tensor but stacks of experts whole."""

Region = tuple[range, ...]
"""A box of a tensor: along each axis the indices in it."""


@dataclass(frozen=True)
class Placed:
    """A piece of a tensor: where it begins and how long it is along each axis, and how it is read."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def overlaps(self, axis: int, there: range) -> bool:
        """Whether the piece has any of these indices.

        Args:
            axis: Number of the axis.
            there: Indices along this axis in the whole tensor.
        """
        return self.offsets[axis] < there.stop and there.start < self.offsets[axis] + self.sizes[axis]


def blocks(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Placed], most: int) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major order, in flat blocks; memory holds one block and one piece.

    Args:
        shape: of the whole tensor.
        dtype: of the whole tensor and of each piece.
        pieces: where parts of it are and how they are read. Elements that no piece has are zero.
        most: elements of a block at most.

    Yields:
        Tensors of one dimension, cut alike for every tensor of one shape, however it is stored. Raises what reading a
        piece raises.
    """
    kept: tuple[Placed | None, torch.Tensor] = None, torch.empty(0)
    for region, there in _regions(tuple(shape), pieces, most):
        block = torch.zeros([len(axis) for axis in region], dtype=dtype)
        for piece in there:
            # A piece that is longer than a block comes again in the next one.
            kept = kept if kept[0] is piece else (piece, piece.read())
            common = [_common(*axis) for axis in zip(region, piece.offsets, piece.sizes, strict=True)]
            into = tuple(_slice(axis, both.start) for axis, both in zip(common, region, strict=True))
            out = tuple(_slice(axis, start) for axis, start in zip(common, piece.offsets, strict=True))
            block[into] = kept[1].reshape(piece.sizes)[out]
        yield block.reshape(-1)


def _regions(
    shape: tuple[int, ...], pieces: Sequence[Placed], most: int, before: Region = ()
) -> Iterator[tuple[Region, Sequence[Placed]]]:
    """The boxes of the blocks with the pieces that each takes from; `before` is the box along the axes before these."""
    if not shape:
        yield before, pieces
        return
    size, *inner = shape
    row, axis = prod(inner), len(before)
    if not row:
        return
    step = max(1, most // row)
    for start in range(0, size, step):
        here = range(start, min(start + step, size))
        there = [piece for piece in pieces if piece.overlaps(axis, here)]
        if row > most:
            yield from _regions(tuple(inner), there, most, (*before, here))
        else:
            yield (*before, here, *map(range, inner)), there


def _common(region: range, start: int, size: int) -> range:
    return range(max(region.start, start), min(region.stop, start + size))


def _slice(indices: range, start: int) -> slice:
    return slice(indices.start - start, indices.stop - start)
