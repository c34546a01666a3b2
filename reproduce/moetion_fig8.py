"""MOETION Fig. 8: validation loss over iterations with faults under selective checkpoints, and without faults.

From real training under SIGKILLs: docs/results/accuracy-campaign.json, which `python examples/accuracy/campaign.py`
makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.simulator.events import Estimate, estimate

from .figure import Figure, measured, published
from .moc_fig14 import COMMAND, FILE, curve, runs, told

FAULT_FREE, SELECTIVE = "fault-free", "selective"


@dataclass(frozen=True)
class AfterFault:
    """What the evaluations between a fault and the next one say: (iterations after the fault, by how much the loss is
    above that of the run without faults, nats per byte), in order."""

    iteration: int
    above: tuple[tuple[int, Estimate], ...]

    @property
    def highest(self) -> float:
        """Of all evaluations."""
        return max(loss.mean for _, loss in self.above)


@cache
def faults() -> tuple[int, ...]:
    """The iterations in which a rank was killed."""
    return tuple(int(kill.partition("@")[2].partition(":")[0]) for kill in measured(FILE, COMMAND)["kills"])


def above() -> list[tuple[int, Estimate]]:
    """By iteration, how far losses are above those of the runs without faults from the same seeds.

    Raises:
        UsageError: Where none was trained under `selective`.
    """
    if SELECTIVE not in {run["name"] for run in runs()}:
        raise UsageError(f"{FILE} has no run of {SELECTIVE}: `{COMMAND}` without --only makes it")
    without, found = (
        {run["seed"]: dict(run["validation"]) for run in runs() if run["name"] == name}
        for name in (FAULT_FREE, SELECTIVE)
    )
    return [(at, estimate([found[seed][at] - without[seed][at] for seed in found])) for at, _ in curve(SELECTIVE)]


@cache
def after_faults() -> tuple[AfterFault, ...]:
    """Faults after which there was an evaluation before the next one."""
    ends = (*faults()[1:], max(at for at, _ in above()) + 1)
    found = (
        AfterFault(fault, tuple((at - fault, loss) for at, loss in above() if fault <= at < end))
        for fault, end in zip(faults(), ends, strict=True)
    )
    return tuple(one for one in found if one.above)


def figure() -> Figure:
    """The curves, and what the text says of them."""
    given, (last, left), after = published("moetion")["fig8"], above()[-1], after_faults()
    highest = max(one.highest for one in after)
    curves = {name: curve(name) for name in (FAULT_FREE, SELECTIVE)}
    first, second = given["faults"][:2]
    share = given["recovered_after_iterations"] / (second - first)

    def draw(axes: list[Any]) -> None:
        for name, points in curves.items():
            axes[0].plot(*zip(*points, strict=True), label=name)
        axes[1].plot(*zip(*((at, one.mean) for at, one in above()), strict=True), color="tab:orange")
        axes[0].set(xlabel="iteration", ylabel="validation loss (nats/byte)")
        axes[1].set(xlabel="iteration", ylabel="above the run without faults")
        for axis in axes:
            for fault in faults():
                axis.axvline(fault, color="tab:red", linestyle=":", linewidth=0.8)
        axes[0].legend()

    return Figure(
        "moetion_fig8",
        {
            "curves": curves,
            "faults": [
                {"iteration": one.iteration, "above": [(at, loss.mean, loss.half_width) for at, loss in one.above]}
                for one in after
            ],
            "highest": highest,
            "published": given,
        },
        (
            ((one.iteration, ", ".join(f"{loss:+.4f} ({at} later)" for at, loss in one.above)) for one in after),
            (
                    ("loss above the run without faults, at most", f"{highest:+.4f}", f"{given['above_at_most']:g}"),
                    (f"at the end, {last - faults()[-1]} iterations after the last fault", f"{left:+.4f}",
                     "comparable"),
                ),
        ),
        draw,
        values={"share": share, "runs": told(runs())},
    )  # fmt: skip
