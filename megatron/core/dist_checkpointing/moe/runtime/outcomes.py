"""What a recovery leaves a rank to do, and what it has brought in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..policy.strategies import Piece
from ..policy.timelines import Timeline
from ..policy.tracking import RestoredState
from ..ports import Json, Reader
from ..recover.table import RecoveryTable
from ..types import RecoveryPlan, SnapshotPlan, StepJournal


@dataclass(frozen=True)
class Outcome:
    """A recovery that was carried out: training goes on after `plan.target`, whose snapshot has this timeline.

    kept: pieces of snapshots in the memory of all ranks, of windows only whole ones. persisted: snapshots in storage,
    of all ranks, those of one window together. spare: pieces in the memory of some ranks, by iteration and kind, to be
    kept until a newer snapshot is protected.
    """

    plan: RecoveryPlan
    timeline: Timeline
    kept: tuple[Piece, ...]
    persisted: tuple[tuple[SnapshotPlan, ...], ...]
    spare: frozenset[tuple[int, str]]
    table: RecoveryTable = field(repr=False)

    @property
    def restored(self) -> RestoredState:
        """What protection goes on from."""
        return RestoredState(self.plan.target, self.kept, self.persisted, self.spare)


@dataclass(frozen=True)
class RollForward:
    """What a rank needs to make the step of `iteration` from its parked state of the one before.

    journal: how the step came out elsewhere. gradients: its reduced gradients, verified; open until `finish`. trainer:
    the scalars of a rank that made the step.
    """

    iteration: int
    journal: StepJournal
    gradients: Reader = field(repr=False)
    trainer: Mapping[str, Json] = field(repr=False)


@dataclass(frozen=True)
class Waiting:
    """This rank runs no iteration again, and others come to the target on their own: then all call `finish`.

    replaying: ranks that run iterations again. rolling: ranks that make one step of which they have the gradients.
    roll: what this rank needs for that, if it is one of them; else its state is restored already.
    """

    replaying: tuple[int, ...]
    rolling: tuple[int, ...]
    roll: RollForward | None = None
