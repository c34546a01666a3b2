"""How near predictions come to published figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Agreement:
    """Differences, ours less the published, of `cells` that are published; `within` of them are within `tolerance`."""

    cells: int
    within: int
    tolerance: float
    mean_absolute: float
    largest: float

    @property
    def share(self) -> float:
        """Share of the cells that are within."""
        return self.within / self.cells if self.cells else 1.0

    @property
    def sentence(self) -> str:
        """For a person."""
        return (
            f"{self.within} of {self.cells} published cells within {self.tolerance:g}; off by"
            f" {self.mean_absolute:.3f} on average, {self.largest:.3f} at most"
        )


def agreement(differences: Iterable[float | None], tolerance: float) -> Agreement:
    """The agreement of all cells that are published; None stands for one that is not."""
    # Rounded as published: a difference of 0.010 in three decimals is not more than 0.010.
    known = [abs(round(difference, 4)) for difference in differences if difference is not None]
    within = sum(difference <= tolerance for difference in known)
    mean = sum(known) / len(known) if known else 0.0
    return Agreement(len(known), within, tolerance, mean, max(known, default=0.0))
