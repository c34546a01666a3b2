"""Checkpointing of one training process from start to end: real ports around the coordinator and the recovery.

A session has two halves. The first brings the job back: `look` and `carry_out` restore what an earlier attempt left
(`recovery`), and a `RestartSequence` runs iterations again, rolls forward or waits, until `rejoin` finds all ranks at
one iteration. From there on the second half protects training: a `Coordinator` makes, replicates and persists
snapshots, and a `Survivor` logs what goes over stage boundaries and parks this rank's state when a peer is lost.

What ranks do here together is done in one order on all of them, or it hangs: nearly every step of the constructor, and
each call of the first half, is a collective over the session's own transports, never over training's groups.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ..config import MoECheckpointConfig
from ..local_recovery.communicator import BoundaryCommunicator
from ..policy.parking import Cause
from ..recovery.kept_state import keep
from ..recovery.recovery import RecoveryOutcome, Waiting
from ..recovery.timeline import Milestone, RecoveryTimeline, Timestamps, forget, gather_timeline
from ..replay.densify import Replay
from ..resharding.windows import OlderWindow
from ..snapshot.coordinator import ProtectionReport
from ..types import RecoveryPlan, StepJournal
from .leases import Leases
from .live_state import Training
from .peer_links import PeerLinks
from .process_info import ProcessInfo
from .protected_training import ProtectedTraining
from .session_parts import SessionParts

log = logging.getLogger(__name__)


class Session:
    """What a training loop calls, and when; `Unprotected` has the same members for jobs without a strategy.

    ============================ =====================================================================================
    constructor                  once all ranks are connected, model and optimizer are built
    `look`                       before training: a plan, `is_own` and `unusable` say more of it
    `carry_out`                  to restore what is planned; None: it failed, and live state is unusable
    `clear_counters`, `refresh`  before and after a dense checkpoint is loaded instead
    `discard`                    when training begins from there, or from scratch
    `older_window`               else: what was made in another layout and can be run again there, with `copy_older`;
                                 `take_over` when training begins from that
    `repeats_steps`              then: are flags that shape iterations the same as before?
    `communicator`               for pipeline schedules, from here on
    `begin`                      before the first iteration, with the iteration after which training stands
    `is_replaying`               while it is true, iterations are run that end with `stepped`; nothing may be saved;
                                 `replays_alone`: and nothing computed with other pipeline stages
    `rejoin`                     then: whether there was a recovery; `episode`, `unreported` are facts of it
    `passes`                     each iteration: before its passes
    `reduced`                    when they are over, and gradients reduced
    `before_optimizer`           before the optimizer's step: the seconds that it waited
    `stepping`                   a block around that step and what belongs to it
    `whole`                      when the state after the iteration is complete
    `step_end`                   when checkpoints and evaluation are done: protect it (`stepped` in a replay)
    `report`, `reported`         to write the iteration's numbers down, and after that
    `job_id`                     of this job, in all its attempts
    `leases`                     of the places that this job writes to: checked in each iteration, and let go at the end
    `interrupt`, `links`         for the watcher of this process: connections are about to be given up
    `failure`                    on each rank where training ends with an error
    `abandon`                    after that, where this process stays and makes another session
    `shutdown`                   on all ranks, where it ends well
    ============================ =====================================================================================

    The calls up to `rejoin`, `step_end` and `shutdown` are collectives over all ranks; those that a replay makes, over
    the ranks that replay together.
    """

    protects = True

    def __init__(
        self, config: MoECheckpointConfig, training: Training, place: ProcessInfo, timestamps: Timestamps | None = None
    ) -> None:
        """Raises UsageError, on all ranks alike, for flags, models and folders that cannot work."""
        self._parts = SessionParts(config, training, place, timestamps or Timestamps())
        self._recovery, self._restart = self._parts.recovery, self._parts.restart
        self._survivor, self._timestamps = self._parts.survivor, self._parts.timestamps
        self._protection: ProtectedTraining | None = None
        self._episode: RecoveryTimeline | None = None

    def refresh(self) -> None:
        """Enumerate the training state anew, as is needed after a checkpoint was loaded in another way."""
        self._parts.state.refresh()
        self._recovery.restore_through(self._parts.state.restorer)
        if self._survivor is not None:
            self._survivor.live = self._parts.state.live

    def look(self) -> RecoveryPlan | None:
        """What an earlier attempt left and what can be made of it; None when that is nothing."""
        return self._recovery.look()

    def carry_out(self) -> RecoveryOutcome | Replay | Waiting | None:
        """Restore what `look` planned; None when all copies proved damaged: then the live state is unusable.

        A Replay where iterations have to be run again before the state is dense, on the ranks of the stages that do;
        Waiting on the others, if there are any.
        """
        result = self._recovery.carry_out()
        self._restart.assign(result)
        return result

    def discard(self) -> None:
        """Training goes on from another state than any in memory: all that is there is freed."""
        self._parts.older.discard()
        self._discard_own()

    def _discard_own(self) -> None:
        """Free what is in memory in the layout of this job."""
        self._recovery.discard()  # also anew: what the strategy learned from a recovery that came to nothing
        self._parts.renew_strategy()

    def older_window(self) -> OlderWindow | None:
        """A sparse window of another layout that can be run again there; the same on all ranks. A collective."""
        own = self._parts.older.window
        found = self._parts.control.gather(asdict(own) if own is not None else None)[0]
        return OlderWindow(**cast("dict[str, Any]", found)) if found is not None else None

    def copy_older(self, folder: Path) -> None:
        """Copy what other layouts left and is not damaged to a folder, as storage has it; on one rank. Raises
        StoreFailure."""
        self._parts.older.copy_to(folder)

    def take_over(self, iteration: int) -> None:
        """As `discard`, where training goes on from the state of another layout after `iteration`: what that layout
        left in memory stays until a snapshot of this one is protected."""
        self._parts.older.restored(iteration)
        self._discard_own()

    def clear_counters(self) -> None:
        """After a `carry_out` that came to nothing: what routers count has no place in a checkpoint that is loaded."""
        self._parts.state.clear_counters()

    def begin(self, iteration: int) -> None:
        """Protect training, which stands after `iteration`, or make ready for what comes before `rejoin`."""
        if not self._restart.prepare(iteration):
            self._protect(iteration)

    def stepped(self, step: StepJournal) -> None:
        """An iteration was replayed: progress, schedules and random states become those that were recorded of it.

        Raises ReplayDiverged when the iteration came out otherwise than recorded: leave then, so that the next start
        of the job takes another way back.
        """
        self._restart.replayed(step)

    def rejoin(self) -> bool:
        """Wait until all ranks stand at one iteration, and protect training from there on; whether it recovered."""
        if self._protection is None:
            outcome = self._restart.rejoin()
            if self._parts.counter is not None:
                self._parts.counter.take()  # these tokens were counted when the iterations ran first
            self._protect(outcome.plan.target)
        return self._restart.outcome is not None

    @property
    def is_replaying(self) -> bool:
        """Whether training runs iterations again to make its state dense: nothing may be saved meanwhile."""
        return self._restart.is_replaying

    @property
    def replays_alone(self) -> bool:
        """Whether it does so while other stages of the pipeline wait."""
        return self._restart.replay is not None and self._restart.replay.alone

    @property
    def repeats_steps(self) -> bool:
        """Whether the recovery runs iterations, or steps, again on any rank; the same on all."""
        return self._restart.repeats_steps

    @property
    def communicator(self) -> BoundaryCommunicator | None:
        """Through which the stages of the pipeline have to send; None: core's own."""
        return self._parts.communicator

    @property
    def parks(self) -> bool:
        """Whether live state is put aside when a peer is lost."""
        return self._survivor is not None

    @property
    def is_own(self) -> bool:
        """Whether what `look` planned is a state that this very job left."""
        return self._recovery.is_own

    @property
    def unusable(self) -> str:
        """Why snapshots in storage, or of another layout, cannot be used by this job; empty if there are none."""
        return self._recovery.unusable or self._parts.older.unusable

    @property
    def of_others(self) -> tuple[int, str]:
        """The newest iteration that another job stored, and that was not asked for, and that job; else -1."""
        return self._recovery.of_others

    @property
    def diverged(self) -> tuple[str, ...]:
        """Replays of earlier attempts that came out otherwise than recorded, in words."""
        return tuple(map(str, self._recovery.diverged))

    @property
    def newest_iteration(self) -> int:
        """The newest iteration of which an earlier attempt left anything; -1 where none did."""
        return self._recovery.newest_iteration

    def _protect(self, iteration: int) -> None:
        parts, outcome = self._parts, self._restart.outcome
        parts.patient.close()
        parts.number_attempt()
        self._protection = ProtectedTraining(parts, iteration, outcome)
        self._protection.begin()
        self._timestamps.mark(Milestone.REJOINED)
        if outcome is not None:
            times = self._timestamps, parts.times_left
            episode = gather_timeline(parts.control, *times, outcome.plan, parts.topology)
            self._episode = episode.with_outcome(outcome.table)
            for line in self._episode.lines() if parts.rank == 0 else ():
                log.info("%s", line)
        forget(parts.memory.store.directory)

    def passes(self, iteration: int) -> None:
        """The passes of an iteration begin."""
        if self._parts.waits is not None:
            self._parts.waits.waits.begin()
        if self._survivor is not None:
            replay = self._restart.replay  # what it sends again is in this rank's logs already, but for lost ones
            self._survivor.passes(iteration, logged=replay is None or iteration in replay.unlogged)

    def reduced(self) -> None:
        """They are over, and gradients reduced."""
        if self._parts.waits is not None:
            self._parts.waits.reduced()
        if self._survivor is not None:
            self._survivor.reduced()

    def before_optimizer(self) -> float:
        """See `Coordinator.before_optimizer`; nothing is under way in a replay."""
        return self._protection.coordinator.before_optimizer() if self._protection is not None else 0.0

    def stepping(self, iteration: int, loss: float | None, num_tokens: int | None) -> AbstractContextManager[None]:
        """A block for the optimizer's step and what belongs to it.

        loss: of the iteration, where it is known. num_tokens: as in `StepJournal`.
        """
        return self._survivor.stepping(iteration, loss, num_tokens) if self._survivor is not None else nullcontext()

    def whole(self, iteration: int, journal: StepJournal) -> None:
        """The state after `iteration` is complete."""
        if self._survivor is not None and not self.is_replaying:
            self._survivor.whole(iteration, journal)

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """See `ProtectedTraining.step_end`."""
        assert self._protection is not None
        self._protection.step_end(iteration, journal)

    def reported(self, iteration: int) -> None:
        """The numbers of an iteration were written down."""
        if self._survivor is not None:
            self._survivor.reported(iteration)

    @property
    def unreported(self) -> StepJournal | None:
        """How the iteration of the recovered state came out, where its numbers were not written down on this rank."""
        if self._survivor is None or self._restart.outcome is None:
            return None
        return self._survivor.unreported(self._restart.outcome.plan.target)

    @property
    def episode(self) -> RecoveryTimeline | None:
        """The timeline of the recovery that training goes on from."""
        return self._episode

    def report(self) -> ProtectionReport:
        """See `ProtectedTraining.report`."""
        assert self._protection is not None
        return self._protection.report()

    @property
    def job_id(self) -> str:
        """On which all ranks have agreed."""
        return self._parts.place.job_id

    @property
    def leases(self) -> Leases:
        """Of the places that this job writes to."""
        return self._parts.leases

    @property
    def links(self) -> PeerLinks | None:
        """Which close when a peer is lost."""
        return self._parts.links

    def interrupt(self, *, force: bool) -> bool:
        """See `StepGuard.interrupt`; called by another thread. Where nothing is parked, no step needs protection."""
        return self._survivor is None or self._survivor.interrupt(force=force)

    def failure(self, cause: Cause) -> None:
        """Training ends here with an error: nothing new is begun, what is sealed stays, and what is whole is parked.

        Called when the connections to other ranks are closed."""
        parts = self._parts
        if parts.boost is not None:
            parts.boost.close()
        self._timestamps.mark(Milestone.DETECTED)
        if self._protection is not None:
            self._protection.failure()
        if self._survivor is not None:
            problem = self._survivor.park(cause, parts.strategy.to_data(), dict(self._timestamps.times()))
            if problem:
                log.info("rank %d: %s", parts.rank, problem)
        self._timestamps.mark(Milestone.PARKED)
        self._timestamps.leave(parts.memory.store.directory, parts.attempt)

    def abandon(self) -> bool:
        """After `failure`, where this process stays: let go of all that another session in it takes up again.

        Live state and what is sealed in memory stay as they are. Whether all work beside training has come to an end;
        else this process must not go on.
        """
        has_ended = self._protection is None or self._protection.coordinator.abandon()
        self._parts.close()
        if self._survivor is not None and self._survivor.kept is not None:
            keep(self._parts.training.optimizer, self._survivor.kept)
        return has_ended

    def shutdown(self, *, keep_memory: bool) -> None:
        """See `ProtectedTraining.shutdown`."""
        assert self._protection is not None
        self._protection.shutdown(keep_memory=keep_memory)
