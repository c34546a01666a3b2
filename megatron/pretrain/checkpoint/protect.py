"""Puts the checkpoint subsystem around a training job: `--moe-ckpt-strategy` and its flags."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.moe.config import flag_name
from megatron.core.dist_checkpointing.moe.errors import (
    CheckpointFailure,
    MoECheckpointError,
    UnreadableCheckpoint,
)
from megatron.core.dist_checkpointing.moe.local_recovery.survivor import Passes
from megatron.core.dist_checkpointing.moe.policy.parking import Cause
from megatron.core.dist_checkpointing.moe.ports import PeerLost, StoreFailure
from megatron.core.dist_checkpointing.moe.recovery.timestamps import Timestamps
from megatron.core.dist_checkpointing.moe.runtime.live_state import Training
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo
from megatron.core.dist_checkpointing.moe.runtime.session import Session
from megatron.core.dist_checkpointing.moe.runtime.unprotected import Unprotected
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.pretrain.agreement import on_rank_zero
from megatron.pretrain.checkpoint.directory import CheckpointDirectory
from megatron.pretrain.checkpoint.load import load_checkpoint
from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.checkpoint.trainer_state import LiveTrainerState
from megatron.pretrain.config import PretrainConfig, parse_config
from megatron.pretrain.config.model import ModelConfig, MoEConfig
from megatron.pretrain.config.training import OptimizerFlags
from megatron.pretrain.disconnect import close_connections
from megatron.pretrain.errors import InvalidInput, PretrainError, Terminated, TrainingFailure
from megatron.pretrain.initialize import Launch
from megatron.pretrain.worker import is_lost_peer

log = logging.getLogger(__name__)


def resume(state: TrainingState, launch: Launch, marks: Timestamps | None = None) -> Session | Unprotected:
    """Bring the state to where training goes on.

    A collective. Of what an earlier attempt left in memory and storage, and the checkpoints of `--load`, the newest
    usable one is taken. The session has to begin yet: it may have to run iterations again, or to wait for stages that
    do.
    """
    if state.config.moe_checkpoint.strategy == "none":
        if state.config.checkpoint.load is not None:
            load_checkpoint(state)
        return Unprotected()
    trainer = LiveTrainerState(state)
    with driver_errors():
        session = _open(state, launch, trainer, marks)
        _restore(state, session)
        if session.repeats_steps and trainer.recorded_flags is not None:
            refuse_other_flags(trainer.recorded_flags, state.config.argv)
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
        raise InvalidInput(str(error)) from error


def leave(session: Session | Unprotected, error: BaseException) -> None:
    """Training ends here with an error: let the other ranks know at once, and put aside what is whole."""
    if isinstance(session, Unprotected):
        return  # with nothing to put aside this rank is gone soon enough
    if isinstance(error, Terminated):
        cause = Cause.TOLD_TO_END
    else:
        cause = Cause.PEER_LOST if is_lost_peer(error) else Cause.OWN_ERROR
    close_connections()
    session.failure(cause)


def refuse_other_flags(recorded: Sequence[str], given: Sequence[str]) -> None:
    """Iterations that are run again must be run as they were. Raises InvalidInput for flags that change them."""
    was, now = parse_config(recorded), parse_config(given)
    changed = [
        f"{flag_name(field)} was {getattr(before, field.name)} and is {getattr(after, field.name)}"
        for before, after in zip(was.groups(), now.groups(), strict=True)
        for field in dataclasses.fields(before)
        if (type(before) in _SHAPING or field.name in _SHAPING_FIELDS)
        and getattr(before, field.name) != getattr(after, field.name)
    ]
    if changed:
        raise InvalidInput(
            f"iterations have to be run again as they were, but {'; '.join(changed)}: start with the flags of before"
            " until a checkpoint is saved (or use moe-ckpt convert), and change them then"
        )


# Where data lie may change; a loss that differs from the recorded one shows data that are others.
_SHAPING = (ModelConfig, MoEConfig, OptimizerFlags)
_SHAPING_FIELDS = (
    "seq_length", "micro_batch_size", "global_batch_size", "calculate_per_token_loss", "split", "seed",
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
)  # fmt: skip


def _open(state: TrainingState, launch: Launch, trainer: LiveTrainerState, marks: Timestamps | None) -> Session:
    config, transformer = state.config, get_model_config(state.chunks[0])
    training = Training(
        state.chunks,
        state.optimizer,
        trainer,
        tokens_per_iteration=(config.training.global_batch_size or 0) * (config.training.seq_length or 0),
        iterations=config.training.train_iters or 0,
        topk=config.moe.moe_router_topk,
        passes=_passes(config, transformer),
    )
    place = ProcessInfo(launch.local_rank, launch.node, launch.job_id)
    return Session(config.moe_checkpoint, training, place, marks)


def _passes(config: PretrainConfig, transformer: TransformerConfig) -> Passes:
    training = config.training
    samples, microbatch = training.global_batch_size or 0, training.micro_batch_size or 1
    data_parallel = parallel_state.get_data_parallel_world_size()
    return Passes(transformer, training.seq_length or 0, microbatch, samples // (microbatch * data_parallel))


def _restore(state: TrainingState, session: Session) -> None:
    plan, checkpoint = session.look(), state.config.checkpoint
    dense = on_rank_zero(lambda: _newest_dense(state), errors=(InvalidInput,))
    # A restart goes on from what its own job did; which checkpoint was asked for matters to the first start.
    asked = checkpoint.ckpt_step is not None or checkpoint.finetune
    if plan is not None and (session.is_own if asked else plan.target >= dense):
        if session.carry_out() is not None:
            return
        if checkpoint.load is None:
            raise InvalidInput(
                "all copies of the training state in memory and storage are damaged or lost, see the reasons above;"
                " give --load with an older checkpoint, or remove them to begin at iteration 0"
            )
        session.clear_counters()
    if plan is None and session.unusable and checkpoint.load is None:
        raise InvalidInput(
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
    except (UnreadableCheckpoint, OSError) as error:
        raise InvalidInput(f"--load {checkpoint.load}: {error}; repair the tracker or give --ckpt-step") from error
    return max((step for step in candidates if isinstance(step, int)), default=-1)
