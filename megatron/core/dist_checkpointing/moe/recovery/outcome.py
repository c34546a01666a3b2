"""What a recovery leaves a rank to do, what it has brought in the end, and why copies were refused on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..errors import MoECheckpointError
from ..policy.lineage import Lineage
from ..policy.tracking import RestoredState
from ..ports import Json, Reader, SnapshotId, Transport
from ..strategies import Piece
from ..types import RecoveryPlan, SnapshotPlan, StepJournal, Tier
from .inventory import CopyLocation
from .table import RecoveryTable


@dataclass(frozen=True)
class RecoveryOutcome:
    """A recovery that was carried out: training goes on after `plan.target`, whose snapshot has this timeline.

    Attributes:
        kept: Pieces of snapshots in the memory of all ranks, of windows only whole ones.
        persisted: Snapshots in storage, of all ranks, those of one window together.
        spare: Pieces in the memory of some ranks, by iteration and kind, to be kept until a newer snapshot is
            protected.
    """

    plan: RecoveryPlan
    timeline: Lineage
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

    Attributes:
        journal: How the step came out elsewhere.
        gradients: The rank's reduced gradients, verified; open until `Recovery.finish`.
        trainer: The trainer scalars of a rank that made the step.
    """

    iteration: int
    journal: StepJournal
    gradients: Reader = field(repr=False)
    trainer: Mapping[str, Json] = field(repr=False)


@dataclass(frozen=True)
class Waiting:
    """This rank runs no iteration again, and others come to the target on their own: then all call `Recovery.finish`.

    roll: what this rank needs to make one step first, if it is one of those that do; else its state is restored.
    """

    roll: RollForward | None = None


class RefusedCopies(MoECheckpointError):
    """A plan cannot be carried out because of these snapshots, with the reason for each."""

    def __init__(self, refused: Mapping[CopyLocation, str]) -> None:
        super().__init__("; ".join(refused.values()))
        self.refused = dict(refused)


class _RefusedRow(msgspec.Struct, array_like=True):
    finder: int
    snapshot: SnapshotId
    tier: Tier
    why: str


def gather_refused(transport: Transport, refused: Mapping[CopyLocation, str]) -> dict[CopyLocation, str]:
    """What any rank refuses, the same on all ranks; a collective. Raises PeerLost."""
    own = [_RefusedRow(finder, snapshot, tier, why) for (finder, snapshot, tier), why in refused.items()]
    gathered = msgspec.convert(transport.gather(msgspec.to_builtins(own)), list[list[_RefusedRow]])
    return {(row.finder, row.snapshot, row.tier): row.why for rows in gathered for row in rows}
