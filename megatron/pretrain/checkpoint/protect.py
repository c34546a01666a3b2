"""Puts the checkpoint subsystem around a training job: `--moe-ckpt-strategy` and its flags."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError
from megatron.core.dist_checkpointing.moe.ports import PeerLost, StoreFailure
from megatron.core.dist_checkpointing.moe.runtime.custody import CheckpointFailure
from megatron.core.dist_checkpointing.moe.runtime.places import Place
from megatron.core.dist_checkpointing.moe.runtime.session import Session, Training
from megatron.pretrain.agreement import on_rank_zero
from megatron.pretrain.checkpoint.directory import CheckpointDirectory
from megatron.pretrain.checkpoint.load import load_checkpoint
from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.checkpoint.trainer_state import LiveTrainerState
from megatron.pretrain.errors import PretrainError, TrainingFailure, UsageError
from megatron.pretrain.initialize import Launch

log = logging.getLogger(__name__)


def resume(state: TrainingState, launch: Launch) -> Session | None:
    """Bring the state to where training goes on, and begin to protect it; None with `--moe-ckpt-strategy none`.

    A collective. Of what an earlier attempt left in memory and storage, and the checkpoints of `--load`, the newest
    usable one is taken.
    """
    if state.config.moe_checkpoint.strategy == "none":
        if state.config.checkpoint.load is not None:
            load_checkpoint(state)
        return None
    with driver_errors():
        session = _open(state, launch)
        _restore(state, session)
        session.begin(state.progress.iteration)
    return session


@contextlib.contextmanager
def driver_errors() -> Iterator[None]:
    """Turn errors of the subsystem into the driver's: a lost peer is worth a restart, all else would come again."""
    try:
        yield
    except (PeerLost, StoreFailure) as error:
        raise TrainingFailure(f"{error}; leaving, so that the job can be restarted") from error
    except CheckpointFailure as error:
        raise PretrainError(str(error)) from error
    except MoECheckpointError as error:
        raise UsageError(str(error)) from error


def _open(state: TrainingState, launch: Launch) -> Session:
    config = state.config
    training = Training(
        state.chunks,
        state.optimizer,
        LiveTrainerState(state),
        tokens_per_iteration=(config.training.global_batch_size or 0) * (config.training.seq_length or 0),
        iterations=config.training.train_iters or 0,
        topk=config.moe.moe_router_topk,
    )
    place = Place(launch.local_rank, launch.node, launch.job_id)
    return Session(config.moe_checkpoint, training, place)


def _restore(state: TrainingState, session: Session) -> None:
    plan, checkpoint = session.look(), state.config.checkpoint
    dense = on_rank_zero(lambda: _newest_dense(state), errors=(UsageError,))
    # A restart goes on from what its own job did; which checkpoint was asked for matters to the first start.
    asked = checkpoint.ckpt_step is not None or checkpoint.finetune
    if plan is not None and (session.is_own if asked else plan.target >= dense):
        if session.carry_out() is not None:
            return
        if checkpoint.load is None:
            raise UsageError(
                "all copies of the training state in memory and storage are damaged or lost, see the reasons above;"
                " give --load with an older checkpoint, or remove them to begin at iteration 0"
            )
        session.clear_counters()
    if plan is None and session.unusable and checkpoint.load is None:
        raise UsageError(
            f"--moe-ckpt-persist-dir has snapshots that this job cannot use: {session.unusable}; give --load, or"
            " another folder to begin at iteration 0"
        )
    if checkpoint.load is not None:
        load_checkpoint(state)
        session.refresh()
    session.discard()


def _newest_dense(state: TrainingState) -> int:
    """The newest iteration that `--load` offers, -1 if none."""
    checkpoint = state.config.checkpoint
    if checkpoint.load is None:
        return -1
    try:
        candidates = CheckpointDirectory(checkpoint.load).candidates()
    except (ValueError, OSError) as error:
        raise UsageError(f"--load {checkpoint.load}: {error}; repair the tracker or give --ckpt-step") from error
    return max((step for step in candidates if isinstance(step, int)), default=-1)
