"""Whether views cover memory exactly once: arithmetic on address ranges."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import MoECheckpointError


class IncompleteState(MoECheckpointError):
    """Training state that no operator covers, or two do, or a view of memory that is no training state."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Addresses `start` to `end` in bytes, and what is there."""

    start: int
    end: int
    name: str

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    def shared_with(self, other: Extent) -> Extent | None:
        """The part that `other` has too, under this name; None if there is none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Extent(start, end, self.name) if start < end else None


class Cover:
    """Memory that a set of extents covers, and how much of other extents is outside of it."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for extent in sorted(extents, key=_start):
            # Sorted by start: what touches the last range extends it, so ranges stay disjoint and ascending.
            if self._ends and extent.start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], extent.end)
            else:
                self._starts.append(extent.start)
                self._ends.append(extent.end)

    def missing_bytes(self, extent: Extent) -> int:
        """Bytes of `extent` that are not covered."""
        missing, position = 0, extent.start
        # From the first range that ends behind the start of the extent.
        for i in range(bisect.bisect_right(self._ends, extent.start), len(self._starts)):
            if self._starts[i] >= extent.end:
                break
            missing += max(0, self._starts[i] - position)
            position = self._ends[i]
        return missing + max(0, extent.end - position)


def check_cover(expected: Sequence[Extent], found: Sequence[Extent]) -> None:
    """Check that `found` covers every byte of `expected` exactly once, and nothing else.

    Extents of `expected` may overlap: one tensor may be enumerated in several ways.

    Raises:
        IncompleteState: Names the first byte range that is wrong and counts the others.
    """
    in_order = sorted((extent for extent in found if extent.nbytes), key=_start)
    # In order of addresses, any overlap of two shows between neighbours.
    for extent, following in itertools.pairwise(in_order):
        if following.start < extent.end:
            raise IncompleteState(f"state is covered twice: {extent.name} and {following.name} share memory")
    # Both ways: state that nobody saves, and views that were left behind by an optimizer that replaced its state.
    _raise_for(expected, Cover(found), "belongs to no operator and not to the trainer state")
    _raise_for(found, Cover(expected), "is no live training state; enumerate the state anew after it was replaced")


def _raise_for(extents: Iterable[Extent], cover: Cover, trouble: str) -> None:
    wrong = [(extent, missing) for extent in extents if (missing := cover.missing_bytes(extent))]
    if wrong:
        first, missing = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise IncompleteState(f"{first.name}{others} {trouble}: {missing} of its {first.nbytes} bytes")


def _start(extent: Extent) -> tuple[int, int]:
    return extent.start, extent.end
