"""Fingerprints of tensors: the same in each run, another for any byte that changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.local_recovery.boundary_copies import UNKNOWN, fingerprint

SIZES = [1, 7, 8, 9, 64, 8 * 8192, 8 * 8192 + 3, 3 * 8 * 8192 + 8 * 5 + 2]


def odd(sequence: int, place: int) -> int:
    """The number of a place, in numbers without bounds: splitmix64, made odd."""
    state = (place + (sequence << 32)) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return (state ^ state >> 31) | 1


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_any_one_byte_changes_it(size: int) -> None:
    data = noise(size)
    before = int(fingerprint(data))
    for at in {0, size // 3, size // 2, size - 1}:
        data[at] ^= 1
        assert int(fingerprint(data)) != before
        data[at] ^= 1
    assert int(fingerprint(data)) == before


@given(st.integers(0, 199), st.integers(0, 199), st.integers(1, 255), st.integers(1, 255))
def test_two_bytes_that_change_do_not_make_up_for_each_other(one: int, other: int, by: int, by_other: int) -> None:
    data = noise(200)
    before = int(fingerprint(data))
    data[one] ^= by
    data[other] ^= by_other
    assert (int(fingerprint(data)) == before) == (one == other and by == by_other)


def test_words_that_change_places_change_it() -> None:
    data = noise(4 * 8 * 8192).view(torch.int64)
    for distance in (1, 2, 4096, 8192, 3 * 8192):
        moved = data.clone()
        moved[[0, distance]] = moved[[distance, 0]]
        assert int(fingerprint(moved)) != int(fingerprint(data)), distance


def test_its_value_is_the_same_on_all_machines() -> None:
    words = torch.arange(100, dtype=torch.int64)
    expected = sum(word * odd(3, place) for place, word in enumerate(words.tolist())) % 2**64
    assert int(fingerprint(words)) % 2**64 == expected


def test_both_ways_to_add_up_blocks_give_the_same() -> None:
    """On a GPU products are added up; here both are there to be compared."""
    blocks, row = noise(8 * 40).view(torch.int64).view(4, 10), noise(80).view(torch.int64)
    assert torch.equal(torch.mv(blocks, row), (blocks * row).sum(1))


def test_a_view_that_begins_anywhere_has_that_of_its_bytes() -> None:
    data = noise(100)
    assert torch.equal(fingerprint(data[3:83]), fingerprint(data[3:83].clone()))


def test_no_tensor_has_the_one_that_stands_for_none() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        assert int(fingerprint(torch.zeros(1000, dtype=dtype))) != UNKNOWN


def test_it_does_not_depend_on_the_number_of_threads() -> None:
    data, threads = noise(10 * 8 * 8192 + 5), torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.add(int(fingerprint(data)))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
