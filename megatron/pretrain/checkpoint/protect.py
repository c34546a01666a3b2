"""Puts the checkpoint subsystem around a training job: `--moe-ckpt-strategy` and its flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from megatron.core.dist_checkpointing.moe import MoECheckpointManager, Timestamps
from megatron.core.dist_checkpointing.moe.config import flag_name
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.pretrain.agreement import on_rank_zero
from megatron.pretrain.checkpoint.directory import CheckpointDirectory
from megatron.pretrain.checkpoint.load import load_checkpoint
from megatron.pretrain.checkpoint.loop_state import ProgressState
from megatron.pretrain.checkpoint.state import TrainingState
from megatron.pretrain.config import parse_config
from megatron.pretrain.config.model import ModelConfig, MoEConfig
from megatron.pretrain.config.training import OptimizerFlags
from megatron.pretrain.engine_errors import driver_errors
from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.initialize import Launch


def resume(state: TrainingState, launch: Launch, marks: Timestamps | None = None) -> MoECheckpointManager:
    """Bring the state to where training goes on.

    A collective. Of what an earlier attempt left in memory and storage, and the checkpoints of `--load`, the newest
    usable one is taken. Iterations may have to be run again, or other stages waited for, before training goes on.
    """
    loop_state, checkpoint = ProgressState(state.progress, state.config.argv), state.config.checkpoint
    load = None if checkpoint.load is None else partial(_load, state)
    with driver_errors():
        manager = _manager(state, launch, loop_state, marks)
        newest = on_rank_zero(lambda: _newest_dense(state), errors=(InvalidInput,))
        # A restart goes on from what its own job did; which checkpoint was asked for matters to the first start.
        manager.resume(load, newest, asked_for=checkpoint.ckpt_step is not None or checkpoint.finetune)
        if manager.repeats_steps and loop_state.recorded_flags is not None:
            refuse_other_flags(loop_state.recorded_flags, state.config.argv)
    return manager


def _load(state: TrainingState) -> int:
    load_checkpoint(state)
    return state.progress.iteration


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
    "deterministic_mode",
    "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
)  # fmt: skip


def _manager(
    state: TrainingState, launch: Launch, loop_state: ProgressState, marks: Timestamps | None
) -> MoECheckpointManager:
    training = state.config.training
    return MoECheckpointManager(
        state.chunks,
        state.optimizer,
        state.scheduler,
        state.config.moe_checkpoint,
        train_iters=training.train_iters or 0,
        global_batch_size=training.global_batch_size or 0,
        micro_batch_size=training.micro_batch_size or 1,
        seq_length=training.seq_length or 0,
        state=loop_state,
        place=launch.place,
        timestamps=marks,
    )


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
