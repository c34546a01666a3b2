"""From what an earlier attempt left to the state that training goes on from, on one rank."""

from __future__ import annotations

import logging
from dataclasses import replace

from ..policy.parking import StepPhase
from ..policy.strategies import Strategy
from ..replay.densify import Replay
from ..snapshot.identity import Identity
from ..types import RecoveryPlan, StepJournal
from .recovery import Outcome, Recovery, Waiting
from .standby import Standby

log = logging.getLogger(__name__)


class Comeback:
    """What a rank does after a restart: it restores, runs iterations again, makes a step that it missed, or waits.

    Sequence: `look`; `carry_out` or `discard`; `begin`; `stepped` after each iteration while `is_replaying`; `rejoin`.
    """

    def __init__(
        self, recovery: Recovery, identity: Identity, strategy: Strategy, standby: Standby | None, rank: int
    ) -> None:
        self._recovery, self._identity, self._strategy = recovery, identity, strategy
        self._standby, self._rank = standby, rank
        self._replay: Replay | None = None
        self._waiting: Waiting | None = None
        self.outcome: Outcome | None = None
        """What came of it, once all stages stand where they stood."""

    @property
    def plan(self) -> RecoveryPlan | None:
        """What is being carried out."""
        return self._recovery.plan

    @property
    def is_replaying(self) -> bool:
        """Whether this rank still runs iterations again to make its state dense."""
        return self._replay is not None and not self._replay.is_done

    @property
    def replays_alone(self) -> bool:
        """Whether it does so while other stages of the pipeline wait."""
        return self._replay is not None and self._replay.alone

    @property
    def repeats_steps(self) -> bool:
        """Whether any rank runs iterations, or steps, again; the same on all."""
        plan = self.plan
        return plan is not None and (any(one.replayed for one in plan.segments) or bool(plan.roll_forward))

    @property
    def is_own(self) -> bool:
        """Whether what is planned is a state that this very job left."""
        return self._recovery.is_own

    @property
    def unusable(self) -> str:
        """Why snapshots in storage cannot be used by this job; empty if there are none of that kind."""
        return self._recovery.unusable

    def logs(self, iteration: int) -> bool:
        """Whether what this rank sends in an iteration is to be logged: not where that is in its logs already."""
        return self._replay is None or iteration in self._replay.unlogged

    def look(self) -> RecoveryPlan | None:
        """See `Recovery.look`."""
        return self._recovery.look()

    def discard(self) -> None:
        """See `Recovery.discard`."""
        self._recovery.discard()

    def carry_out(self) -> Outcome | Replay | Waiting | None:
        """See `Recovery.carry_out`."""
        done = self._recovery.carry_out()
        if isinstance(done, Replay):
            self._replay = done
        elif isinstance(done, Waiting):
            self._waiting = done
        elif done is not None:
            self._came_back(done)
        return done

    def begin(self, iteration: int) -> bool:
        """Make ready, at this iteration, for what comes before all stages stand together; whether there is anything."""
        if self._replay is not None:
            self._stand(iteration, StepPhase.REPLAYING)
            self._replay.begin()
            self._feed()
        elif self._waiting is not None:
            self._roll_forward(self._waiting)
            self._stand(self._target, StepPhase.REJOINING)
        return self._replay is not None or self._waiting is not None

    def stepped(self, step: StepJournal) -> None:
        """An iteration was run again. Raises MoECheckpointError when it came out otherwise than recorded."""
        assert self._replay is not None
        iteration, recorded = self._replay.iteration, self._replay.journal
        self._replay.stepped(step)
        if self._standby is not None:
            journal = replace(recorded, lm_loss=step.lm_loss)
            self._standby.replayed(iteration, journal, logged=iteration in self._replay.unlogged)
        self._feed()

    def rejoin(self) -> Outcome:
        """Wait until all stages stand where the others do."""
        moved = self._replay is not None or (self._waiting is not None and self._waiting.roll is not None)
        if moved and self._standby is not None:
            # Here too the next replay should not have to begin before this state.
            self._recovery.let_go()  # all is read, and what is parked now needs the room of what was parked before
            self._stand(self._target, StepPhase.REJOINING)
            if told := self._standby.park_anew(self._strategy.to_data()):
                log.warning("rank %d: %s", self._rank, told)
        outcome = self._recovery.finish()
        self._replay = self._waiting = None
        self._came_back(outcome)
        return outcome

    @property
    def _target(self) -> int:
        assert self.plan is not None
        return self.plan.target

    def _came_back(self, outcome: Outcome) -> None:
        self.outcome = outcome
        for line in outcome.table.lines() if self._rank == 0 else ():
            log.info("%s", line)

    def _stand(self, iteration: int, phase: StepPhase) -> None:
        """What is parked or logged now belongs to the past that is being recovered."""
        if self._standby is not None:
            identity = replace(self._identity, timeline=self._recovery.timeline)
            self._standby.attend(identity, iteration, phase)
            self._standby.fit(self._strategy.lookback)

    def _feed(self) -> None:
        """What stages outside of the replay sent comes from their logs."""
        if self._standby is not None and self._replay is not None:
            self._standby.communicator.source = self._replay.boundary

    def _roll_forward(self, waiting: Waiting) -> None:
        """Apply the gradients that this rank kept, if the plan says so: it was one step behind the others."""
        roll = waiting.roll
        if roll is not None:
            assert self._standby is not None
            self._stand(roll.iteration - 1, StepPhase.ROLLING_FORWARD)
            self._standby.roll_forward(roll)
