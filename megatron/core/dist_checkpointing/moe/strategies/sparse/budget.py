"""How many bytes an iteration has time for, from what iterations, copies and replicas took lately (MoEvement 3.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..base import Throughput
from ..interval_policy import Costs

MEASURED = 3
"""Iterations that are measured before the first decision; the first one of a start never counts."""

_REMEMBERED = 16
_HEADROOM = 0.8  # of what was measured: copies share memory and cores with training, and are never alike
_TOLERANCE = 0.2  # a budget that changes by less changes no window


@dataclass(frozen=True)
class Budget:
    """A value; each method returns the next one.

    passes_s, bandwidths: of the newest iterations (see `Throughput`). replicable: bytes that could have been
    replicated in an iteration each, at the pace of the newest snapshots. decided_bytes: for which the window was
    chosen; 0 if it never was. is_started: whether the first iteration of this start is over.
    """

    passes_s: tuple[float, ...] = ()
    bandwidths: tuple[float, ...] = ()
    replicable: tuple[float, ...] = ()
    decided_bytes: int = 0
    is_started: bool = False

    def throughput_measured(self, pace: Throughput) -> Budget:
        """With one more iteration."""
        if not self.is_started:
            return replace(self, is_started=True)
        passes, bandwidths = _with(self.passes_s, pace.iteration_s), _with(self.bandwidths, pace.bandwidth_bytes_per_s)
        return replace(self, passes_s=passes, bandwidths=bandwidths)

    def measured(self, costs: Costs, peak_bytes: int) -> Budget:
        """With one more snapshot that was replicated, of `peak_bytes` at most."""
        if costs.round_s <= 0 or not peak_bytes:
            return self
        return replace(self, replicable=_with(self.replicable, peak_bytes * costs.iteration_s / costs.round_s))

    def bytes_now(self) -> int | None:
        """What an iteration has time to copy, and to replicate.

        None until enough iterations were measured.
        """
        if len(self.passes_s) < MEASURED:
            return None
        found = median(self.passes_s) * median(self.bandwidths)
        if self.replicable:
            found = min(found, median(self.replicable))
        return max(1, int(_HEADROOM * found))

    def calls_for_another(self) -> int | None:
        """The bytes for which a window has to be chosen now; None as long as the one that was chosen will do."""
        found = self.bytes_now()
        if found is None or (self.decided_bytes and abs(found / self.decided_bytes - 1) <= _TOLERANCE):
            return None
        return found

    def decided(self, nbytes: int) -> Budget:
        """With a window that was chosen for these bytes."""
        return replace(self, decided_bytes=nbytes)

    def to_data(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "passes_s": list(self.passes_s),
            "bandwidths": list(self.bandwidths),
            "replicable": list(self.replicable),
            "decided_bytes": self.decided_bytes,
        }

    def from_data(self, data: Mapping[str, Any]) -> Budget:
        """This budget with what `to_data` told."""
        return replace(
            self,
            passes_s=tuple(data["passes_s"]),
            bandwidths=tuple(data["bandwidths"]),
            replicable=tuple(data["replicable"]),
            decided_bytes=data["decided_bytes"],
        )


def _with(values: Sequence[float], value: float) -> tuple[float, ...]:
    return (*values, value)[-_REMEMBERED:]
