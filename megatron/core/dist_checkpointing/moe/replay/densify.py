"""Sparse-to-dense conversion (MoEvement 3.3): iterations run again, and each one's snapshot thaws some operators.

A window of W snapshots holds every operator's master weights and moments once, but of W different iterations. Say W
is 3, and the window has group A in full after iteration 10, B after 11, C after 12, with the compute weights of the
groups that are still to come:

    restored    A in full, B and C compute weights only          as of iteration 10
    replay 11   A is trained, B and C are frozen: they take part in the forward pass, and gradients flow through them
    then load   B in full, C compute weights                     as of iteration 11: B is thawed
    replay 12   A and B are trained, C is frozen
    then load   C in full: the state is dense                    as of iteration 12

A's update in iteration 11 needs nothing of B and C but their compute weights: so it comes to the same bits as when
the iteration ran first, provided that the batch is the same, and that the norm by which gradients are clipped, a sum
over all operators, is taken from the journal. That is what `Replay` arranges and what `execution.py` carries out. After
each iteration it is compared with what was recorded when it ran first: the loss, the norm of gradients where it is not
taken from the journal, and, where some stages replay alone, fingerprints of all that they send to the others.

The driver's training loop runs the iterations, so that a replay is no second implementation of training.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import or_
from typing import Protocol, cast

from ..errors import MoECheckpointError, ReplayDiverged, UnreadableCheckpoint, UsageError
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
from ..replication.agreement import Group, merged, raise_on_all_ranks
from ..types import Direction, OperatorId, Part, StepJournal
from .execution import Subset

log = logging.getLogger(__name__)

Parts = Mapping[Part, Collection[OperatorId]]


class StageFeed(BoundarySource, Protocol):
    """What the stages outside sent in one iteration."""

    def check_all_taken(self) -> None:
        """After the iteration. Raises UnreadableCheckpoint when something was not received."""

    def differences(self) -> list[str] | None:
        """After the iteration: a sentence for each tensor that was sent to these stages and is not what they received
        when it ran first; None where not all of it could be compared."""


Logs = Mapping[Direction, Reader]
"""The open log of the neighbour on each side that takes no part."""


class Compared(enum.Enum):
    """What a rank can find a replayed iteration to be like when it ran first."""

    LOSS = "loss"
    NORM = "gradient norm"
    SENT = "what it sent"


@dataclass(frozen=True)
class SnapshotLoad:
    """What this rank takes from one sealed snapshot."""

    reader: Reader
    parts: Parts = field(repr=False)


@dataclass(frozen=True)
class ReplayStep:
    """One iteration that is run again, and what this rank loads after it.

    Attributes:
        iteration: Its number.
        frozen: Operators of all ranks that replay that take no update in it.
        journal: The outcome when it ran first.
        loads: What its snapshot gives this rank.
        trainer: A snapshot of it with this rank's trainer state, or the trainer scalars of any rank.
        logs: What reaches this rank from stages outside of the replay.
        outside: Operators of these that count as frozen, so that no gradients are computed for them.
        compares: Whether what is sent to these stages can be compared: all logs have fingerprints of it, and gradients
            flow on to them.
    """

    iteration: int
    frozen: frozenset[OperatorId] = field(repr=False)
    journal: StepJournal
    loads: tuple[SnapshotLoad, ...] = field(repr=False)
    trainer: Reader | Mapping[str, Json] = field(repr=False)
    logs: Logs = field(default_factory=dict, repr=False)
    outside: frozenset[OperatorId] = field(default=frozenset(), repr=False)
    compares: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplayPorts:
    """What a replay works with; `transport` is used by nobody else meanwhile.

    Attributes:
        boundary: Makes the source of received tensors of an iteration from its logs.
        ended: Called once the state is dense.
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
    others, and calls `stepped` after the optimizer's step of each.

    Args:
        ports: What it works with.
        steps: The iterations, ascending without a gap.
        operators: Number of operators of the stages that replay, for progress.
        tolerance: By which share a loss may differ from the recorded one; 0 asks for the same bits, also of what is
            sent.
        members: The ranks of these stages; all ranks where empty.
        unlogged: Iterations of which this rank's own boundary log is gone.
        compared: What was compared before `steps`, where the replay continues after another fault.

    Attributes:
        compared: By iteration, what this rank compared with what was recorded, and found alike.
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
        compared: Mapping[int, frozenset[Compared]] | None = None,
    ) -> None:
        self._ports, self._steps = ports, tuple(steps)
        self._operators, self._tolerance = operators, tolerance
        self.members, self.unlogged = tuple(members), frozenset(unlogged)
        self._done, self._begun_s = 0, 0.0
        self.compared: dict[int, frozenset[Compared]] = dict(compared or {})
        self._boundary: StageFeed | None = None
        # With single stages the other ranks of the job are doing something else: they must not be waited for.
        self._group: Group = ports.transport
        if members:
            self._group = Subset(ports.transport, members, "say how a replayed iteration came out")

    @property
    def alone(self) -> bool:
        """Whether other stages of the pipeline take no part."""
        return bool(self.members)

    @property
    def boundary(self) -> StageFeed | None:
        """The source of tensors of stages outside in the next iteration; None where all stages take part."""
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
        """The outcome of that one when it ran first."""
        return self._steps[self._done].journal

    def begin(self) -> None:
        """The base was restored: make its compute weights whole, and arm the first iteration."""
        self._begun_s = self._ports.clock.now_s()
        self._ports.restorer.refresh()
        self._arm()

    def stepped(self, outcome: StepJournal) -> None:
        """The iteration has been run again: load what its snapshot gives, and arm the next one, or thaw after the last.

        Raises:
            ReplayDiverged: On one of the ranks the outcome is not the recorded one; raised on all of them.
            StoreFailure: A snapshot cannot be read any more, which a restart finds out and plans around; likewise.
        """
        step = self._steps[self._done]
        # What this snapshot does not thaw is still frozen in the next iteration; after the last one nothing is.
        following = self._steps[self._done + 1].frozen if self._done + 1 < len(self._steps) else frozenset()
        # A rank that failed alone would leave the others waiting in the collectives of `refresh`.
        work, errors = partial(self._load_whole, step, outcome, following), (ReplayDiverged, StoreFailure)
        raise_on_all_ranks(self._group, work, errors)
        # The loaded masters' compute weights are derived now, and gathered: the next forward pass needs them whole.
        self._ports.restorer.refresh()
        self._done += 1
        self._log_progress(step, len(following))
        if self.is_done:
            # Training continues as before the fault: with overlap, with all parameters in the optimizer's lists.
            self._boundary = None
            self._ports.execution.thaw()
            self._ports.ended()
        else:
            self._arm()

    def is_interrupted(self, calls: bool) -> bool:
        """Between two iterations: whether the replay stops here for a fault of other stages, to continue in the next
        recovery; a collective over the ranks that replay alone. calls: whether this rank was told of one."""
        return self.alone and not self.is_done and merged(self._group, calls, bool, or_)

    def _arm(self) -> None:
        step, boundary = self._steps[self._done], self._ports.boundary
        if step.logs and boundary is None:
            raise UsageError("a replay needs boundary logs, but nothing was given that can read them")
        self._boundary = boundary(step.logs) if step.logs and boundary else None
        # Operators of stages outside count as frozen, so that no gradients are computed on their behalf.
        self._ports.execution.freeze(step.frozen | step.outside, step.journal, alone=self.alone)

    def _load_whole(self, step: ReplayStep, outcome: StepJournal, following: Collection[OperatorId]) -> None:
        """As `_load`. Raises ReplayDiverged, and StoreFailure for all that a replay from the beginning may mend."""
        try:
            self._load(step, outcome, following)
        except ReplayDiverged:
            raise
        except MoECheckpointError as error:
            raise StoreFailure(f"the replay has to begin again: {error}") from error

    def _load(self, step: ReplayStep, outcome: StepJournal, following: Collection[OperatorId]) -> None:
        # Before anything is overwritten: a replay that has diverged must not be taken for the state it was meant to be.
        compared = self._compare_outcome(step, outcome)
        if self._boundary is not None:  # tensors left in a log mean that it was written with other flags
            self._boundary.check_all_taken()
            compared |= self._compare_sent(step, self._boundary)
        if not isinstance(step.trainer, Mapping) and self._tolerance == 0:
            # A wrong scale shows in no loss of this iteration, but in those of later ones.
            differs = self._ports.trainer.difference(_trainer_tensors(step.trainer))
            if differs:
                raise _diverged(step, f"{differs} is not what was recorded")
        self.compared[step.iteration] = frozenset(compared)
        for load in step.loads:
            self._ports.restorer.restore(load.reader.read, load.parts)
        # Without a snapshot of this rank's own, random states are those that the iteration has just left behind.
        if isinstance(step.trainer, Mapping):
            self._ports.trainer.restore_common(step.trainer)
        else:
            restore_trainer(self._ports.trainer, step.trainer)
        # What the next iteration trains must be there in full; the operators still frozen then may hold NaN.
        if missing := self._ports.restorer.missing(following):
            raise UnreadableCheckpoint(missing)

    def _compare_outcome(self, step: ReplayStep, outcome: StepJournal) -> set[Compared]:
        """What the whole job knew of the iteration, as far as it is known here. Raises ReplayDiverged."""
        recorded, compared = step.journal, set[Compared]()
        if outcome.skipped != recorded.skipped:
            raise _diverged(step, f"it {_step_taken(outcome)}, recorded was that it {_step_taken(recorded)}")
        # Bit by bit by default: a loss depends on all weights, so it shows what earlier iterations got wrong.
        numbers = [(Compared.LOSS, outcome.lm_loss, recorded.lm_loss)]  # only the last stage knows it
        if not (step.frozen or self.alone):  # else the norm is the recorded one
            numbers.append((Compared.NORM, outcome.grad_norm, recorded.grad_norm))
        for kind, found, expected in numbers:
            if found is None or expected is None:
                continue
            if not _is_close(float(found), float(expected), self._tolerance):
                raise _diverged(step, f"it gave the {kind.value} {found!r}, recorded was {expected!r}")
            compared.add(kind)
        return compared

    def _compare_sent(self, step: ReplayStep, boundary: StageFeed) -> set[Compared]:
        """What went to stages that take no part. Raises ReplayDiverged."""
        differences = boundary.differences() if step.compares else None
        # Of fingerprints it cannot be said by how much they differ: with a tolerance only equal ones tell something.
        if differences and self._tolerance == 0:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            raise _diverged(step, f"{differences[0]}{more}")
        return {Compared.SENT} if differences == [] else set()

    def _log_progress(self, step: ReplayStep, frozen: int) -> None:
        """One line of progress on the first rank."""
        if self._ports.transport.rank != min(self.members, default=0):
            return
        left = len(self._steps) - self._done
        spent_s = self._ports.clock.now_s() - self._begun_s
        log.info(
            "replay: iteration %d (%d of %d), %d of %d operators active; %s",
            step.iteration,
            self._done,
            len(self._steps),
            self._operators - frozen,
            self._operators,
            f"about {left * spent_s / self._done:.1f} s left" if left else "the state is dense again",
        )


