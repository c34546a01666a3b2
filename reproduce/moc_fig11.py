"""MoC Fig. 11: seconds of a snapshot by case and K, and what the text's statements say of the passes that hide it.

The paper gives no seconds of its passes, but says of each case which snapshots they cover (6.2.2). With the bytes of
the rank that saves most (Fig. 10, by the real selection and sharding) and the rate of 6.2.4 each statement is a bound.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_ckpt.report import Table, table

from . import moc_fig10
from .figure import Figure, published

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
    return Figure(
        "MoC Fig. 11: seconds of a snapshot of GPT-350M-16E by case and K",
        {
            "snapshot_s": {
                case: {"baseline": baseline_s(case)} | {str(k): snapshot_s(case, k) for k in moc_fig10.EXPERTS_SAVED}
                for case in cases()
            },
            "bounds": {
                case: {"at_least_s": one.at_least_s, "below_s": one.below_s if one.below_s < 1e9 else None}
                for case, one in bounds().items()
            },
            "reduction": shortest_reduction(),
        },
        (_durations(), _bounds()),
        _draw,
        (),
        (
            "The text says that durations fall by up to about 50 %; for K = 1 they fall by"
            f" {shortest_reduction():.0%} here, of bytes that are copied at one rate.",
            "Case3 is 0.5 s faster than Case2 (6.2.2): "
            + ("its bounds allow that." if _apart_allowed() else "its bounds do not allow that."),
        ),
        (1, 3),
        (12, 3.8),
    )


def _apart_allowed() -> bool:
    """Whether passes of Case3 that keep their bounds can be half a second shorter than some of Case2."""
    return bounds()["Case3"].possible and bounds()["Case3"].below_s + 0.5 > bounds()["Case2"].at_least_s


def _durations() -> Table:
    columns = "case | baseline:seconds | " + " | ".join(f"K = {k}:seconds" for k in moc_fig10.EXPERTS_SAVED)
    rows = ((case, baseline_s(case), *(snapshot_s(case, k) for k in moc_fig10.EXPERTS_SAVED)) for case in cases())
    return table("Snapshots", columns, rows)


def _bounds() -> Table:
    rows = (
        (one.case, one.at_least_s, one.below_s if one.below_s < 1e9 else None, "yes" if one.possible else "NO")
        for one in bounds().values()
    )
    return table("Passes, if all statements hold", "case | at least:seconds | below:seconds | possible", rows)


def _draw(axes: list[Any]) -> None:
    for axis, case in zip(axes, cases(), strict=True):
        labels = ["all, baseline", *(str(k) for k in moc_fig10.EXPERTS_SAVED)]
        axis.bar(labels, [baseline_s(case), *(snapshot_s(case, k) for k in moc_fig10.EXPERTS_SAVED)])
        axis.set(title=case, xlabel="K", ylabel="snapshot (s)")
        axis.axhspan(bounds()[case].at_least_s, min(bounds()[case].below_s, axis.get_ylim()[1]), alpha=0.2)
