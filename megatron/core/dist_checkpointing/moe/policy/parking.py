"""What a process keeps of its state when training is interrupted: one answer for each phase of a step and each cause.

A step of iteration t+1 begins with the whole state of t. Its passes change only random states and what routers count;
its update is local, and once begun it is always finished: a peer that is lost while weights are gathered is heard of
after it. So a survivor stands at t or at t+1, never between them (MoEvement 3.4 and App. A leave this open).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ..types.operators import scaled


class StepPhase(enum.Enum):
    """Where a process is between the end of an iteration, t, and the end of the next one."""

    IDLE = "The state of t is whole: between its end and the passes of t+1, or in a first start."
    PASSES = "Forward and backward passes of t+1 run, up to the reduction of its gradients."
    REDUCED = "This rank's part of the gradients of t+1 is final; norm and verdict are not known to it yet."
    UPDATING = "The optimizer writes master weights and moments: some are of t, some of t+1."
    UPDATED = "Master weights and moments are of t+1; compute weights may not be gathered."
    REPLAYING = "Iterations before the target are run again; operators may still be frozen."
    ROLLING_FORWARD = "Kept gradients are applied to the parked state before the target."
    REJOINING = "The state of the target is whole, and the process waits for the others."


class Cause(enum.Enum):
    """Why training does not continue."""

    PEER_LOST = "A collective failed because another process ended or hung up."
    TOLD_TO_END = "The launcher asked this process to end (SIGTERM)."
    OWN_ERROR = "Something went wrong in this process itself."


class ParkContents(enum.Enum):
    """What is put aside."""

    NOTHING = "Nothing."
    BEFORE = "The state of t; random states and what routers count are put back to it."
    BEFORE_WITH_GRADIENTS = "The state of t, and beside it the gradients of t+1."
    AFTER = "The state of t+1."


@dataclass(frozen=True)
class Rule:
    """One cell of the table, and the reason for it."""

    keep: ParkContents
    why: str


_WHOLE = Rule(ParkContents.BEFORE, "The state of the last iteration is whole.")
_UNTOUCHED = Rule(
    ParkContents.BEFORE, "The passes leave master weights and moments alone, and what they change was noted."
)
_REDUCED = Rule(
    ParkContents.BEFORE_WITH_GRADIENTS,
    "No master weight was touched yet; with the norm that another rank knows the gradients lead to the next iteration.",
)
_MIXED = Rule(ParkContents.NOTHING, "Some master weights are already of the next iteration and some are not.")
_DONE = Rule(
    ParkContents.AFTER, "The update is local and complete; compute weights are derived from master weights again."
)
_REPLAY = Rule(ParkContents.NOTHING, "A half-done replay is worth nothing; what it began from is still sealed.")
_ROLLING = Rule(ParkContents.NOTHING, "The parked state and the gradients that it came from are still sealed.")
_FAULTY = Rule(
    ParkContents.NOTHING,
    "What failed in this process may be what it holds: its peers restore it as they would if it had been killed.",
)

_AFTER_AN_INTERRUPTION: Mapping[StepPhase, Rule] = {
    StepPhase.IDLE: _WHOLE,
    StepPhase.PASSES: _UNTOUCHED,
    StepPhase.REDUCED: _REDUCED,
    StepPhase.UPDATING: _MIXED,
    StepPhase.UPDATED: _DONE,
    StepPhase.REPLAYING: _REPLAY,
    StepPhase.ROLLING_FORWARD: _ROLLING,
    StepPhase.REJOINING: _WHOLE,
}

PARKING: Mapping[tuple[StepPhase, Cause], Rule] = {
    **{(phase, Cause.PEER_LOST): rule for phase, rule in _AFTER_AN_INTERRUPTION.items()},
    **{(phase, Cause.TOLD_TO_END): rule for phase, rule in _AFTER_AN_INTERRUPTION.items()},
    **{(phase, Cause.OWN_ERROR): _FAULTY for phase in StepPhase},
}


@dataclass(frozen=True)
class ParkingBudget:
    """What parking takes, and how long the launcher lets a process live after it told it to end."""

    nbytes: int
    copy_bytes_per_s: float
    checksum_bytes_per_s: float
    allowed_s: float

    @property
    def seconds(self) -> float:
        """As measured before: to copy all of it, then to seal it."""
        return self.nbytes / self.copy_bytes_per_s + self.nbytes / self.checksum_bytes_per_s

    @property
    def fits(self) -> bool:
        """Whether there is time for twice of that: nobody else hurries then, but all ranks of a node park at once."""
        return 2 * self.seconds <= self.allowed_s

    def __str__(self) -> str:
        rates = f"copies {scaled(self.copy_bytes_per_s)}/s, checksums {scaled(self.checksum_bytes_per_s)}/s"
        return (
            f"emergency save on failure: {scaled(self.nbytes)} per rank in {self.seconds:.1f} s ({rates});"
            f" limit: {self.allowed_s:g} s until the launcher kills a rank"
        )


@dataclass(frozen=True)
class Decision:
    """What to park.

    iteration: of the state; None: nothing. gradients: also those of the iteration after it. why: a sentence.
    """

    iteration: int | None
    gradients: bool
    why: str


def decide(phase: StepPhase, cause: Cause, iteration: int) -> Decision:
    """What an interrupted process parks.

    Args:
        phase: The part of the training step that it is in.
        cause: Why it is interrupted.
        iteration: The newest iteration whose state was whole.
    """
    rule = PARKING[phase, cause]
    if rule.keep is ParkContents.NOTHING:
        return Decision(None, False, rule.why)
    after = iteration + (rule.keep is ParkContents.AFTER)
    if after == 0:
        return Decision(None, False, "Nothing was trained yet: a start makes the same state again.")
    # Gradients of the first iteration lead on from what every start makes again, but nobody restores that.
    return Decision(after, rule.keep is ParkContents.BEFORE_WITH_GRADIENTS, rule.why)