def restore_trainer(trainer: TrainerState, reader: Reader) -> None:
    """Put back the trainer state that a snapshot has.

    Args:
        trainer: Live state of this rank that belongs to no operator.
        reader: Of a snapshot that has the trainer's scalars and its random states.

    Raises:
        UnreadableCheckpoint: Some of it is missing or damaged.
    """
    scalars = reader.manifest.facts.scalars
    trainer.restore(cast("Mapping[str, Json]", scalars["trainer"]), _trainer_tensors(reader))


def _trainer_tensors(reader: Reader) -> dict[str, memoryview]:
    return {
        field.key.removeprefix(RANDOM): reader.read(field.key)
        for field in reader.manifest.layout.fields
        if field.operator is None and field.key.startswith(RANDOM)
    }


def _diverged(step: ReplayStep, what: str) -> ReplayDiverged:
    return ReplayDiverged(
        f"the replay of iteration {step.iteration} came out otherwise: {what}; the state would not be the one that was"
        " lost, so training does not continue from it (docs/gpu.md says what makes hardware repeat itself, and"
        " --moe-ckpt-replay-tolerance by how much losses may differ where it does not)"
    )


def _step_taken(step: StepJournal) -> str:
    return "skipped its optimizer step" if step.skipped else "made its optimizer step"


def _is_close(found: float, recorded: float, tolerance: float) -> bool:
    # A loss that was NaN when the iteration ran first has to be NaN again.
    if math.isnan(recorded) or math.isnan(found):
        return math.isnan(recorded) and math.isnan(found)
    return found == recorded or abs(found - recorded) <= tolerance * abs(recorded)
