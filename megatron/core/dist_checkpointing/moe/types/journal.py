"""What a replay of an iteration cannot compute from a part of the state, and what it must come out with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepJournal:
    """The global outcome of one iteration, the same on all ranks that know it; stored with that iteration's snapshot.

    grad_norm: the norm of all gradients before clipping, None where it was not computed. skipped: the optimizer did not
    step, because a gradient was not finite (then there is no norm) or their norm was above core's
    `grad_norm_skip_threshold`. lm_loss: the mean loss, known on the last pipeline stage, else None.
    num_tokens: of the global batch, by which gradients were divided; None where they are not.
    """

    grad_norm: float | None = None
    skipped: bool = False
    lm_loss: float | None = None
    num_tokens: int | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON values; floats exactly."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> StepJournal:
        """What `to_data` described. Raises KeyError, TypeError for something else."""
        return cls(data["grad_norm"], bool(data["skipped"]), data["lm_loss"], data.get("num_tokens"))
