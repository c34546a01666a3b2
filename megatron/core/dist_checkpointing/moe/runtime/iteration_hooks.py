"""One iteration of any training loop, followed through the calls that it makes and the step of its live optimizer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer

from ..core_versions.training import forget_auxiliary_losses
from ..errors import Terminated, UsageError
from ..megatron_state.trainer_state import LiveTrainerState
from ..policy.parking import Cause
from ..replay.patches import replaced
from ..seats.heartbeat import own_heartbeat
from ..snapshot.coordinator import ProtectionReport
from ..types import StepJournal
from .disconnect import close_connections, is_lost_peer
from .faults import FaultInjector, Phase
from .session import Session
from .step_order import LoopCall, LoopPhase, StepOrder
from .termination import Termination
from .unprotected import Unprotected


class IterationHooks:
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

    Attributes:
        loss: See `MoECheckpointManager`.
        stall_s: See `MoECheckpointManager`.
        journal: How the last step came out.
    """

    def __init__(
        self,
        session: Session | Unprotected,
        optimizer: MegatronOptimizer,
        transformer: Any,
        trainer: LiveTrainerState,
        faults: FaultInjector,
        termination: Termination,
        *,
        replays: bool,
    ) -> None:
        self._session, self._optimizer, self._transformer = session, optimizer, transformer
        self._trainer, self._faults, self._termination = trainer, faults, termination
        self._replays, self._order = replays, StepOrder()
        self._armed, self._stepping = contextlib.ExitStack(), contextlib.ExitStack()
        self._began = self._rejoined = self._recovered = self._is_armed = self._in_step = False
        self._num_tokens: int | None = None
        self.journal, self.loss, self.stall_s = StepJournal(), None, 0.0

    loss: float | None

    @property
    def is_between(self) -> bool:
        """Whether no iteration is under way."""
        return self._order.phase is LoopPhase.BETWEEN

    def arm(self) -> None:
        """Follow the next `optimizer.step`."""
        if not self._is_armed:
            self._armed.enter_context(replaced(self._optimizer, step=self._step))
            self._is_armed = True

    def disarm(self) -> None:
        """Let the optimizer alone."""
        self._is_armed = False
        self._armed.close()

    def begin(self) -> None:
        """See `MoECheckpointManager.begin`."""
        if not self._began:
            self.disarm()
            self._session.begin(self._trainer.iteration)
            self._began = True
            self.arm()

    def rejoin(self) -> bool:
        """See `MoECheckpointManager.rejoin`."""
        if not self._rejoined:
            self.begin()
            self.disarm()
            self._recovered, self._rejoined = self._session.rejoin(), True
            if self._recovered:
                own_heartbeat().rejoined()
            self.arm()
        return self._recovered

    @contextlib.contextmanager
    def forward_backward(self) -> Iterator[None]:
        """See `MoECheckpointManager.forward_backward`."""
        self._ready()
        iteration = self._trainer.iteration + 1
        self._order.follow(LoopCall.FORWARD_BACKWARD, iteration)
        self._reached(Phase.START)
        self.loss = self._num_tokens = None
        self._session.passes(iteration)
        try:
            with self._noting_tokens():
                yield
        except BaseException:
            forget_auxiliary_losses()  # of half an iteration
            raise
        self._session.reduced()

    def step_done(self) -> None:
        """See `MoECheckpointManager.step_done`."""
        iteration = self._trainer.iteration + 1
        self._order.follow(LoopCall.STEP_DONE, iteration)
        self._trainer.iteration, self._in_step = iteration, False
        self._stepping.close()
        self._session.whole(iteration, self.journal)
        self._faults.reached(iteration, Phase.STEP)
        self._termination.check()

    def after_step(self, loss: float | None) -> ProtectionReport | None:
        """See `MoECheckpointManager.after_step`."""
        if self._order.phase is LoopPhase.STEPPED:
            if loss is not None:
                self.journal = replace(self.journal, lm_loss=loss)
            self.step_done()
        iteration, report = self._trainer.iteration, None
        self._order.follow(LoopCall.AFTER_STEP, iteration)
        if self._session.is_replaying:
            self._session.stepped(self.journal)
        else:
            self._session.step_end(iteration, self.journal)
            report = self._session.report()
        self.arm()
        return report

    def finish(self, *, keep_memory: bool) -> None:
        """See `MoECheckpointManager.finish`."""
        self._ready()
        self._order.follow(LoopCall.FINISH, self._trainer.iteration + 1)
        self.disarm()
        self._session.shutdown(keep_memory=keep_memory)

    def leave(self, error: BaseException, interrupted: Cause | None = None) -> None:
        """Training ends here with an error: let the other ranks know at once, and put aside what is whole.

        interrupted: why connections were given up before, if they were: then nobody is to blame for what failed.
        """
        self.disarm()
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
        close_connections()
        self._session.failure(cause)

    def _ready(self) -> None:
        self.begin()
        if not self._session.is_replaying:
            self.rejoin()
        self.arm()

    def _step(self, *arguments: Any, **options: Any) -> Any:
        """In place of `optimizer.step`."""
        iteration = self._trainer.iteration + 1
        if self._replays and self.is_between:
            raise UsageError(
                f"iteration {iteration}: strategy sparse needs {LoopCall.FORWARD_BACKWARD.value} around the passes of"
                " each iteration, since it freezes operators in them when it replays"
            )
        self._ready()
        if self.is_between:
            self._reached(Phase.START)
        self._order.follow(LoopCall.STEP, iteration)
        self._reached(Phase.FORWARD_BACKWARD)
        self.disarm()
        self.stall_s = self._session.before_optimizer()
        self._stepping.enter_context(self._session.stepping(iteration, self.loss, self._num_tokens))
        try:
            outcome = self._optimizer.step(*arguments, **options)
        except BaseException:
            self._stepping.__exit__(*sys.exc_info())
            raise
        self._in_step = True
        updated, norm, _ = outcome
        self.journal = StepJournal(None if norm is None else float(norm), not updated, self.loss, self._num_tokens)
        # Until the iteration is over, another step is a mistake.
        self._stepping.enter_context(replaced(self._optimizer, step=self._second_step))
        return outcome

    def _second_step(self, *_arguments: Any, **_options: Any) -> Any:
        self._order.follow(LoopCall.STEP, self._trainer.iteration + 1)

    @contextlib.contextmanager
    def _noting_tokens(self) -> Iterator[None]:
        """Note by how many tokens gradients are divided: a stage that replays alone is not told by the last one."""
        finalize = getattr(self._transformer, "finalize_model_grads_func", None)
        if finalize is None or self._session.is_replaying:
            yield
            return

        def noting(chunks: Any, num_tokens: torch.Tensor | None = None, **options: Any) -> None:
            finalize(chunks, num_tokens, **options)
            self._num_tokens = None if num_tokens is None else int(num_tokens.item())

        with replaced(self._transformer, finalize_model_grads_func=noting):
            yield

    def _reached(self, phase: Phase) -> None:
        self._faults.reached(self._trainer.iteration + 1, phase)
        self._termination.check()
