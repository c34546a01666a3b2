"""MoC Fig. 11: seconds of a snapshot by case and K, and what the text's statements say of the passes that hide it.

The paper gives no seconds of its passes, but says of each case which snapshots they cover (6.2.2). With the bytes of
the rank that saves most (Fig. 10, by the real selection and sharding) and the rate of 6.2.4 each statement is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from . import moc_fig10
from .figure import Figure, bars, published

SHARDED = "adaptive"
"""Fully sharded: equal for experts, adaptive for the rest."""


@dataclass(frozen=True)
class PassBounds:
    """Seconds that the passes of one case take at least and less than, if all that is said of it holds."""

    case: str
    at_least_s: float
    below_s: float

    @property
    def possible(self) -> bool:
        """Whether any duration fits."""
        return self.at_least_s < self.below_s


@cache
def snapshot_s(case: str, k: int, sharding: str = SHARDED) -> float:
    """Of the rank that saves most."""
    return float(moc_fig10.bottlenecks()[case][k][sharding] / published("moc")["fig13"]["a800"]["snapshot_bytes_per_s"])


def baseline_s(case: str) -> float:
    """All experts, without sharding of the weights."""
    return snapshot_s(case, moc_fig10.EXPERTS_SAVED[-1], "none")


def shortest_reduction() -> float:
    """The largest share by which one of the paper's techniques shortens a snapshot with K = 1."""
    return max(1 - snapshot_s(case, 1) / baseline_s(case) for case in cases())


def cases() -> tuple[str, ...]:
    """By name."""
    return tuple(moc_fig10.bottlenecks())


@cache
def bounds() -> dict[str, PassBounds]:
    """What 6.2.2 says: the baseline is longer than the passes in Case1 and Case3; sharding is enough in Case1; in Case3
    fewer than four experts are. 6.2.3: in Case2 the passes cover nearly all of the baseline's snapshot."""
    all_experts = moc_fig10.EXPERTS_SAVED[-1]
    return {
        "Case1": PassBounds("Case1", snapshot_s("Case1", all_experts), baseline_s("Case1")),
        "Case2": PassBounds("Case2", 0.979 * baseline_s("Case2"), float("inf")),
        "Case3": PassBounds("Case3", snapshot_s("Case3", 2), snapshot_s("Case3", 4)),
    }


def figure() -> Figure:
    """Durations, bounds, and whether all statements can be true at once."""
    seconds = {case: [baseline_s(case), *(snapshot_s(case, k) for k in moc_fig10.EXPERTS_SAVED)] for case in cases()}
    names = ["baseline", *map(str, moc_fig10.EXPERTS_SAVED)]
    ends = {case: (one.at_least_s, one.below_s if one.below_s < 1e9 else None) for case, one in bounds().items()}
    third, second = bounds()["Case3"], bounds()["Case2"]
    allowed = third.possible and third.below_s + 0.5 > second.at_least_s

    def draw(axes: list[Any]) -> None:
        for axis, (case, found) in zip(axes, seconds.items(), strict=True):
            bars(axis, names, {"": found}, title=case, xlabel="K", ylabel="snapshot (s)")
            axis.axhspan(bounds()[case].at_least_s, min(bounds()[case].below_s, axis.get_ylim()[1]), alpha=0.2)

    return Figure(
        "moc_fig11",
        {
            "snapshot_s": {case: dict(zip(names, found, strict=True)) for case, found in seconds.items()},
            "bounds": {case: {"at_least_s": least, "below_s": below} for case, (least, below) in ends.items()},
            "reduction": shortest_reduction(),
        },
        (
            ((case, *found) for case, found in seconds.items()),
            ((case, *found, "yes" if bounds()[case].possible else "NO") for case, found in ends.items()),
        ),
        draw,
        values={"reduction": shortest_reduction(), "allow": "allow" if allowed else "do not allow"},
    )
