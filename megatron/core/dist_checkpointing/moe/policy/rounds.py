"""What the ranks agree on about snapshots under way, from one small message of each rank in every iteration.

A commit round begins when a snapshot, or its persistent copy, is planned, which all ranks do alike. Each rank then
reports how far it has come; the least of these reports is what all have reached. So every rank learns the same in the
same iteration, whatever the order in which things happen on it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..types import SnapshotPlan
from .copies import Level

MAX_OPEN_SPANS = 2
"""Spans of snapshots under way at a time: one is being copied, one may still be replicated (MoC 5.2)."""

PLACES = 3
"""Spans of one kind that memory has room for: those under way, and one that is kept until then."""


class Status(enum.IntEnum):
    """How far a rank, or the least of all, has come with a round; the least value of several is the joint one."""

    FAILED = 0  # this rank's part does not exist and will not
    PENDING = 1
    SEALED = 2  # this rank's part is whole on its node, and on its way to peers
    UNDER_REPLICATED = 3  # as sealed, but some peer did not take it and it is not tried again
    PROTECTED = 4  # all peers that were asked for verified it; or it is persistent

    @property
    def is_final(self) -> bool:
        """Whether it does not change any more."""
        return self not in (Status.PENDING, Status.SEALED)


@dataclass(frozen=True)
class CommitRound:
    """A snapshot (or the part of one that becomes persistent) and how far all ranks are known to have come.

    Args:
        span: the iterations whose snapshots restore a state together with this one.
    """

    level: Level
    plan: SnapshotPlan
    span: range
    agreed: Status = Status.PENDING

    @property
    def key(self) -> tuple[Level, int]:
        """What tells open rounds apart."""
        return self.level, self.plan.iteration


@dataclass(frozen=True)
class CommitRounds:
    """The open rounds, oldest first."""

    open: tuple[CommitRound, ...] = ()

    def begun(self, level: Level, plan: SnapshotPlan, span: range) -> CommitRounds:
        """With one more round. Raises MoECheckpointError when it is open already."""
        round_ = CommitRound(level, plan, span)
        if round_.key in [known.key for known in self.open]:
            raise MoECheckpointError(f"the {level.value} round of iteration {plan.iteration} is open already")
        return CommitRounds((*self.open, round_))

    def after(self, agreed: Sequence[int]) -> tuple[CommitRounds, tuple[CommitRound, ...]]:
        """The rounds after the least reports of all ranks, one per open round.

        Returns:
            The rounds that are still open, and those that came farther: a round is closed when its status is final.

        Raises:
            MoECheckpointError: for another number of reports than there are rounds.
        """
        if len(agreed) != len(self.open):
            raise MoECheckpointError(f"{len(agreed)} reports for {len(self.open)} open rounds: the ranks lost step")
        now = [replace(round_, agreed=Status(value)) for round_, value in zip(self.open, agreed, strict=True)]
        updates = tuple(new for new, old in zip(now, self.open, strict=True) if new.agreed is not old.agreed)
        return CommitRounds(tuple(round_ for round_ in now if not round_.agreed.is_final)), updates
