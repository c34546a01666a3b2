"""Which calls a training loop makes in an iteration, and in which order: a table that every call is checked with."""

from __future__ import annotations

import enum

from ..errors import UsageError


class LoopPhase(enum.Enum):
    """Where the loop is in an iteration."""

    BETWEEN = "Between two iterations."
    PASSES = "Forward and backward passes have begun."
    STEPPED = "The optimizer has stepped; the scheduler and what the loop counts may not have."
    WHOLE = "The state after the iteration is complete, but not protected yet."


class LoopCall(enum.Enum):
    """What the loop calls."""

    FORWARD_BACKWARD = "manager.forward_backward()"
    STEP = "optimizer.step()"
    STEP_DONE = "manager.step_done()"
    AFTER_STEP = "manager.after_step()"
    FINISH = "the end of training"


ORDER: dict[tuple[LoopPhase, LoopCall], LoopPhase] = {
    (LoopPhase.BETWEEN, LoopCall.FORWARD_BACKWARD): LoopPhase.PASSES,
    (LoopPhase.BETWEEN, LoopCall.STEP): LoopPhase.STEPPED,
    (LoopPhase.BETWEEN, LoopCall.FINISH): LoopPhase.BETWEEN,
    (LoopPhase.PASSES, LoopCall.FORWARD_BACKWARD): LoopPhase.PASSES,  # passes may be run again before the step
    (LoopPhase.PASSES, LoopCall.STEP): LoopPhase.STEPPED,
    (LoopPhase.PASSES, LoopCall.FINISH): LoopPhase.PASSES,
    (LoopPhase.STEPPED, LoopCall.STEP_DONE): LoopPhase.WHOLE,
    (LoopPhase.WHOLE, LoopCall.AFTER_STEP): LoopPhase.BETWEEN,
}


class StepOrder:
    """Follows the calls of one loop; after an error nothing of the iteration counts as protected."""

    def __init__(self) -> None:
        self.phase = LoopPhase.BETWEEN

    def follow(self, call: LoopCall, iteration: int) -> None:
        """The loop calls this in `iteration`. Raises UsageError for a call that is missing, or made twice."""
        after = ORDER.get((self.phase, call))
        if after is None:
            raise UsageError(f"iteration {iteration}: {self._mistake(call)}")
        self.phase = after

    def _mistake(self, call: LoopCall) -> str:
        if self.phase in (LoopPhase.STEPPED, LoopPhase.WHOLE):
            return (
                f"{call.value} came before {LoopCall.AFTER_STEP.value}, so the iteration is not protected; call it"
                " once in each iteration, after the optimizer's and the scheduler's step"
            )
        return (
            f"{call.value} came without an {LoopCall.STEP.value} before it: it was called twice, or the step was made "
            "by another optimizer than the one that the manager was given"
        )
