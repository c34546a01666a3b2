"""MoC Fig. 12: an iteration with a blocking checkpoint, with Base-Async and with MoC-Async, in three configurations.

Not measured: the paper's runs took 8 and 16 A800 GPUs, and neither the seconds of its passes nor the rate of its
storage are published. What the text says of the bars (6.2.3) is compared with what eq. 10 makes of the bytes of the
rank that saves most (Fig. 10, by the real selection and sharding) and of the passes that Fig. 11 allows. The unit is
an iteration without a checkpoint.
"""

from __future__ import annotations

if __name__ == "__main__":
    from _script import run

    run(__file__)

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from moe_ckpt.report import Table, table

from .figure import Figure, published
from .moc_fig10 import EXPERTS_SAVED
from .moc_fig11 import baseline_s, bounds, cases, snapshot_s

BASELINE, BASE_ASYNC, MOC_ASYNC = "Baseline", "Base-Async", "MoC-Async"
EXPERTS = 1
"""K of MoC-Async. The text does not say it; with the fewest experts eq. 10 leaves least to wait for."""


@dataclass(frozen=True)
class IterationRange:
    """Durations of an iteration by one method, at least and at most; `most` is None where nothing bounds it."""

    case: str
    method: str
    said: tuple[float, float]
    least: float
    most: float | None

    @property
    def apart(self) -> float:
        """Between both ranges; 0 where any duration is in both."""
        above = 0.0 if self.most is None else self.said[0] - self.most
        return max(0.0, self.least - self.said[1], above)


@cache
def checkpoint() -> tuple[float, float]:
    """Durations of a blocking checkpoint, at least and at most: x in speedup = (1 + x) / (1 + (1 - reduction) x)."""
    given = published("moc")["fig12"]
    pairs = product(given["speedup"], given["overhead_reduction"])
    found = [(faster - 1) / (1 - faster * (1 - less)) for faster, less in pairs]
    return min(found), max(found)


@cache
def bars() -> tuple[IterationRange, ...]:
    """All nine."""
    given, (least, most) = published("moc")["fig12"], checkpoint()
    left = [1 - share for share in reversed(given["overhead_reduction"])]
    found = []
    for case, overlapped in given["base_async_overlapped"].items():
        waits = [(1 - overlapped) * x for x in (least, most)]
        base, moc = _waits(case, baseline_s(case)), _waits(case, snapshot_s(case, EXPERTS))
        found += [
            IterationRange(case, BASELINE, (1 + least, 1 + most), 1 + _in_passes(case, baseline_s(case))[0], None),
            IterationRange(case, BASE_ASYNC, (1 + waits[0], 1 + waits[1]), 1 + base[0], 1 + base[1]),
            IterationRange(case, MOC_ASYNC, (1 + left[0] * least, 1 + left[1] * most), 1 + moc[0], 1 + moc[1]),
        ]
    return tuple(found)


def _in_passes(case: str, seconds: float) -> tuple[float, float]:
    """A time in iterations, at least and at most, if the iteration is all passes."""
    allowed = bounds()[case]
    return seconds / allowed.below_s, seconds / allowed.at_least_s


def _waits(case: str, seconds: float) -> tuple[float, float]:
    """O_save of eq. 10 for a snapshot that runs beside the passes, in iterations, at least and at most."""
    least, most = _in_passes(case, seconds)
    return max(0.0, least - 1), max(0.0, most - 1)


def gains() -> tuple[float, float]:
    """Least and largest share that the said bars let MoC-Async save of an iteration with Base-Async, in any case."""
    given, found = published("moc")["fig12"], []
    for overlapped, x, less in product(
        given["base_async_overlapped"].values(), checkpoint(), given["overhead_reduction"]
    ):
        found.append(1 - (1 + (1 - less) * x) / (1 + (1 - overlapped) * x))
    return min(found), max(found)


def intervals() -> dict[int, float]:
    """I_ckpt of MoC-Async by that of Base-Async in Case2, by K: both are as long as their bytes take."""
    return {k: snapshot_s("Case2", k) / baseline_s("Case2") for k in EXPERTS_SAVED}


