"""Blocks of tensors: all elements in order, no block too large, whatever pieces the tensor is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.dense.blocks import Placed, blocks


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Placed]]:
    """A tensor, and the pieces of a grid over it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    whole = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return whole, list(pieces_between(whole, [list(pairwise(axis)) for axis in cuts]))


def pieces_between(whole: torch.Tensor, spans: list[list[tuple[int, int]]]) -> Iterator[Placed]:
    for box in product(*spans):
        piece = whole[tuple(slice(*span) for span in box)]
        yield Placed(tuple(start for start, _ in box), tuple(piece.shape), partial(torch.clone, piece))


@given(cut_tensors(), st.integers(1, 40))
def test_blocks_have_all_elements_in_order_and_none_is_too_large(
    cut: tuple[torch.Tensor, list[Placed]], most: int
) -> None:
    whole, pieces = cut
    found = list(blocks(whole.shape, whole.dtype, pieces, most))
    assert all(0 < len(block) <= most for block in found)
    assert torch.equal(torch.cat(found), whole.reshape(-1))


def test_a_tensor_without_elements_has_no_blocks() -> None:
    assert not list(blocks((3, 0, 2), torch.float32, [], 4))


def test_a_piece_longer_than_a_block_is_read_once() -> None:
    reads = []

    def read() -> torch.Tensor:
        reads.append(1)
        return torch.ones(64)

    assert len(list(blocks((64,), torch.float32, [Placed((0,), (64,), read)], 4))) == 16
    assert len(reads) == 1
