"""What a rank does between its restart and the iteration at which all ranks train again.

After `Recovery.carry_out` the ranks of a job may stand apart: those of the stages that lost their state have to run
iterations again (a Replay), a rank that missed one step makes it with the gradients that it had kept (a roll forward),
the others wait with the state that they had parked. Each does its part alone, in any order, and all meet in `rejoin`.

A second fault may strike meanwhile. So from its own target on each rank parks, and logs, under the timeline that is
being recovered: what is kept then belongs to the past of this recovery and not to an attempt of its own, and the next
restart can use it. Within a replay or a roll forward a rank keeps nothing: what it began from is still sealed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import ReplayDiverged
from ..local_recovery.survivor import Survivor
from ..policy.parking import StepPhase
from ..recovery.recovery import Recovery, RecoveryOutcome, Waiting
from ..replay.densify import Replay
from ..snapshot.identity import Identity
from ..strategies import Strategy
from ..types import StepJournal

log = logging.getLogger(__name__)


class RestartSequence:
    """Sequence: `assign` what `Recovery.carry_out` gave; `prepare`; `replayed` after each iteration while
    `is_replaying`; `rejoin`. Without a recovery there is nothing to assign, and `prepare` says so.

    survivor: what parks and logs on this rank; None where faults roll back all stages.
    """

    def __init__(
        self, recovery: Recovery, identity: Identity, strategy: Strategy, survivor: Survivor | None, rank: int
    ) -> None:
        self._recovery, self._identity, self._strategy = recovery, identity, strategy
        self._survivor, self._rank = survivor, rank
        self._todo: Replay | Waiting | None = None
        self.outcome: RecoveryOutcome | None = None
        """What came of it, once all ranks stand where they stood."""

    def assign(self, result: RecoveryOutcome | Replay | Waiting | None) -> None:
        """What this rank has to do."""
        if isinstance(result, RecoveryOutcome):
            self._end(result)
        else:
            self._todo = result

    @property
    def replay(self) -> Replay | None:
        """The iterations that this rank runs again, up to `rejoin`."""
        return self._todo if isinstance(self._todo, Replay) else None

    @property
    def is_replaying(self) -> bool:
        """Whether some of them are still to be run."""
        return self.replay is not None and not self.replay.is_done

    @property
    def repeats_steps(self) -> bool:
        """Whether any rank runs iterations, or steps, again; the same on all."""
        plan = self._recovery.plan
        return plan is not None and (any(segment.replayed for segment in plan.segments) or bool(plan.roll_forward))

    def prepare(self, iteration: int) -> bool:
        """Arm the replay, from `iteration` on, or roll forward; whether `rejoin` has to follow."""
        if self.replay is not None:
            self._attend(iteration, StepPhase.REPLAYING)
            self.replay.begin()
            self._feed()
        elif isinstance(self._todo, Waiting):
            if self._todo.roll is not None:
                assert self._survivor is not None
                self._attend(self._todo.roll.iteration - 1, StepPhase.ROLLING_FORWARD)
                self._survivor.roll_forward(self._todo.roll)
            self._attend(self._target, StepPhase.REJOINING)
        return self._todo is not None

    def replayed(self, step: StepJournal) -> None:
        """An iteration was run again. Raises ReplayDiverged when it came out otherwise than recorded."""
        replay = self.replay
        assert replay is not None
        iteration, recorded = replay.iteration, replay.journal
        try:
            replay.stepped(step)
        except ReplayDiverged as error:
            self._recovery.note_divergence(iteration, str(error))
            raise
        if self._survivor is not None:
            journal = replace(recorded, lm_loss=step.lm_loss)
            self._survivor.replayed(iteration, journal, logged=iteration in replay.unlogged)
        self._feed()

    def rejoin(self) -> RecoveryOutcome:
        """Wait until all ranks stand at the target. Raises PeerLost."""
        waited = isinstance(self._todo, Waiting) and self._todo.roll is None
        if not waited and self._survivor is not None:
            # Here too the next replay should not have to begin before this state.
            self._recovery.close()  # all is read, and what is parked now needs the memory of what was parked before
            self._attend(self._target, StepPhase.REJOINING)
            if problem := self._survivor.park_anew(self._strategy.to_data()):
                log.warning("rank %d: %s", self._rank, problem)
        outcome = self._recovery.finish(self.replay)
        self._todo = None
        self._end(outcome)
        return outcome

    @property
    def _target(self) -> int:
        assert self._recovery.plan is not None
        return self._recovery.plan.target

    def _end(self, outcome: RecoveryOutcome) -> None:
        self.outcome = outcome
        for line in outcome.table.lines() if self._rank == 0 else ():
            log.info("%s", line)

    def _attend(self, iteration: int, phase: StepPhase) -> None:
        """What is parked or logged now belongs to the past that is being recovered."""
        if self._survivor is not None:
            identity = replace(self._identity, timeline=self._recovery.timeline)
            self._survivor.attend(identity, iteration, phase)
            self._survivor.fit(self._strategy.lookback)

    def _feed(self) -> None:
        """What stages outside of the replay sent comes from their logs."""
        if self._survivor is not None and self.replay is not None:
            self._survivor.communicator.source = self.replay.boundary