def figure() -> Figure:
    """The bars as ranges, and whether what the text says of them fits together."""
    (sharding,) = (one.most for one in bars() if (one.case, one.method) == ("Case1", BASE_ASYNC))
    return Figure(
        "MoC Fig. 12: an iteration with a checkpoint by three methods, GPT-350M-16E",
        {
            "checkpoint_iterations": list(checkpoint()),
            "bars": [vars(one) | {"apart": one.apart} for one in bars()],
            "gain_over_base_async": list(gains()),
            "interval_case2": {str(k): share for k, share in intervals().items()},
            "published": published("moc")["fig12"],
        },
        (_bars(), _statements()),
        _draw,
        (),
        (
            f"Said: a blocking checkpoint that lasts {checkpoint()[0]:.2f} to {checkpoint()[1]:.2f} iterations without"
            " one, which follows from the published speed-ups, and the shares of it that each method hides.",
            "Here: eq. 10 with passes of any length that the statements of Fig. 11 allow, 1 GB/s of snapshots (6.2.4),"
            f" K = {EXPERTS} for MoC-Async, and iterations that are all passes. The rate of storage is not published,"
            " so nothing bounds a blocking checkpoint from above.",
            "What agrees: the order of the methods in each case, blocking checkpoints of that length, and that"
            " MoC-Async leaves next to nothing. By eq. 10 it leaves nothing at all; 3 to 8 % of an iteration are said.",
            "What does not: Base-Async. In Case1 sharding alone is said to fit the snapshot into the passes (6.2.2); it"
            " takes so little off the busiest rank that without it an iteration could not last longer than"
            f" {sharding:.2f}. In Case3 a snapshot of four experts is said to outlast the passes, so that one of all"
            " lasts far longer than what is said to be left of it, unless an update takes several times as long as the"
            " passes. Case1 has no such way out: its durations are not proportional to bytes.",
            "Nothing of this ran on GPUs. What snapshots in every iteration add to real iterations of this project, on"
            " CPUs, is in [another page](every-iteration.md).",
        ),
        (1, 3),
        (12, 3.8),
    )


def _bars() -> Table:
    rows = (
        (one.case, one.method, *map(_shown, (*one.said, one.least, one.most)), _shown(one.apart or None))
        for one in bars()
    )
    columns = "case | method | said, at least | said, at most | here, at least | here, at most | apart by"
    return table("Duration, in iterations without a checkpoint", columns, rows)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _statements() -> Table:
    given, (least, most) = published("moc")["fig12"], gains()
    low, high = given["gain_over_base_async"]
    shares = ", ".join(f"{share:.2f} (K = {k})" for k, share in intervals().items())
    said = given["interval_case2"]["moc_async"] / given["interval_case2"]["base_async"]
    rows = (
        ("what MoC-Async saves of Base-Async's iteration", f"{least:.1%} to {most:.1%}", f"{low:.1%} to {high:.1%}"),
        ("I_ckpt of MoC-Async by Base-Async's, Case2", shares, f"{said:.2f}"),
    )  # fmt: skip
    return table("Published", "what | what the ranges and bytes allow | published", rows)


def _draw(axes: list[Any]) -> None:
    methods = (BASELINE, BASE_ASYNC, MOC_ASYNC)
    for axis, case in zip(axes, cases(), strict=True):
        for place, one in enumerate(bar for bar in bars() if bar.case == case):
            most = one.least if one.most is None else one.most
            for offset, colour, (low, high) in ((-0.18, "tab:gray", one.said), (0.18, "tab:blue", (one.least, most))):
                axis.bar(place + offset, low, 0.3, color=colour, alpha=0.5)
                axis.bar(place + offset, max(0.0, high - low), 0.3, bottom=low, color=colour)
        axis.axhline(1, color="tab:red", linestyle=":")
        axis.set_xticks(range(len(methods)), methods)
        axis.set(title=case, ylabel="iterations without a checkpoint")
    axes[0].set_xlabel("grey: said, blue: here (Baseline: at least); dark: least to most")
