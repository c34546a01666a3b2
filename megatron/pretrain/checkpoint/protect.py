"""Puts the checkpoint subsystem around a training job: `--moe-ckpt-strategy` and its flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from megatron.core.dist_checkpointing.moe import MoECheckpointManager, Timestamps
from megatron.core.dist_checkpointing.moe.config import flag_name
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.storage.job_secret import read_secret
from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret
from megatron.pretrain.agreement import on_rank_zero, raise_invalid_input_on_all_ranks
from megatron.pretrain.checkpoint.load import NothingIntact, load_checkpoint
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
    # For --load and --save, which no strategy has to be there for.
    raise_invalid_input_on_all_ranks(partial(_take_secret, state.config.moe_checkpoint.secret_file))
    with driver_errors():
        manager = _manager(state, launch, loop_state, marks)
        newest = on_rank_zero(lambda: _newest_dense(state), errors=(InvalidInput,))
        # A restart goes on from what its own job did; which checkpoint was asked for matters to the first start.
        asked_for = checkpoint.ckpt_step is not None or checkpoint.finetune
        manager.resume(load, newest, asked_for=asked_for)
        _begin_chain_anew_after_snapshot(state, manager)
        if manager.repeats_steps and loop_state.recorded_flags is not None:
            refuse_other_flags(loop_state.recorded_flags, state.config.argv)
    return manager


def _begin_chain_anew_after_snapshot(state: TrainingState, manager: MoECheckpointManager) -> None:
    """Copies of experts in a checkpoint that was loaded, and then passed by for a snapshot, are not what is newest."""
    chain = state.lineage.chain
    if chain is not None and (manager.is_replaying or chain.iteration != state.progress.iteration):
        state.lineage.saved(None)


def _take_secret(path: str | None) -> None:
    """Seal with the job's secret from here on. Raises InvalidInput."""
    try:
        use_secret(read_secret(path))
    except UsageError as error:
        raise InvalidInput(str(error)) from error


def _load(state: TrainingState) -> int:
    """Raises UnreadableCheckpoint, on all ranks, where all that is there is damaged."""
    try:
        load_checkpoint(state)
    except NothingIntact as error:
        raise UnreadableCheckpoint(str(error)) from error
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
    training, settings = state.config.training, state.config.moe_checkpoint
    if settings.strategy == "none":
        settings = dataclasses.replace(settings, secret_file=None)  # for ordinary checkpoints alone, which are ours
    return MoECheckpointManager(
        state.chunks,
        state.optimizer,
        state.scheduler,
        settings,
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
