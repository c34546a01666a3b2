"""MoC Fig. 12: an iteration with a blocking checkpoint, with Base-Async and with MoC-Async, in three configurations.

Not measured: the paper's runs took 8 and 16 A800 GPUs, and neither the seconds of its passes nor the rate of its
storage are published. What the text says of the bars (6.2.3) is compared with what eq. 10 makes of the bytes of the
rank that saves most (Fig. 10, by the real selection and sharding) and of the passes that Fig. 11 allows. The unit is
an iteration without a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

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
    given, gain = published("moc")["fig12"], gains()
    shares = ", ".join(f"{share:.2f} (K = {k})" for k, share in intervals().items())
    said = given["interval_case2"]["moc_async"] / given["interval_case2"]["base_async"]
    ends = [" to ".join(f"{end:.1%}" for end in pair) for pair in (gain, given["gain_over_base_async"])]
    return Figure(
        "moc_fig12",
        {
            "checkpoint_iterations": list(checkpoint()),
            "bars": [vars(one) | {"apart": one.apart} for one in bars()],
            "gain_over_base_async": list(gain),
            "interval_case2": {str(k): share for k, share in intervals().items()},
            "published": given,
        },
        (
            ((one.case, one.method, *("-" if value is None else f"{value:.2f}" for value in
                                          (*one.said, one.least, one.most, one.apart or None))) for one in bars()),
            (("what MoC-Async saves of Base-Async's iteration", *ends),
                 ("I_ckpt of MoC-Async by Base-Async's, Case2", shares, f"{said:.2f}")),
        ),
        _draw,
        values={"least": checkpoint()[0], "most": checkpoint()[1], "experts": EXPERTS, "sharding": sharding},
    )  # fmt: skip


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
