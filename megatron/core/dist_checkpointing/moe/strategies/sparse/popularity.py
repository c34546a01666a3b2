"""How often experts are used, as far as it orders windows: what was counted, and what the last order was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...policy.ordering import should_reorder
from ...types import OperatorId, expert

Rows = tuple[tuple[float, ...], ...]
"""By MoE layer and expert: whole numbers where they are summed, moving averages where older iterations fade."""


@dataclass(frozen=True)
class Popularity:
    """A value; each method returns the next one.

    layers: those with experts, ascending. decay: how much of a moving average stays from one iteration to the next
    (alpha of MoEvement App. B, Time-Decayed); None: sums since the last order was made. ordered_by: what that order was
    made from, empty as long as there is none.
    """

    layers: tuple[int, ...]
    decay: float | None = None
    counts: Rows = field(default=(), repr=False)
    ordered_by: Rows = field(default=(), repr=False)

    def counted(self, counts: Sequence[Sequence[int]]) -> Popularity:
        """With one more iteration."""
        alpha = self.decay
        if not self.counts:
            fresh = counts if alpha is None else [[(1 - alpha) * count for count in row] for row in counts]
            return replace(self, counts=tuple(map(tuple, fresh)))
        pairs = zip(self.counts, counts, strict=True)
        if alpha is not None:
            rows = [[alpha * a + (1 - alpha) * b for a, b in zip(old, new, strict=True)] for old, new in pairs]
        else:
            rows = [[a + b for a, b in zip(old, new, strict=True)] for old, new in pairs]
        return replace(self, counts=tuple(map(tuple, rows)))

    def has_changed(self, threshold: float, fraction: float) -> bool:
        """Whether the operators are to be ordered anew (MoEvement 3.5)."""
        return bool(self.counts) and should_reorder(self.last, self._by_expert(self.counts), threshold, fraction)

    def reordered(self) -> Popularity:
        """With an order that is made from what was counted until now; sums begin anew."""
        return replace(self, ordered_by=self.counts, counts=() if self.decay is None else self.counts)

    @property
    def last(self) -> Mapping[OperatorId, float]:
        """What the last order was made from, by expert."""
        return self._by_expert(self.ordered_by)

    def to_data(self) -> dict[str, Any]:
        """As JSON values."""
        return {"counts": [list(row) for row in self.counts], "ordered_by": [list(row) for row in self.ordered_by]}

    def from_data(self, data: Mapping[str, Any]) -> Popularity:
        """This popularity with the counts of `to_data`."""
        counts, ordered_by = (tuple(map(tuple, data[name])) for name in ("counts", "ordered_by"))
        return replace(self, counts=counts, ordered_by=ordered_by)

    def _by_expert(self, rows: Rows) -> dict[OperatorId, float]:
        layers = zip(self.layers, rows, strict=False)
        return {expert(layer, index): count for layer, row in layers for index, count in enumerate(row)}
