"""What a rank does between its start and the iteration at which all ranks train.

`Restart.restore` takes the newest usable state of memory, storage and dense checkpoints. After it the ranks of a job
may stand apart: those of the stages that lost their state have to run iterations again (a Replay), a rank that missed
one step makes it with the gradients that it had kept (a roll forward), the others wait with the state that they had
parked. Each does its part alone, in any order, and all meet in `rejoin`.

A second fault may strike meanwhile. So from its own target on each rank parks, if what it ran again was exact, and
logs, under the timeline that is being recovered: what is kept then belongs to the past of this recovery and not to an
attempt of its own, and the next restart can use it. Within a replay or a roll forward a rank keeps nothing: what it
began from is still sealed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import MoECheckpointConfig
from ..errors import NewProcessesNeeded, NoExactState, ReplayDiverged, UnreadableCheckpoint, UsageError
from ..local_recovery.survivor import Survivor
from ..megatron_state.trainer_state import LiveTrainerState
from ..policy.lineage import Identity
from ..policy.parking import StepPhase
from ..ports import Transport
from ..recovery.recovery import Recovery, RecoveryOutcome, Waiting
from ..recovery.sources import KeptReplay
from ..replay.densify import Replay
from ..replication.agreement import of_first
from ..resharding.store import PreviousWindow
from ..resharding.survivors import PreviousLayout
from ..strategies import Strategy
from ..types import RecoveryPlan, StepJournal
from .live_state import LiveState
from .process_info import memory_folder
from .session import Loadable, Request

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Restart:
    """Sequence: `restore`; `prepare`; `replayed` after each iteration while `is_replaying`; `rejoin`.

    Args:
        recovery: Finds snapshots of this layout, and restores from them.
        older: Finds those of other layouts.
        config: The settings.
        state: Live state of this rank.
        identity: Of the job's snapshots.
        strategy: Plans what is recovered.
        survivor: Parks and logs on this rank; None where faults roll back all stages.
        control: To all ranks.
        renew_strategy: Called where training begins from another state than any that was found.

    Attributes:
        outcome: What came of the recovery, once all ranks stand where they stood.
        kept: How far the replay came that a fault of other stages has interrupted.
    """

    recovery: Recovery
    older: PreviousLayout
    config: MoECheckpointConfig
    state: LiveState
    identity: Identity
    strategy: Strategy
    survivor: Survivor | None
    control: Transport
    renew_strategy: Callable[[], None]
    outcome: RecoveryOutcome | None = None
    kept: KeptReplay | None = None
    _todo: Replay | Waiting | None = None

    # From nothing to a state.

    def restore(self, trainer: LiveTrainerState, request: Request) -> None:
        """See `Session.restore`."""
        recovery, load, newest, older = self.recovery, request.load, request.newest, -1
        plan = recovery.look()
        if newest.only_of and not recovery.is_of(newest.only_of):
            plan = None
        begins = newest.iteration if plan is None else max(plan.target, newest.iteration)
        self._refuse_foreign(begins, *recovery.foreign)
        window = self._window_ahead(request, plan)
        is_better = plan is not None and _leads_beyond(newest, plan)
        if plan is not None and newest.asked_for:
            is_better = recovery.is_own and (newest.in_part or plan.target >= newest.iteration)
        if plan is not None and is_better and window is None:
            if self._is_restored(trainer, request):
                return
        elif plan is not None and not newest.asked_for:
            older = plan.target
            if newest.in_part and recovery.is_own and self.control.rank == 0:
                log.warning(
                    "training continues from the checkpoint of iteration %d, of which flags leave out a part; the"
                    " snapshot of iteration %d has all, and is passed by", newest.iteration, older,
                )  # fmt: skip
        if request.survivors:
            raise NewProcessesNeeded(
                f"{request.survivors} ranks have kept their processes, and nothing in memory or storage brings them"
                " back: all ranks start again"
            )
        if plan is None and not (newest.asked_for or newest.only_of):
            self._refuse_strangers(request, *recovery.of_others)
        if window is not None:
            self._run_again(window, trainer, request)
            return
        if plan is None:
            self._refuse_to_begin_again(request)
        if plan is None and load is None and self._unusable:
            raise UsageError(
                f"{self._where} has snapshots that this job cannot use: {self._unusable}; give --load, or"
                " another folder to begin at iteration 0"
            )
        if load is not None and not self._is_loaded(load, trainer, request, older):
            return
        if recovery.diverged and self.control.rank == 0:
            again = "those up to %d are trained again, since no replay leads there exactly"
            log.warning(f"training continues from iteration %d: {again}", trainer.iteration, recovery.newest_iteration)
        self.older.discard()
        self._discard_own()

    def carry_out(self) -> RecoveryOutcome | Replay | Waiting | None:
        """Restore what `look` planned; None when all copies proved damaged: then the live state is unusable."""
        result = self.recovery.carry_out()
        if isinstance(result, RecoveryOutcome):
            self._end(result)
        else:
            self._todo = result
        return result

    def _is_restored(self, trainer: LiveTrainerState, request: Request) -> bool:
        """Whether what was planned could be restored; else nothing is left of what live state was."""
        if self.carry_out() is None:
            self.state.clear_counters()  # what routers count has no place in a checkpoint that is loaded
            self._refuse_foreign(request.newest.iteration, *self.recovery.foreign)
            self._refuse_after_damage(request)
            return False
        # Kernels of a GPU and of a CPU differ, so a replay would say in its first iteration that it diverged.
        if self.repeats_steps and trainer.of_another_device and not self.config.replay_tolerance:
            raise UsageError(
                f"{self._where} has windows that were made on another kind of device, and their iterations have to be"
                " run again, which no other device does to the last bit: start on that kind of device, or give"
                " --moe-ckpt-replay-tolerance to accept how much losses differ"
            )
        return True

    def _window_ahead(self, request: Request, plan: RecoveryPlan | None) -> PreviousWindow | None:
        """A sparse window of another layout, whose iterations run again in this one, where it leads beyond the rest.

        Of storage only where there is no plan: what lies there may be of a past that was given up.
        """
        own = self.older.window
        found = of_first(self.control, [] if own is None else [own], list[PreviousWindow])  # one for all ranks
        window = found[0] if found else None
        newest = request.newest
        if window is None or window.last <= newest.iteration or (newest.only_of and window.job not in newest.only_of):
            return None
        if plan is not None and (request.newest.asked_for or not window.in_memory or window.last <= plan.target):
            return None
        if request.run_again is None and window.in_memory and not request.newest.asked_for:
            self._refuse_foreign(-1, window.last, f"{window} run again only there: this loop restores none of them")
        return window if request.run_again is not None else None

    def _run_again(self, window: PreviousWindow, trainer: LiveTrainerState, request: Request) -> None:
        if window.job != self.identity.job and not self.config.takes_over(window.job):
            self._refuse_strangers(request, window.last, window.job)
        assert request.run_again is not None
        trainer.iteration = request.run_again(window, self.older.copy_to)
        self._refresh()
        self.older.restored(trainer.iteration)  # what that layout left stays until a snapshot of this one is protected
        self._discard_own()

    def _is_loaded(self, load: Callable[[], int], trainer: LiveTrainerState, request: Request, older: int) -> bool:
        """Whether training begins from what `load` gives, and not from a snapshot that proves newer.

        older: iteration of snapshots that were passed by for a newer checkpoint, which may prove damaged; -1 for none.
        """
        try:
            trainer.iteration = load()
        except UnreadableCheckpoint as error:
            if older < 0:
                raise
            log.warning("%s", error)
            trainer.iteration = -1
        self._refresh()
        if trainer.iteration >= older:
            return True
        log.warning(
            "newest intact state: snapshot of iteration %d (checkpoints up to %d are not usable)",
            older, request.newest.iteration,
        )  # fmt: skip
        if self._is_restored(trainer, request):
            return False
        trainer.iteration = load()
        self._refresh()
        return True

    def _refresh(self) -> None:
        """Enumerate the training state again, as is needed after a checkpoint was loaded in another way."""
        self.state.refresh()
        self.recovery.restore_through(self.state.restorer)
        if self.survivor is not None:
            self.survivor.live = self.state.live

    def _discard_own(self) -> None:
        """Free what is in memory in the layout of this job."""
        self.recovery.discard()
        self.renew_strategy()  # this one has learned from a recovery that came to nothing

    @property
    def _where(self) -> str:
        """Whose snapshots may be unusable, for people."""
        return "memory of an older layout" if self.config.persist_dir is None else "--moe-ckpt-persist-dir"

    @property
    def _unusable(self) -> str:
        """Why snapshots in storage, or of another layout, cannot be used by this job; empty if there are none."""
        return self.recovery.unusable or self.older.unusable

    def _refuse_strangers(self, request: Request, iteration: int, job: str) -> None:
        """A state of another job is not taken for this one's, nor passed by unsaid where it is the newest."""
        if iteration > request.newest.iteration:
            raise UsageError(
                f"{self._where} holds iteration {iteration} of job {job}, and this is job {self.identity.job}: give"
                f" --moe-ckpt-take-over {job} to continue from it, or start under its id (torchrun --rdzv-id), or take"
                " another folder"
            )

    def _refuse_foreign(self, newest: int, iteration: int, why: str) -> None:
        """What this job cannot read in its own memory would be freed with what it continues from."""
        if iteration > newest:
            raise UsageError(
                f"memory holds iteration {iteration} of this job, but {why}; start as before, or remove it on all nodes"
                f" (rm -r {memory_folder(self.config)}/*/{self.identity.job})"
            )

    def _refuse_after_damage(self, request: Request) -> None:
        self._refuse_to_begin_again(request)
        # State that is not loaded now, such as moments with --finetune or all of it at iteration 0, stays NaN.
        if (request.load is None or request.newest.iteration < 1 or request.newest.in_part) and not request.survivors:
            raise UsageError(
                "all copies of the training state in memory and storage are damaged or lost, see the reasons above;"
                " give --load with a checkpoint of this training, without --finetune and --no-load-optim, or remove"
                " the copies to begin as at the first start"
            )

    def _refuse_to_begin_again(self, request: Request) -> None:
        """Training that came far must not begin at iteration 0 because a replay differs in a bit: a user decides."""
        if (request.load is None or request.newest.iteration < 0) and self.recovery.diverged:
            raise NoExactState(
                f"{'; '.join(map(str, self.recovery.diverged))}; nothing older is left. All copies stay in memory and"
                " storage: give --load with a checkpoint, --moe-ckpt-replay-tolerance to accept how much losses differ,"
                " or remove the copies to begin at iteration 0"
            )

    # From there to the iteration at which all ranks stand.

    @property
    def replay(self) -> Replay | None:
        """The iterations that this rank runs again, up to `rejoin`."""
        return self._todo if isinstance(self._todo, Replay) else None

    @property
    def is_replaying(self) -> bool:
        """Whether some iterations are still to be run again."""
        return self.replay is not None and not self.replay.is_done

    @property
    def repeats_steps(self) -> bool:
        """Whether any rank runs iterations, or steps, again; the same on all."""
        plan = self.recovery.plan
        return plan is not None and (any(segment.replayed for segment in plan.segments) or bool(plan.roll_forward))

    def prepare(self, iteration: int) -> bool:
        """Arm the replay, from `iteration` on, or roll forward; whether `rejoin` has to follow."""
        if self.replay is not None:
            self._attend(iteration, StepPhase.REPLAYING)
            self.replay.begin()
            self._feed()
        elif isinstance(self._todo, Waiting):
            if self._todo.roll is not None:
                assert self.survivor is not None
                self._attend(self._todo.roll.iteration - 1, StepPhase.ROLLING_FORWARD)
                self.survivor.roll_forward(self._todo.roll)
            self._attend(self._target, StepPhase.REJOINING)
        return self._todo is not None

    def replayed(self, step: StepJournal) -> None:
        """An iteration was run again. Raises ReplayDiverged when it came out otherwise than recorded."""
        replay = self.replay
        assert replay is not None
        # Read before `stepped`, which moves the replay on to the next iteration.
        iteration, recorded = replay.iteration, replay.journal
        try:
            replay.stepped(step)
        except ReplayDiverged as error:
            # Noted in memory before this process ends: the next start reads it, and takes another way.
            self.recovery.note_divergence(iteration, str(error))
            raise
        if self.survivor is not None:
            # As recorded, since a stage that replays alone computes no norm; only the loss is this rank's own.
            journal = replace(recorded, lm_loss=step.lm_loss)
            self.survivor.replayed(iteration, journal, logged=iteration in replay.unlogged)
        self._feed()

    def is_interrupted(self, calls: bool) -> bool:
        """As `Replay.is_interrupted`; what this rank has come to is kept then."""
        if self.replay is None or not self.replay.is_interrupted(calls):
            return False
        self.kept = self.recovery.interrupted(self.replay)
        return True

    def rejoin(self) -> RecoveryOutcome:
        """Wait until all ranks stand at the target. Raises PeerLost."""
        waited = isinstance(self._todo, Waiting) and self._todo.roll is None
        if not waited and self.survivor is not None:
            # A parked state counts as exact in the next recovery, which sees nothing of this replay.
            exact = self.replay is None or self.recovery.is_exact(self.replay)
            self._attend(self._target, StepPhase.REJOINING if exact else StepPhase.REPLAYING)
            if exact:
                # Here too the next replay should not have to begin before this state.
                self.recovery.close()  # all is read, and what is parked needs the memory of what was parked before
                if problem := self.survivor.park_again(self.strategy.to_data()):
                    log.error("rank %d: %s", self.control.rank, problem)
        # Here all ranks meet, each as soon as it has done its part.
        outcome = self.recovery.finish(self.replay)
        self._todo = None
        self._end(outcome)
        return outcome

    @property
    def _target(self) -> int:
        assert self.recovery.plan is not None
        return self.recovery.plan.target

    def _end(self, outcome: RecoveryOutcome) -> None:
        self.outcome = outcome
        for line in outcome.table.lines() if self.control.rank == 0 else ():
            log.info("%s", line)

    def _attend(self, iteration: int, phase: StepPhase) -> None:
        """What is parked or logged now belongs to the past that is being recovered."""
        if self.survivor is not None:
            identity = replace(self.identity, timeline=self.recovery.timeline)
            self.survivor.set_lineage(identity, iteration, phase)
            self.survivor.resize_logs(self.strategy.logged)

    def _feed(self) -> None:
        """What stages outside of the replay sent comes from their logs."""
        if self.survivor is not None and self.replay is not None:
            self.survivor.communicator.source = self.replay.boundary


def _leads_beyond(newest: Loadable, plan: RecoveryPlan) -> bool:
    """Whether a plan is better than a checkpoint: of its iteration, unless it alone loses something or the checkpoint
    alone tells of a doubt, and of any where the checkpoint alone loses something."""
    loses = bool(plan.lost_tokens) and not newest.in_part
    is_newer = plan.target >= newest.iteration + loses or (newest.lacks and not loses)
    return is_newer and not (newest.in_doubt and plan.target == newest.iteration)
