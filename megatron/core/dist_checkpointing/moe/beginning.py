"""Where training begins: at the newest usable state of memory, storage and dense checkpoints, or nowhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from .errors import NewProcessesNeeded, NoExactState, UnreadableCheckpoint, UsageError
from .in_place.building import own_build
from .megatron_state.trainer_state import LiveTrainerState
from .resharding.windows import OlderWindow
from .runtime.session import Session
from .runtime.unprotected import Unprotected

log = logging.getLogger(__name__)

type RunAgain = Callable[[OlderWindow, Callable[[Path], None]], int]
"""Loads the state after a window of another layout."""


@dataclass(frozen=True)
class Beginning:
    """Called on all ranks together. Errors are those of `MoECheckpointManager.resume`.

    Args:
        session: Looks for snapshots, and restores from them.
        load, newest, run_again, asked_for: As of `MoECheckpointManager.resume`.
        where: Whose snapshots may be unusable, for people.
        replay_tolerance: By how much losses of a replay may differ.
        takes_over: Whether this job goes on from what that one stored.
    """

    session: Session | Unprotected
    load: Callable[[], int] | None
    newest: int
    run_again: RunAgain | None
    _: KW_ONLY
    asked_for: bool
    where: str
    replay_tolerance: float
    takes_over: Callable[[str], bool] = lambda job: False

    def __call__(self, trainer: LiveTrainerState) -> None:
        """Bring everything that training changes to there."""
        session, load = self.session, self.load
        plan, older = session.look(), -1
        if plan is not None and (session.is_own if self.asked_for else plan.target >= self.newest):
            if self._is_restored(trainer):
                return
            self._refuse_after_damage()
        elif plan is not None and not self.asked_for:
            older = plan.target
        if own_build().survivors:
            raise NewProcessesNeeded(
                f"{own_build().survivors} ranks have kept their processes, and nothing in memory or storage brings them"
                " back: all ranks start anew"
            )
        if plan is None and not self.asked_for:
            self._refuse_strangers(*session.of_others)
        window = session.older_window() if plan is None and self.run_again is not None else None
        if self.run_again is not None and window is not None and window.last > self.newest:
            if window.job != session.job_id and not self.takes_over(window.job):
                self._refuse_strangers(window.last, window.job)
            trainer.iteration = self.run_again(window, session.copy_older)
            session.refresh()
            session.take_over(trainer.iteration)
            return
        if plan is None:
            self._refuse_to_begin_anew()
        if plan is None and session.unusable and load is None:
            raise UsageError(
                f"{self.where} has snapshots that this job cannot use: {session.unusable}; give --load, or"
                " another folder to begin at iteration 0"
            )
        if load is not None and not self._is_loaded(load, trainer, older):
            return
        if session.diverged and torch.distributed.get_rank() == 0:
            again = "those up to %d are trained again, since no replay leads there exactly"
            log.warning(f"training goes on from iteration %d: {again}", trainer.iteration, session.newest_iteration)
        session.discard()

    def _is_restored(self, trainer: LiveTrainerState) -> bool:
        """Whether what was planned could be restored; else nothing is left of what live state was."""
        if self.session.carry_out() is None:
            self.session.clear_counters()
            return False
        self._refuse_to_repeat_on_another_device(trainer)
        return True

    def _is_loaded(self, load: Callable[[], int], trainer: LiveTrainerState, older: int) -> bool:
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
        self.session.refresh()
        if trainer.iteration >= older:
            return True
        log.warning(
            "of what was saved up to iteration %d the newest intact state is a snapshot after %d", self.newest, older
        )
        if self._is_restored(trainer):
            return False
        trainer.iteration = load()
        self.session.refresh()
        return True

    def _refuse_strangers(self, iteration: int, job: str) -> None:
        """A state of another job is not taken for this one's, nor passed by unsaid where it is the newest."""
        if iteration > self.newest:
            raise UsageError(
                f"{self.where} holds iteration {iteration} of job {job}, and this is job {self.session.job_id}: give"
                f" --moe-ckpt-take-over {job} to go on from it, or start under its id (torchrun --rdzv-id), or take"
                " another folder"
            )

    def _refuse_after_damage(self) -> None:
        self._refuse_to_begin_anew()
        if self.load is None and not own_build().survivors:
            raise UsageError(
                "all copies of the training state in memory and storage are damaged or lost, see the reasons above;"
                " give --load with an older checkpoint, or remove them to begin at iteration 0"
            )

    def _refuse_to_begin_anew(self) -> None:
        """Training that came far must not begin at iteration 0 because a replay differs in a bit: a user decides."""
        if (self.load is None or self.newest < 0) and self.session.diverged:
            raise NoExactState(
                f"{'; '.join(self.session.diverged)}; nothing older is left. All copies stay in memory and storage:"
                " give --load with a checkpoint, --moe-ckpt-replay-tolerance to accept how much losses differ, or"
                " remove the copies to begin at iteration 0"
            )

    def _refuse_to_repeat_on_another_device(self, trainer: LiveTrainerState) -> None:
        """Kernels of a GPU and of a CPU differ, so a replay would say in its first iteration that it diverged."""
        if self.session.repeats_steps and trainer.of_another_device and not self.replay_tolerance:
            raise UsageError(
                f"{self.where} has windows that were made on another kind of device, and their iterations have to be"
                " run again, which no other device does to the last bit: start on that kind of device, or give"
                " --moe-ckpt-replay-tolerance to accept how much losses differ"
            )
