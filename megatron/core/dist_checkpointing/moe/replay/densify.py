"""Sparse-to-dense conversion (MoEvement 3.3): iterations run again, and each one's snapshot thaws some operators."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from ..errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from ..ports import (
    RANDOM,
    BoundarySource,
    Clock,
    Execution,
    Json,
    Reader,
    Restorer,
    StoreFailure,
    TrainerState,
    Transport,
)
from ..types import Direction, OperatorId, Part, StepJournal
from .among import Among

log = logging.getLogger(__name__)

Parts = Mapping[Part, Collection[OperatorId]]


class StageFeed(BoundarySource, Protocol):
    """What the stages outside sent in one iteration."""

    def check_all_taken(self) -> None:
        """After the iteration. Raises UnreadableCheckpoint when something was not received."""


Logs = Mapping[Direction, Reader]
"""The open log of the neighbour on each side that takes no part."""


class ReplayDiverged(MoECheckpointError):
    """A replayed iteration came out otherwise than it was recorded: going on would not be exact."""


@dataclass(frozen=True)
class SnapshotLoad:
    """What this rank takes from one sealed snapshot."""

    reader: Reader
    parts: Parts = field(repr=False)


@dataclass(frozen=True)
class ReplayStep:
    """One iteration that is run again, and what this rank loads after it.

    frozen: operators of all ranks that replay that take no update in it. journal: how it came out. loads: what its
    snapshot gives this rank. trainer: a snapshot of it with this rank's trainer state, or the trainer scalars of any
    rank. logs: what reaches this rank from stages outside of the replay. outside: operators of these that count as
    frozen, so that no gradients are computed for them.
    """

    iteration: int
    frozen: frozenset[OperatorId] = field(repr=False)
    journal: StepJournal
    loads: tuple[SnapshotLoad, ...] = field(repr=False)
    trainer: Reader | Mapping[str, Json] = field(repr=False)
    logs: Logs = field(default_factory=dict, repr=False)
    outside: frozenset[OperatorId] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class ReplayPorts:
    """What a replay works with; `transport` is used by nobody else meanwhile.

    boundary: makes what feeds an iteration from its logs. ended: called once the state is dense.
    """

    restorer: Restorer
    trainer: TrainerState
    execution: Execution
    transport: Transport
    clock: Clock
    boundary: Callable[[Logs], StageFeed] | None = None
    ended: Callable[[], None] = lambda: None


class Replay:
    """Makes the state that was restored as of the iteration before `steps[0]` dense, as of that of `steps[-1]`.

    Sequence, each a collective over the ranks that replay together: `begin`; then training runs the iterations as any
    others, and calls `stepped` after the optimizer's step of each. operators: of the stages that replay. tolerance: by
    which share a loss may differ from the recorded one. members: the ranks of these stages; all ranks where empty.
    unlogged: iterations of which this rank's own boundary log is gone.
    """

    def __init__(
        self,
        ports: ReplayPorts,
        steps: Sequence[ReplayStep],
        operators: int,
        tolerance: float = 0.0,
        *,
        members: Sequence[int] = (),
        unlogged: Collection[int] = (),
    ) -> None:
        self._ports, self._steps = ports, tuple(steps)
        self._operators, self._tolerance = operators, tolerance
        self.members, self.unlogged = tuple(members), frozenset(unlogged)
        self._done = 0
        self._begun_s = 0.0
        self._boundary: StageFeed | None = None
        self._gather = ports.transport.gather
        if members:
            self._gather = Among(ports.transport, members, "say how a replayed iteration came out").gather

    @property
    def alone(self) -> bool:
        """Whether other stages of the pipeline take no part."""
        return bool(self.members)

    @property
    def boundary(self) -> StageFeed | None:
        """What feeds the next iteration from outside; None where everything is received really."""
        return self._boundary

    @property
    def is_done(self) -> bool:
        """Whether the state is dense."""
        return self._done == len(self._steps)

    @property
    def iterations(self) -> range:
        """The iterations that are run again."""
        return range(self._steps[0].iteration, self._steps[-1].iteration + 1)

    @property
    def iteration(self) -> int:
        """The iteration that is run next."""
        return self._steps[self._done].iteration

    @property
    def journal(self) -> StepJournal:
        """How that one came out when it ran first."""
        return self._steps[self._done].journal

    def begin(self) -> None:
        """The base was restored: make its compute weights whole, and arm the first iteration."""
        self._begun_s = self._ports.clock.now_s()
        self._ports.restorer.refresh()
        self._arm()

    def stepped(self, outcome: StepJournal) -> None:
        """The iteration has been run again: load what its snapshot gives, and arm the next one, or thaw after the last.

        Raises, on all ranks alike, ReplayDiverged when the iteration did not come out as it was recorded on one of
        them, and StoreFailure when a snapshot cannot be read any more, which a restart finds out and goes around.
        """
        step = self._steps[self._done]
        following = self._steps[self._done + 1].frozen if self._done + 1 < len(self._steps) else frozenset()
        self._together(lambda: self._take(step, outcome, following))
        self._ports.restorer.refresh()
        self._done += 1
        self._tell(step, len(following))
        if self.is_done:
            self._boundary = None
            self._ports.execution.thaw()
            self._ports.ended()
        else:
            self._arm()

    def _arm(self) -> None:
        step, boundary = self._steps[self._done], self._ports.boundary
        if step.logs and boundary is None:
            raise UsageError("a replay is to be fed from logs, but nothing was given that can read them")
        self._boundary = boundary(step.logs) if step.logs and boundary else None
        self._ports.execution.freeze(step.frozen | step.outside, step.journal, alone=self.alone)

    def _take(self, step: ReplayStep, outcome: StepJournal, following: Collection[OperatorId]) -> None:
        self._compare(step, outcome)
        if self._boundary is not None:
            self._boundary.check_all_taken()
        for load in step.loads:
            self._ports.restorer.restore(load.reader.read, load.parts)
        if isinstance(step.trainer, Mapping):
            self._ports.trainer.restore_common(step.trainer)
        else:
            restore_trainer(self._ports.trainer, step.trainer)
        if lacking := self._ports.restorer.missing(following):
            raise UnreadableCheckpoint(lacking)

    def _compare(self, step: ReplayStep, outcome: StepJournal) -> None:
        recorded = step.journal
        if outcome.skipped != recorded.skipped:
            raise ReplayDiverged(
                f"the replay of iteration {step.iteration} {_did(outcome)}, recorded was that it {_did(recorded)}:"
                " the state would not be the one that was lost, so training does not go on"
            )
        if recorded.lm_loss is None or outcome.lm_loss is None:
            return
        if not _is_close(outcome.lm_loss, recorded.lm_loss, self._tolerance):
            raise ReplayDiverged(
                f"the replay of iteration {step.iteration} gave the loss {outcome.lm_loss!r}, recorded was"
                f" {recorded.lm_loss!r}: the state would not be the one that was lost, so training does not go on; on"
                " hardware that does not repeat itself exactly, say with --moe-ckpt-replay-tolerance how much the two"
                " may differ"
            )

    def _together(self, action: Callable[[], None]) -> None:
        """Do it here; what fails on one rank is raised on all, before the next collective of training."""
        told: list[Json] = ["", ""]
        try:
            action()
        except ReplayDiverged as error:
            told = ["diverged", str(error)]
        except MoECheckpointError as error:
            told = ["unreadable", str(error)]
        answers = [cast("list[str]", one) for one in self._gather(told)]
        for rank, (kind, why) in zip(self.members or range(len(answers)), answers, strict=True):
            if kind == "diverged":
                raise ReplayDiverged(why)
            if kind:
                raise StoreFailure(f"rank {rank}: the replay has to begin anew: {why}")

    def _tell(self, step: ReplayStep, frozen: int) -> None:
        """One line of progress on the first rank."""
        if self._ports.transport.rank != min(self.members, default=0):
            return
        left = len(self._steps) - self._done
        spent_s = self._ports.clock.now_s() - self._begun_s
        log.info(
            "replayed iteration %d (%d of %d): %d of %d operators are active; %s",
            step.iteration,
            self._done,
            len(self._steps),
            self._operators - frozen,
            self._operators,
            f"about {left * spent_s / self._done:.1f} s left" if left else "the state is dense again",
        )


def restore_trainer(trainer: TrainerState, reader: Reader) -> None:
    """Put back the trainer state that a snapshot has. Raises UnreadableCheckpoint."""
    scalars = reader.manifest.facts.scalars
    tensors = {
        one.key.removeprefix(RANDOM): reader.read(one.key)
        for one in reader.manifest.layout.fields
        if one.operator is None and one.key.startswith(RANDOM)
    }
    trainer.restore(cast("Mapping[str, Json]", scalars["trainer"]), tensors)


def _did(step: StepJournal) -> str:
    return "skipped its optimizer step" if step.skipped else "made its optimizer step"


def _is_close(found: float, recorded: float, tolerance: float) -> bool:
    if math.isnan(recorded) or math.isnan(found):
        return math.isnan(recorded) and math.isnan(found)
    return found == recorded or abs(found - recorded) <= tolerance * abs(recorded)
