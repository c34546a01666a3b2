"""What a replay of an iteration cannot compute from a part of the state, and what it must come out with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .topology import Topology


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


@dataclass(frozen=True)
class WaitReport:
    """What became of the waits of a rank's stage since the last report; of a whole stage the mean of its ranks.

    Args:
        waited_s: measured, in the newest passes; 0 where they are not known yet.
        estimated_s: of the same passes, by the pipeline's schedule and what this stage computed; 0: not known.
        passes_s: from their begin to their end.
        copied_bytes, sent_bytes: that began in waits.
        overrun_s: by how much the latest of these chunks ended after the wait in which it began; 0 on devices, where
            the host does not see it.
    """

    waited_s: float = 0.0
    estimated_s: float = 0.0
    passes_s: float = 0.0
    copied_bytes: int = 0
    sent_bytes: int = 0
    overrun_s: float = 0.0

    def to_numbers(self, topology: Topology, rank: int) -> tuple[int, ...]:
        """Integers whose sums over all ranks `of_stages` takes."""
        numbers = [0] * (len(_FIELDS) * topology.pp)
        first = len(_FIELDS) * topology.coordinates(rank).pp
        for at, name in enumerate(_FIELDS, first):
            value = getattr(self, name)
            numbers[at] = round(value * _PER_S) if name.endswith("_s") else value
        return tuple(numbers)

    @classmethod
    def of_stages(cls, sums: Sequence[int], topology: Topology) -> tuple[WaitReport, ...]:
        """Of each pipeline stage, from the sums of what all ranks sent; none from no numbers."""
        ranks, found = topology.world_size // topology.pp, []
        per_s = ranks * _PER_S
        for first in range(0, len(sums), len(_FIELDS)):
            waited, estimated, passes, copied, sent, overrun = sums[first : first + len(_FIELDS)]
            means = waited / per_s, estimated / per_s, passes / per_s, copied // ranks, sent // ranks, overrun / per_s
            found.append(cls(*means))
        return tuple(found)


_FIELDS = tuple(field.name for field in fields(WaitReport))


_PER_S = 1e6
