"""What the ranks agree on about snapshots under way, from one small message of each rank in every iteration.

A round begins when a snapshot, or its persistent copy, is planned, which all ranks do alike. Each rank then reports how
far it has come; the least of these reports is what all have reached. So every rank learns the same news in the same
iteration, whatever the order in which things happen on it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..types import SnapshotPlan
from .copies import Level

MAX_OPEN_SPANS = 2
"""Spans of snapshots under way at a time: one is being copied, one may still be replicated (MoC 5.2)."""

PLACES = 3
"""Spans of one kind that memory has room for: those under way, and one that is kept until then."""

Held = tuple[str, range]
"""Kind and span of a piece in memory."""


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
    """A snapshot (or the part of one that becomes persistent) and how far all ranks are known to have come.

    span: of iterations whose snapshots restore a state together.
    """

    level: Level
    plan: SnapshotPlan
    agreed: Status = Status.PENDING
    span: range = range(0)

    @property
    def key(self) -> tuple[Level, int]:
        """What tells open rounds apart."""
        return self.level, self.plan.iteration


@dataclass(frozen=True)
class Rounds:
    """The open rounds, oldest first, and the windows: spans that were begun, of which more is to come or still open.

    newest: iteration of the newest snapshot that was begun.
    """

    open: tuple[Round, ...] = ()
    windows: tuple[range, ...] = ()
    newest: int = -1

    @property
    def spans(self) -> frozenset[range]:
        """Spans of snapshots under way, those that are given up among them as long as a round of theirs is open."""
        return frozenset((*self.windows, *(one.span for one in self.open if one.level is Level.SNAPSHOT)))

    def continues(self, iteration: int) -> bool:
        """Whether a snapshot of this iteration belongs to a window that was begun and not given up."""
        return any(iteration in span for span in self.windows)

    def may_begin(self, iteration: int, held: Collection[Held] = ()) -> bool:
        """Whether a snapshot of this iteration finds room, beside pieces of these kinds and spans in memory.

        A window that was begun has its room. For a new one, of each kind one span is kept, one may be under way, one
        is coming (MoC 5.2); what lacks replicas, or is still being persisted, takes the place of one.
        """
        if self.continues(iteration):
            return True
        taken = Counter(kind for kind, _ in set(held))
        return len(self.spans) < MAX_OPEN_SPANS and max(taken.values(), default=0) < PLACES

    def begun(self, level: Level, plan: SnapshotPlan, span: range = range(0)) -> Rounds:
        """With one more round; `span` of its snapshot, by itself if empty.

        Raises MoECheckpointError when it is open already.
        """
        round_ = Round(level, plan, span=span or range(plan.iteration, plan.iteration + 1))
        if round_.key in [one.key for one in self.open]:
            raise MoECheckpointError(f"the {level.value} round of iteration {plan.iteration} is open already")
        rounds = replace(self, open=(*self.open, round_))
        if level is not Level.SNAPSHOT:
            return rounds
        windows = self.windows if round_.span in self.windows else (*self.windows, round_.span)
        return replace(rounds, windows=windows, newest=plan.iteration)

    def after(self, agreed: Sequence[int]) -> tuple[Rounds, tuple[Round, ...]]:
        """The rounds after the least reports of all ranks, one per open round; and those with news.

        A round has news when all ranks have sealed it, and when it is final; it is closed then. One that has failed
        ends its window. Raises MoECheckpointError for another number of reports.
        """
        if len(agreed) != len(self.open):
            raise MoECheckpointError(f"{len(agreed)} reports for {len(self.open)} open rounds: the ranks lost step")
        now = [replace(one, agreed=Status(value)) for one, value in zip(self.open, agreed, strict=True)]
        news = tuple(one for one, old in zip(now, self.open, strict=True) if one.agreed is not old.agreed)
        still = tuple(one for one in now if not one.agreed.is_final)
        snapshots = [one for one in now if one.level is Level.SNAPSHOT]
        ended = {one.span for one in snapshots if one.agreed is Status.FAILED}
        under_way = {one.span for one in still if one.level is Level.SNAPSHOT}
        windows = tuple(
            span for span in self.windows if span not in ended and (span in under_way or self.newest < span[-1])
        )
        return Rounds(still, windows, self.newest), news
