"""Finds the checkpoint to resume from, judges it before touching any state, and loads it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.store.dense import open_dense
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.safe_globals import register_safe_globals
from megatron.pretrain.agreement import RankFailure, on_rank_zero, raise_together
from megatron.pretrain.checkpoint.directory import CheckpointDirectory
from megatron.pretrain.checkpoint.state import (
    Parts,
    TrainingState,
    apply_state_dict,
    sharded_by_data_parallel,
    sharded_state_dict,
)
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import UsageError

log = logging.getLogger(__name__)

_FIXED_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads", "num_experts", "padded_vocab_size")


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint that looks complete, and what its `common.pt` records."""

    iteration: int
    folder: Path
    arguments: argparse.Namespace
    metadata: dict[str, Any]


def load_checkpoint(state: TrainingState) -> bool:
    """Load what `--load` and `--ckpt-step` name into the live state; False if there is nothing to load.

    A collective over all ranks. Raises UsageError if the directory holds checkpoints but none of them can be used:
    starting over silently would throw the training done so far away.
    """
    register_safe_globals()
    refused: list[str] = []
    while True:
        found = on_rank_zero(lambda: _find(state.config, len(refused), refused), errors=(UsageError,))
        if found is None:
            return False
        parts = _loadable_parts(found, state.config)
        try:
            _load(found, state, parts)
        except RankFailure as failure:
            refused.append(f"iteration {found.iteration}: {failure}")
            log.warning("checkpoint %s cannot be loaded: %s; trying the one before it", found.folder, failure)
            continue
        log.info("loaded checkpoint of iteration %d from %s", found.iteration, state.config.checkpoint.load)
        return True


def _find(config: PretrainConfig, skip: int, refused: list[str]) -> _Found | None:
    """The best checkpoint that is complete, past the first `skip` complete ones; runs on rank 0 only."""
    flags, directory = config.checkpoint, CheckpointDirectory(str(config.checkpoint.load))
    try:
        candidates = directory.candidates() if flags.ckpt_step is None else [flags.ckpt_step]
    except (ValueError, OSError) as error:
        raise UsageError(f"--load {flags.load}: {error}; repair the tracker or give --ckpt-step") from error
    torn = list(refused)
    for iteration in candidates:
        try:
            found = _examine(directory, iteration)
        except UnreadableCheckpoint as error:
            torn.append(f"iteration {iteration}: {error}")
            continue
        if skip:
            skip -= 1
            continue
        if len(torn) > len(refused):
            log.warning("falling back to iteration %d of %s; refused %s", iteration, flags.load, "; ".join(torn))
        return found
    if torn:
        raise UsageError(f"--load {flags.load}: no usable checkpoint; {'; '.join(torn)}; nothing was loaded")
    _report_nothing(directory, flags.exit_on_missing_checkpoint)
    return None


def _report_nothing(directory: CheckpointDirectory, is_error: bool) -> None:
    root = directory.root
    if not root.is_dir():
        reason = "the directory does not exist"
    elif any(root.iterdir()):
        reason = "the directory holds other files but no checkpoint"
    else:
        reason = "the directory is empty"
    if is_error:
        raise UsageError(
            f"--load {root}: {reason}; check the path, or drop --exit-on-missing-checkpoint to start fresh"
        )
    log.warning("--load %s: %s; starting fresh from iteration 0", root, reason)


def _examine(directory: CheckpointDirectory, iteration: int) -> _Found:
    folder = directory.folder(iteration)
    checkpoint = open_dense(folder)
    arguments = checkpoint.common.get("args") or argparse.Namespace()
    return _Found(iteration, folder, arguments, checkpoint.common.get("content_metadata") or {})


def _loadable_parts(found: _Found, config: PretrainConfig) -> Parts:
    """What of this checkpoint fits the running job; raises UsageError where a mismatch cannot be bridged."""
    flags, saved, running = config.checkpoint, found.arguments, config.flat
    for name in _FIXED_ARGUMENTS:
        if hasattr(saved, name) and getattr(saved, name) != getattr(running, name):
            raise UsageError(
                f"{found.folder} was saved with {name}={getattr(saved, name)}, this job has {getattr(running, name)}; "
                "use the model flags of the checkpoint"
            )
    optimizer = flags.load_optim and not flags.finetune and not getattr(saved, "no_save_optim", False)
    rng = flags.load_rng and not flags.finetune and not getattr(saved, "no_save_rng", False)
    if optimizer:
        _require_loadable_optimizer(found, config)
    if rng and _random_layout(saved) != _random_layout(running):
        log.warning(
            "random states of %s belong to another parallel layout and are not loaded: dropout and other random "
            "choices will differ from the original run",
            found.folder,
        )
        rng = False
    return Parts(optimizer=optimizer, rng=rng)


def _require_loadable_optimizer(found: _Found, config: PretrainConfig) -> None:
    saved, running = found.arguments, config.flat
    kind = found.metadata.get("distrib_optim_sharding_type")
    was_distributed = bool(getattr(saved, "use_distributed_optimizer", kind is not None))
    if was_distributed != config.parallel.use_distributed_optimizer:
        raise UsageError(
            f"{found.folder} was saved {'with' if was_distributed else 'without'} --use-distributed-optimizer; "
            "train with the same choice, or pass --no-load-optim"
        )
    if not was_distributed or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        before, now = getattr(saved, name, 1), getattr(running, name)
        if before != now:
            raise UsageError(
                f"{found.folder} holds optimizer state as {kind}, which loads only under the same layout, but {name} "
                f"was {before} and is {now}; save with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
            )


def _random_layout(arguments: argparse.Namespace) -> tuple[Any, ...]:
    by_data_parallel = sharded_by_data_parallel(arguments)
    return (
        arguments.tensor_model_parallel_size,
        arguments.pipeline_model_parallel_size,
        by_data_parallel,
        arguments.data_parallel_size if by_data_parallel else None,
        arguments.expert_model_parallel_size,
    )


def _load(found: _Found, state: TrainingState, parts: Parts) -> None:
    """Raises RankFailure on every rank if any rank could not load."""
    problem = None
    try:
        wanted = sharded_state_dict(state, dict(found.metadata), parts, is_loading=True)
        strategy = get_default_load_sharded_strategy(str(found.folder))
        if state.config.checkpoint.ckpt_fully_parallel_load:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        loaded = dist_checkpointing.load(wanted, str(found.folder), strategy)
    except (CheckpointingException, CheckpointException, OSError, RuntimeError, KeyError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
    raise_together(problem)
    apply_state_dict(state, loaded, parts)
    torch.distributed.barrier()
