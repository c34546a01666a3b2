"""Parts of a job that hooks put in place of its own: trainer state that goes back in time, a manager's session."""

from __future__ import annotations

from typing import Any


def trainer_state_of(state: Any) -> Any:
    """A `LiveTrainerState` of the driver's training state; where training stands is what its progress says."""
    from megatron.core.dist_checkpointing.moe.megatron_state.trainer_state import LiveTrainerState
    from megatron.pretrain.checkpoint.loop_state import ProgressState

    class Following(LiveTrainerState):
        @property
        def iteration(self) -> int:
            return int(state.progress.iteration)

        @iteration.setter
        def iteration(self, iteration: int) -> None:
            state.progress.iteration = iteration

    progress = state.progress.iteration
    made = Following(state.optimizer, state.scheduler, ProgressState(state.progress, state.config.argv))
    state.progress.iteration = progress
    return made


def manage(trainer: Any, session: Any) -> Any:
    """Give the driver's loop a manager around this session; returns it."""
    from megatron.core.dist_checkpointing.moe import MoECheckpointManager

    state, training = trainer._state, trainer._state.config.training
    sizes = {name: getattr(training, name) for name in ("global_batch_size", "micro_batch_size", "seq_length")}
    trainer._manager = MoECheckpointManager(
        state.chunks, state.optimizer, state.scheduler, train_iters=training.train_iters, session=session, **sizes
    )
    return trainer._manager


def communicating(trainer: Any, communicator: Any) -> Any:
    """Let the driver's schedules send and receive through `communicator`; returns the session that says so."""
    from megatron.core.dist_checkpointing.moe.runtime.unprotected import Unprotected

    session = Unprotected()
    session.communicator = communicator
    manage(trainer, session)
    return session
