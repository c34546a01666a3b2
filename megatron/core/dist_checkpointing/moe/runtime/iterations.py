"""One iteration of any training loop, followed through the calls that it makes and the step of its live optimizer."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, SupportsFloat

import torch

from megatron.core.optimizer import MegatronOptimizer

from ..core_versions.training import forget_auxiliary_losses, judging_results, noting_pages, replaced
from ..device import Arriving, arriving
from ..errors import PeerLost, Terminated, UsageError
from ..megatron_state.pass_state import PassState
from ..megatron_state.trainer_state import LiveTrainerState
from ..policy.parking import Cause
from ..snapshot.coordinator import ProtectionReport
from ..standby.heartbeat import own_heartbeat
from ..standby.slot import own_slot
from ..standby.verdict import note_iteration
from ..types import StepJournal
from .faults import FaultInjector, Phase, Termination
from .peer_links import close_connections, is_lost_peer
from .session import Session
from .status import report_silence


class LoopPhase(enum.Enum):
    """Where the loop is in an iteration."""

    BETWEEN = "Between two iterations."
    PASSES = "Forward and backward passes have begun."
    STEPPED = "The optimizer has stepped; the scheduler and what the loop counts may not have."
    WHOLE = "The state after the iteration is complete, but not protected yet."


class LoopCall(enum.Enum):
    """What the loop calls."""

    FORWARD_BACKWARD = "manager.forward_backward()"
    STEP = "optimizer.step()"
    STEP_DONE = "manager.step_done()"
    AFTER_STEP = "manager.after_step()"
    FINISH = "the end of training"


ORDER: dict[tuple[LoopPhase, LoopCall], LoopPhase] = {
    (LoopPhase.BETWEEN, LoopCall.FORWARD_BACKWARD): LoopPhase.PASSES,
    (LoopPhase.BETWEEN, LoopCall.STEP): LoopPhase.STEPPED,
    (LoopPhase.BETWEEN, LoopCall.FINISH): LoopPhase.BETWEEN,
    (LoopPhase.PASSES, LoopCall.FORWARD_BACKWARD): LoopPhase.PASSES,  # passes may be run again before the step
    (LoopPhase.PASSES, LoopCall.STEP): LoopPhase.STEPPED,
    (LoopPhase.PASSES, LoopCall.FINISH): LoopPhase.PASSES,
    (LoopPhase.STEPPED, LoopCall.STEP_DONE): LoopPhase.WHOLE,
    (LoopPhase.WHOLE, LoopCall.AFTER_STEP): LoopPhase.BETWEEN,
}
"""Which calls a loop makes in an iteration, and in which order."""


class Iterations:
    """Calls a session at the right moments of each iteration.

    Between iterations `optimizer.step` of the live object is this class's own. Whatever else is hung on it, by the
    session for a replay or to follow the update from inside, comes and goes while it is taken back: hooks nest.

    Args:
        session: Is called.
        optimizer: Whose steps are followed.
        transformer: The configuration that the model's modules share; its `finalize_model_grads_func` is listened to.
        trainer: Its iteration is counted here.
        faults: Strike at the phases of an iteration.
        termination: SIGTERM is acted on between phases.
        replays: Whether the strategy runs iterations again after a fault.
        is_active: Whether anything is done at all; else every call is free.
        passes_change: What passes change besides gradients and random states; None: nothing.

    Attributes:
        loss: Mean loss of the iteration over all ranks; set by the loop between passes and step, where it is known (on
            the last pipeline stage). Replays are checked with it.
        stall_s: How long the last optimizer step waited for copies, in seconds.
        journal: How the last step came out.
    """

    def __init__(
        self,
        session: Session,
        optimizer: MegatronOptimizer,
        transformer: Any,
        trainer: LiveTrainerState,
        *,
        faults: FaultInjector,
        termination: Termination,
        replays: bool,
        is_active: bool = True,
        passes_change: PassState | None = None,
    ) -> None:
        self._session, self._optimizer, self._transformer = session, optimizer, transformer
        self._trainer, self._faults, self._termination = trainer, faults, termination
        self._replays, self._is_active, self._phase = replays, is_active, LoopPhase.BETWEEN
        self._pass_state = passes_change or PassState()
        self._armed, self._stepping = contextlib.ExitStack(), contextlib.ExitStack()
        self._began = self._rejoined = self._recovered = self._is_armed = self._in_step = self._finished = False
        self._num_tokens: Arriving | None = None
        self._is_out_of_pages = False
        self._slot = own_slot()
        self.journal, self.loss, self.stall_s = StepJournal(), None, 0.0

    loss: SupportsFloat | None

    def begin(self) -> None:
        """Protect training from here on, or make ready for iterations that are run again; a collective.

        Made by the first call of an iteration if the loop does not. The model's `config.finalize_model_grads_func` has
        to be set by then.
        """
        if self._is_active and not self._began:
            # Off first: what the session hangs on the optimizer for a replay has to lie below the hook of this class.
            self.detach()
            self._session.begin(self._trainer.iteration)
            self._began = True
            self._slot.finishes_first(self._session.is_replaying and self._session.replays_alone)
            self._arm()

    def rejoin(self) -> bool:
        """Wait until all ranks stand at one iteration, when nothing is to be replayed any more; a collective.

        Returns whether training was brought back after a fault. Made by the first call of the next iteration if the
        loop does not. Raises PeerLost.
        """
        if self._is_active and not self._rejoined:
            self.begin()
            self.detach()
            self._slot.finishes_first(False)
            self._recovered, self._rejoined = self._session.rejoin(), True
            if self._recovered:
                own_heartbeat().rejoined()
            self._arm()
        return self._recovered

    @contextlib.contextmanager
    def forward_backward(self) -> Iterator[None]:
        """A block around the forward and backward passes of an iteration, and the reduction of gradients."""
        if not self._is_active:
            yield
            return
        self._ready()
        iteration, is_first = self._trainer.iteration + 1, self._phase is LoopPhase.BETWEEN
        self._follow(LoopCall.FORWARD_BACKWARD, iteration)
        self._reached(Phase.START)
        if is_first and getattr(self._transformer, "moe_paged_stash", False):
            self._pass_state.note()  # for passes that are run again in these, of which core's machine knows nothing
        self.loss = self._num_tokens = None
        self._is_out_of_pages = False
        self._session.passes(iteration)
        try:
            with self._noting_tokens(), noting_pages(self._ran_out_of_pages):
                yield
        except BaseException:
            forget_auxiliary_losses()  # of half an iteration
            raise
        # Only here: where the passes raised, gradients may be reduced in part.
        self._session.reduced()

    def passes_begin(self) -> None:
        """For a loop of which nothing is called around its passes: they come now, and who stands in them for too long
        hangs."""
        if self._is_active:
            self._ready()
            self._follow(LoopCall.FORWARD_BACKWARD, self._trainer.iteration + 1)
            self._reached(Phase.START)

    def step_done(self) -> None:
        """The scheduler has stepped and the loop has counted: the state after the iteration is complete.

        Worth a call before evaluation or anything else that may lose a peer; `after_step` makes it otherwise.
        """
        if not self._is_active:
            return
        iteration = self._trainer.iteration + 1
        self._follow(LoopCall.STEP_DONE, iteration)
        # Counted before the block of the step ends, which may raise the loss of a peer that it has held back: by then
        # the state of this rank is whole.
        self._trainer.iteration, self._in_step = iteration, False
        self._stepping.close()
        self._session.on_state_consistent(iteration, self.journal)
        self._faults.reached(iteration, Phase.STEP)
        self._termination.check()

    def after_step(self, loss: float | None = None) -> ProtectionReport | None:
        """Protect the iteration, or in a replay take what was recorded of it; once in each iteration.

        Args:
            loss: As the attribute, where it becomes known after the step.

        Returns:
            What checkpointing did; None without a strategy and in a replay.

        Raises:
            UsageError: It was called twice, or without a step.
            CheckpointFailure: Protection was lost, and `strict` is set.
            ReplayDiverged: A replayed iteration came out otherwise than recorded: leave, so that the next start of the
                job takes another way back.
        """
        # Read here: the last replayed iteration ends the replay below.
        session, was_replaying, report = self._session, self._session.is_replaying, None
        # Before anything else: where another job has taken the folders over, this one may not write there any more.
        if session.leases is not None:
            session.leases.check()
        if not self._is_active:
            self._trainer.iteration += 1
        else:
            if self._phase is LoopPhase.STEPPED:
                if loss is not None:
                    self.journal = replace(self.journal, lm_loss=loss)
                self.step_done()
            self._follow(LoopCall.AFTER_STEP, self._trainer.iteration)
            if was_replaying:
                session.stepped(StepJournal.from_data(self.journal.to_data()))
                if session.interrupts_replay(self._slot.is_called_off):
                    raise PeerLost(
                        f"other stages lost a rank: the replay stops after iteration {self._trainer.iteration}, and"
                        " continues from there once all ranks have connected again"
                    )
            elif session.coordinator is not None:
                session.coordinator.step_end(self._trainer.iteration, self.journal)
                report = session.report()
            self._arm()
        if not was_replaying:
            self._slot.training()
            note_iteration()
        own_heartbeat().moved()
        return report

    def finish(self, *, keep_memory: bool = False) -> None:
        """End well, before the block of `run` does; a collective.

        Args:
            keep_memory: Whether it stays for another start of the same job.
        """
        if self._finished:
            return
        if self._is_active:
            self._ready()
            self._follow(LoopCall.FINISH, self._trainer.iteration + 1)
            self.detach()
            self._session.shutdown(keep_memory=keep_memory)
        if self._session.leases is not None:
            self._session.leases.release()
        self._finished = True

    def restored(self) -> None:
        """Training stands where it continues: follow its optimizer from here on."""
        if self._is_active:
            self._arm()

    def detach(self) -> None:
        """Take what was hung on the optimizer off it; the next `forward_backward` puts it back."""
        self._is_armed = False
        self._armed.close()

    def _arm(self) -> None:
        """Follow the next `optimizer.step`."""
        if not self._is_armed:
            self._armed.enter_context(replaced(self._optimizer, step=self._step))
            self._is_armed = True

    def leave(self, error: BaseException, interrupted: Cause | None = None) -> None:
        """Training ends here with an error: let the other ranks know at once, and put aside what is whole.

        Args:
            error: What ended it.
            interrupted: Why connections were given up before, if they were: then nobody is to blame for what failed.
        """
        self.detach()
        self._slot.finishes_first(False)
        with contextlib.suppress(Exception):  # what the step held back says no more than `error`
            self._stepping.close()
        if self._in_step:
            cause = Cause.OWN_ERROR  # master weights are newer than the scheduler, or than what the loop counts
        elif interrupted is not None:
            cause = interrupted
        elif isinstance(error, Terminated):
            cause = Cause.TOLD_TO_END
        else:
            cause = Cause.PEER_LOST if is_lost_peer(error) else Cause.OWN_ERROR
        self._session.await_update()
        # Before this rank parks, which takes a while: ranks that wait for it in a collective fail at once.
        close_connections()
        self._session.failure(cause)
        report_silence(error)

    def _judged(self) -> AbstractContextManager[None]:
        """A block around training in which core judges its results, and runs passes again alike."""
        if not self._is_active:
            return contextlib.nullcontext()
        state = self._pass_state
        return judging_results(state.note, state.put_back, from_first=self._trainer.iteration > 0)

    def _ready(self) -> None:
        self.begin()
        if not self._session.is_replaying:
            self.rejoin()
        self._arm()

    def _step(self, *arguments: Any, **options: Any) -> Any:
        """In place of `optimizer.step`."""
        iteration, is_between = self._trainer.iteration + 1, self._phase is LoopPhase.BETWEEN
        if self._replays and is_between:
            raise UsageError(
                f"iteration {iteration}: strategy sparse needs {LoopCall.FORWARD_BACKWARD.value} around the passes of"
                " each iteration, since it freezes operators in them when it replays"
            )
        self._ready()
        if is_between:
            self._reached(Phase.START)
        self._follow(LoopCall.STEP, iteration)
        self._reached(Phase.FORWARD_BACKWARD)
        # This hook goes first, and then the copies of the last snapshot end: only after that the step may begin.
        self.detach()
        self.stall_s = self._session.before_optimizer()
        passed = StepJournal(None, False, self.loss, self._num_tokens, self._is_out_of_pages)
        self._stepping.enter_context(self._session.stepping(iteration, passed))
        try:
            outcome = self._optimizer.step(*arguments, **options)
        except BaseException:
            # Not `close`, with which the block of the step would take this for a good end.
            self._stepping.__exit__(*sys.exc_info())
            raise
        # Until `step_done`: what was updated and what the loop has counted are of different iterations.
        self._in_step = True
        updated, norm, _ = outcome
        self.journal = replace(passed, grad_norm=arriving(norm), skipped=not updated)
        # Until the iteration is over, another step is a mistake.
        self._stepping.enter_context(replaced(self._optimizer, step=self._second_step))
        return outcome

    def _second_step(self, *_arguments: Any, **_options: Any) -> Any:
        self._follow(LoopCall.STEP, self._trainer.iteration + 1)

    def _ran_out_of_pages(self, alone: bool) -> None:
        self._is_out_of_pages = True
        if alone:  # a process has no pages in its first iteration, and runs no passes again there
            self._pass_state.put_back()

    @contextlib.contextmanager
    def _noting_tokens(self) -> Iterator[None]:
        """Note by how many tokens gradients are divided: a stage that replays alone is not told by the last one."""
        finalize = getattr(self._transformer, "finalize_model_grads_func", None)
        # Nobody else asks, and where passes are captured as a CUDA graph there may be no copy to the host in them.
        if finalize is None or self._session.is_replaying or self._session.communicator is None:
            yield
            return

        def noting(chunks: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
            finalize(chunks, num_tokens, **options)
            # Core gives a number only where gradients are divided by it.
            self._num_tokens = None if num_tokens is None else Arriving(num_tokens)

        with replaced(self._transformer, finalize_model_grads_func=noting):
            yield

    def _reached(self, phase: Phase) -> None:
        self._faults.reached(self._trainer.iteration + 1, phase)
        self._termination.check()

    def _follow(self, call: LoopCall, iteration: int) -> None:
        """The loop calls this in `iteration`. Raises UsageError for a call that is missing, or made twice; nothing of
        the iteration counts as protected then."""
        after = ORDER.get((self._phase, call))
        if after is not None:
            self._phase = after
        elif self._phase in (LoopPhase.STEPPED, LoopPhase.WHOLE):
            raise UsageError(
                f"iteration {iteration}: {call.value} came before {LoopCall.AFTER_STEP.value}, so the iteration is not"
                " protected; call it once in each iteration, after the optimizer's and the scheduler's step"
            )
        else:
            raise UsageError(
                f"iteration {iteration}: {call.value} came without an {LoopCall.STEP.value} before it: it was called"
                " twice, or the step was made by another optimizer than the one that the manager was given"
            )
