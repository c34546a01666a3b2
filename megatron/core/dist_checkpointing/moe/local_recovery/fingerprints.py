"""Fingerprints of tensors: 64 bits, computed where the tensor is, without waiting for the device.

A stage that replays alone must send what it sent when the iteration ran first. Whoever received that keeps a
fingerprint of it: the sum of all 64-bit words, each multiplied by an odd number of its place, modulo 2**64. Whole
numbers add up to the same in any order, so the result is the same in each run, on any number of threads. One word that
changed, by whatever amount, always changes it: an odd number divides no power of two. More of them go unnoticed with a
chance of about 2**-64. It guards against accidents and not against forgery.
"""

from __future__ import annotations

from functools import lru_cache

import torch

FINGERPRINT_BYTES = 8
UNKNOWN = 0
"""No tensor has this fingerprint."""

_BLOCK = 1 << 13
"""Words that are multiplied by one row of numbers: there is one row, and one number for each block."""
_ROW, _BLOCKS, _REST, _TAIL = 1, 2, 3, 4  # sequences of numbers


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """One int64 on the device of a contiguous tensor; never UNKNOWN. A GPU needs as much memory again meanwhile."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % FINGERPRINT_BYTES:
        flat = flat.clone()  # words have to begin at a multiple of their size
    size, device = flat.numel() // FINGERPRINT_BYTES * FINGERPRINT_BYTES, flat.device
    words, tail = flat[:size].view(torch.int64), flat[size:]
    blocks, rest = words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK), words[words.numel() // _BLOCK * _BLOCK :]
    parts = [
        (_products(blocks, _numbers(_ROW, _BLOCK, device)) * _numbers(_BLOCKS, blocks.shape[0], device)).sum(),
        (rest * _numbers(_REST, rest.numel(), device)).sum(),
        (tail.to(torch.int64) * _numbers(_TAIL, tail.numel(), device)).sum(),
    ]
    total = torch.stack(parts).sum()
    return torch.where(total == UNKNOWN, torch.ones_like(total), total).view(1)


def _products(blocks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The sum of each block. On the CPU without the products in memory, 15 times as fast; CUDA has no such kernel."""
    return (blocks * row).sum(1) if blocks.is_cuda else torch.mv(blocks, row)


@lru_cache(maxsize=64)
def _numbers(sequence: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, the same on all machines (splitmix64)."""
    state = (torch.arange(count, dtype=torch.int64) + (sequence << 32)) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # Of a signed number the sign would be shifted in.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (state | 1).to(device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
