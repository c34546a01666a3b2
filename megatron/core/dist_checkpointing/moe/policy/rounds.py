"""What the ranks agree on about snapshots under way, from one small message of each rank in every iteration.

A round begins when a snapshot, or its persistent copy, is planned, which all ranks do alike. Each rank then reports how
far it has come; the least of these reports is what all have reached. So every rank learns the same news in the same
iteration, whatever the order in which things happen on it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..types import SnapshotPlan
from .copies import Level

MAX_OPEN_SNAPSHOTS = 2


class Status(enum.IntEnum):
    """How far a rank, or the least of all, has come with a round; the least value of several is the joint one."""

    FAILED = 0  # this rank's part does not exist and will not
    PENDING = 1
    SEALED = 2  # this rank's part is whole on its node, and on its way to peers
    EXPOSED = 3  # as sealed, but some peer did not take it and it is not tried again
    PROTECTED = 4  # all peers that were asked for verified it; or it is persistent

    @property
    def is_final(self) -> bool:
        """Whether it does not change any more."""
        return self not in (Status.PENDING, Status.SEALED)


@dataclass(frozen=True)
class Round:
    """A snapshot (or the part of one that becomes persistent) and how far all ranks are known to have come."""

    level: Level
    plan: SnapshotPlan
    agreed: Status = Status.PENDING

    @property
    def key(self) -> tuple[Level, int]:
        """What tells open rounds apart."""
        return self.level, self.plan.iteration


@dataclass(frozen=True)
class Rounds:
    """The open rounds, oldest first, and the newest plans that all ranks have sealed and protected in memory."""

    open: tuple[Round, ...] = ()
    sealed: SnapshotPlan | None = None
    protected: SnapshotPlan | None = None

    @property
    def may_begin(self) -> bool:
        """Whether another snapshot finds room: one is kept, one may be under way, one is coming (MoC 5.2).

        A persistent copy being written of a snapshot that is not the kept one any more takes the place of one.
        """
        kept = self.protected.iteration if self.protected else -1
        old = sum(one.level is Level.PERSIST and one.plan.iteration < kept for one in self.open)
        return sum(one.level is Level.SNAPSHOT for one in self.open) + old < MAX_OPEN_SNAPSHOTS

    def begun(self, level: Level, plan: SnapshotPlan) -> Rounds:
        """With one more round. Raises MoECheckpointError when it is open already."""
        round_ = Round(level, plan)
        if round_.key in [one.key for one in self.open]:
            raise MoECheckpointError(f"the {level.value} round of iteration {plan.iteration} is open already")
        return replace(self, open=(*self.open, round_))

    def after(self, agreed: Sequence[int]) -> tuple[Rounds, tuple[Round, ...]]:
        """The rounds after the least reports of all ranks, one per open round; and those with news.

        A round has news when all ranks have sealed it, and when it is final; it is closed then. Raises
        MoECheckpointError for another number of reports.
        """
        if len(agreed) != len(self.open):
            raise MoECheckpointError(f"{len(agreed)} reports for {len(self.open)} open rounds: the ranks lost step")
        now = [replace(one, agreed=Status(value)) for one, value in zip(self.open, agreed, strict=True)]
        news = tuple(one for one, old in zip(now, self.open, strict=True) if one.agreed is not old.agreed)
        sealed, protected = self.sealed, self.protected
        for one in news:
            if one.level is Level.SNAPSHOT and one.agreed >= Status.SEALED:
                sealed = _newer(sealed, one.plan)
            if one.level is Level.SNAPSHOT and one.agreed is Status.PROTECTED:
                protected = _newer(protected, one.plan)
        return Rounds(tuple(one for one in now if not one.agreed.is_final), sealed, protected), news


def _newer(one: SnapshotPlan | None, other: SnapshotPlan) -> SnapshotPlan:
    return other if one is None or other.iteration > one.iteration else one
