"""Which iterations of a --save folder training left when it went back with `--ckpt-step`. No torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

from .integrity import NAME
from .names import read_if_there

RECORD = "moe_ckpt_went_back.txt"
"""Next to the tracker, one line: the iteration, the job, and ITERATION=CHECKSUM for each that was left."""


@dataclass(frozen=True)
class WentBack:
    """What the record says.

    iteration: where training went back to; 0: it did not. left: those behind it, and which save of them it was.
    """

    iteration: int = 0
    job: str = ""
    left: tuple[tuple[int, str], ...] = ()


def went_back(root: Path) -> WentBack:
    """The record of a folder, of nothing where there is none that can be read.

    Args:
        root: The folder of all checkpoints.
    """
    try:
        iteration, job, *left = (read_if_there(root / RECORD) or b"").decode().split()
        pairs = (one.partition("=") for one in left)
        return WentBack(int(iteration), job, tuple((int(number), mark) for number, _, mark in pairs))
    except (UnreadableCheckpoint, ValueError):
        return WentBack()


def left_in(root: Path) -> frozenset[int]:
    """The iterations that are still those that training left: a save of the same number takes its place.

    Args:
        root: The folder of all checkpoints.
    """
    return frozenset(number for number, mark in went_back(root).left if _mark(root, number) == mark)


def line_of(root: Path, iteration: int, job: str, published: Iterable[int]) -> str:
    """The record once training has gone back.

    Args:
        root: The folder of all checkpoints.
        iteration: Where to.
        job: The job's id.
        published: The iterations that are there.
    """
    left = left_in(root) | {one for one in published if one > iteration}
    return " ".join((str(iteration), job, *(f"{one}={_mark(root, one)}" for one in sorted(left - {iteration})))) + "\n"


def _mark(root: Path, iteration: int) -> str:
    """Which save of an iteration is there, by its list of files; "none" where stock Megatron has saved it."""
    try:
        listed = read_if_there(root / f"iter_{iteration:07d}" / NAME)
    except UnreadableCheckpoint:
        return "unreadable"
    return "none" if listed is None else f"{zlib.crc32(listed):08x}"
