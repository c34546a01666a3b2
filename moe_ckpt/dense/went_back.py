"""Which iterations of a --save folder training left when it went back with `--ckpt-step`. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint

from .names import INDEX, read_if_there

RECORD = "moe_ckpt_went_back.txt"
"""Next to the tracker, one line: the iteration, the jobs, and ITERATION=MARK for each that was left."""


@dataclass(frozen=True)
class WentBack:
    """What the record says.

    iteration: where training went back to; 0: it did not. jobs: that followed. left: those behind it, and which save of
    them it was.
    """

    iteration: int = 0
    jobs: tuple[str, ...] = ()
    left: tuple[tuple[int, str], ...] = ()

    def encoded(self) -> bytes:
        """The record."""
        jobs = ",".join(quote(job, safe="") for job in self.jobs)
        return " ".join((str(self.iteration), jobs, *(f"{one}={mark}" for one, mark in self.left), "\n")).encode()


def went_back(root: Path) -> WentBack:
    """The record of a folder, of nothing where there is none that can be read.

    Args:
        root: The folder of all checkpoints.
    """
    try:
        iteration, jobs, *left = (read_if_there(root / RECORD) or b"").decode().split()
        pairs = (one.partition("=") for one in left)
        names = tuple(map(unquote, jobs.split(",")))
        return WentBack(int(iteration), names, tuple((int(number), mark) for number, _, mark in pairs))
    except (UnreadableCheckpoint, ValueError):
        return WentBack()


def left_in(root: Path) -> frozenset[int]:
    """The iterations that are still those that training left: a save of the same number takes its place.

    Args:
        root: The folder of all checkpoints.
    """
    return frozenset(number for number, mark in went_back(root).left if _mark(root, number) == mark)


def gone_back(root: Path, iteration: int, job: str, published: Iterable[int]) -> WentBack:
    """What a record has to say once training has gone back.

    Args:
        root: The folder of all checkpoints.
        iteration: Where to.
        job: The job's id.
        published: The iterations that are there.
    """
    before, left, there = went_back(root), set(left_in(root)), set(published)
    if iteration in left:  # back to what was left: its past counts again, and not what was saved in place of that
        left = {one for one in left if one > iteration} | {one for one in there - left if one > before.iteration}
    left = (left | {one for one in there if one > iteration}) - {iteration}
    return WentBack(iteration, (job,), tuple((one, mark) for one in sorted(left) if (mark := _mark(root, one))))


def _mark(root: Path, iteration: int) -> str:
    """Which save of an iteration is there, by a file of its own that nobody changes; empty where it has none."""
    folder = root / f"iter_{iteration:07d}"
    with suppress(OSError, ValueError):
        path = folder / INDEX
        if not path.is_file():  # not of format torch_dist
            path = min(one for one in folder.rglob("*") if one.is_file() and one.suffix == ".pt")
        about = path.stat()
        return f"{about.st_size}-{about.st_mtime_ns}"
    return ""
