"""Finds the checkpoint to resume from, judges it before touching any state, and loads it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.moe.core_versions.checkpoints import load_with_common
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory, Step
from megatron.core.dist_checkpointing.moe.dense_saves.intact import require_intact
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.megatron_state import raw_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.safe_globals import register_safe_globals
from megatron.pretrain.agreement import RankFailure, on_rank_zero, raise_on_all_ranks
from megatron.pretrain.checkpoint.partial import MergingLoadStrategy, Sources, content_of, report_staleness
from megatron.pretrain.checkpoint.state import (
    Parts,
    TrainingState,
    apply_state_dict,
    random_shape,
    saves_raw,
    sharded_state_dict,
)
from megatron.pretrain.checkpoint.verified_reads import ItemsOfFiles, Reads, report, verified_reads
from megatron.pretrain.config import PretrainConfig
from megatron.pretrain.errors import InvalidInput
from moe_ckpt.dense import items
from moe_ckpt.dense.chain import Chain
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import NAME, FileSum, sums_of
from moe_ckpt.dense.merged import open_merged
from moe_ckpt.dense.names import COMMON, RELEASE
from moe_ckpt.dense.partial_saves import after_loading

log = logging.getLogger(__name__)

_FIXED_ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("normalization", "position_embedding_type", "untie_embeddings_and_output_weights", "qk_layernorm"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_enable_expert_bias", "padded_vocab_size"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
_LAYOUT_ARGUMENTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
_PRECISION_ARGUMENTS = (
    *("use_precision_aware_optimizer", "bf16", "fp16", "main_params_dtype", "fp8_main_params"),
    *("exp_avg_dtype", "exp_avg_sq_dtype", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp8_amax_history_len"),
)
_RANDOM_STATE = re.compile(r"rng_state/shard_[\d.]+_([\d.]+)")


class NothingIntact(InvalidInput):
    """There are checkpoints, and each of them is torn or damaged."""


@dataclasses.dataclass(frozen=True)
class _Found:
    """A checkpoint that looks complete, what its common part records and how its random states are sharded.

    `sums`: what its files were when they were saved, as far as that is known; `items`: the same of the items in them.
    `sources`: where its experts are, if it was saved with `--save-experts`.
    """

    step: Step
    folder: Path
    arguments: argparse.Namespace
    metadata: dict[str, Any]
    random_shape: tuple[int, ...] | None
    sums: Mapping[Path, FileSum]
    items: ItemsOfFiles
    sources: Sources | None

    @property
    def name(self) -> str:
        return _named(self.step)


def load_checkpoint(state: TrainingState) -> bool:
    """Load what `--load` and `--ckpt-step` name into the live state; False if there is nothing to load.

    A collective over all ranks. Raises InvalidInput if the directory holds checkpoints but none of them can be used,
    NothingIntact where that is for damage: starting over silently would throw the training done so far away.
    """
    register_safe_globals()
    refused: dict[Step, str] = {}
    while True:
        found = on_rank_zero(lambda: _find(state.config, refused), errors=(InvalidInput,))
        if found is None:
            return False
        try:
            require_intact(found.sums, by_length=found.items)
            parts = _loadable_parts(found, state.config)
            _load(found, state, parts)
        except RankFailure as failure:
            refused[found.step] = str(failure)
            continue
        log.info("loaded checkpoint of %s from %s", found.name, state.config.checkpoint.load)
        if found.sources is not None:
            report_staleness(found.sources.chain)
        state.lineage.saved(_continued(found, parts, state.config))
        return True


def _continued(found: _Found, parts: Parts, config: PretrainConfig) -> Chain | None:
    """The chain that saving goes on with, if `--save` is the directory loaded from and all that it holds was loaded."""
    flags = config.checkpoint
    if found.sources is None or flags.save is None or not parts.iteration:
        return None
    chain, same_directory = found.sources.chain, Path(flags.save).resolve() == Path(str(flags.load)).resolve()
    is_whole = parts.optimizer or not flags.save_optim
    return after_loading(chain) if same_directory and is_whole and chain.content == content_of(config) else None


def _find(config: PretrainConfig, refused: Mapping[Step, str]) -> _Found | None:
    """The best checkpoint that is complete and not among the `refused` ones; runs on rank 0 only."""
    flags, directory = config.checkpoint, CheckpointDirectory(str(config.checkpoint.load))
    try:
        candidates = directory.candidates() if flags.ckpt_step is None else [flags.ckpt_step]
    except (UnreadableCheckpoint, OSError) as error:
        raise InvalidInput(f"--load {flags.load}: {error}; repair the tracker or give --ckpt-step") from error
    torn: list[str] = []
    for step in candidates:
        try:
            if step in refused:
                raise UnreadableCheckpoint(refused[step])
            found = _examine(directory, step)
        except UnreadableCheckpoint as error:
            torn.append(f"{_named(step)}: {error}")
            continue
        if torn:
            log.warning("falling back to %s of %s; refused %s", found.name, flags.load, "; ".join(torn))
        return found
    if torn:
        raise NothingIntact(f"--load {flags.load}: no usable checkpoint; {'; '.join(torn)}; nothing was loaded")
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
        raise InvalidInput(
            f"--load {root}: {reason}; check the path, or drop --exit-on-missing-checkpoint to start fresh"
        )
    log.warning("--load %s: %s; starting fresh from iteration 0", root, reason)


def _named(step: Step) -> str:
    return "the release" if step == RELEASE else f"iteration {step}"


def _examine(directory: CheckpointDirectory, step: Step) -> _Found:
    folder = directory.folder(step)
    if any(folder.glob("mp_rank_0*")):
        # Not torn, so an older iteration is no substitute for it.
        raise InvalidInput(
            f"--load {directory.root}: {folder.name} is in Megatron's legacy format 'torch' (mp_rank_*/*.pt), only "
            "torch_dist can be loaded; convert it with Megatron-LM, or choose another iteration with --ckpt-step"
        )
    merged = open_merged(folder)
    checkpoint = open_dense(folder) if merged is None else merged.newest
    common = checkpoint.common
    if step != RELEASE and not {"args", "iteration"} <= common.keys():
        raise UnreadableCheckpoint("it does not say at which iteration and data position it was saved")
    shapes = (match[1] for match in map(_RANDOM_STATE.fullmatch, checkpoint.objects) if match)
    shape = next((tuple(map(int, text.split("."))) for text in shapes), None)
    arguments, metadata = common.get("args") or argparse.Namespace(), common.get("content_metadata")
    parts = [checkpoint] if merged is None else list(merged.parts.values())
    sums = sums_of(parts)
    for folder_without in {part.directory for part in parts} - {path.parent for path in sums}:
        log.info("%s has no %s: its bytes are loaded without being checked", folder_without, NAME)
    sources = None if merged is None else Sources.of(merged)
    sums_of_items = {path: of for part in parts for path, of in items.read(part.directory).items() if path in sums}
    saved = metadata if isinstance(metadata, dict) else {}
    return _Found(step, folder, arguments, saved, shape, sums, sums_of_items, sources)


def _loadable_parts(found: _Found, config: PretrainConfig) -> Parts:
    """What of this checkpoint fits the running job; raises InvalidInput where a mismatch cannot be bridged."""
    flags, saved, running = config.checkpoint, found.arguments, config.flat
    for name in _FIXED_ARGUMENTS:
        if hasattr(saved, name) and _meant(saved, name) != _meant(running, name):
            raise InvalidInput(
                f"{found.folder} was saved with {name}={getattr(saved, name)}, this job has {getattr(running, name)}; "
                f"use {_matching_flags(name, saved, config)}"
            )
    weights_only = flags.finetune or found.step == RELEASE
    optimizer = flags.load_optim and not weights_only and not getattr(saved, "no_save_optim", False)
    rng = flags.load_rng and not weights_only and not getattr(saved, "no_save_rng", False)
    if optimizer:
        _require_loadable_optimizer(found, config)
    shape = _loadable_random_states(found, config) if rng else None
    return Parts(optimizer=optimizer, rng=shape, iteration=not weights_only)


def _meant(arguments: argparse.Namespace, name: str) -> Any:
    """What an argument stands for, also where it was left to Megatron's default."""
    value = getattr(arguments, name)
    if value is not None:
        return value
    if name == "kv_channels":
        return arguments.hidden_size // arguments.num_attention_heads
    return arguments.num_attention_heads if name == "num_query_groups" else _NOTHING.get(name)


_NOTHING = {"moe_shared_expert_intermediate_size": 0}


def _matching_flags(name: str, saved: argparse.Namespace, config: PretrainConfig) -> str:
    """What to pass so that `name` is as it was saved."""
    ranks = config.parallel.tensor_model_parallel_size
    if name == "padded_vocab_size" and saved.padded_vocab_size % ranks == 0:
        return f"--make-vocab-size-divisible-by {saved.padded_vocab_size // ranks}, which pads the vocabulary equally"
    return "the model flags of the checkpoint"


def _require_loadable_optimizer(found: _Found, config: PretrainConfig) -> None:
    saved, running = found.arguments, config.flat
    kind = found.metadata.get("distrib_optim_sharding_type")
    was_distributed = bool(getattr(saved, "use_distributed_optimizer", kind is not None))
    if was_distributed != config.parallel.use_distributed_optimizer:
        raise InvalidInput(
            f"{found.folder} was saved {'with' if was_distributed else 'without'} --use-distributed-optimizer; "
            "train with the same choice, or pass --no-load-optim"
        )
    if saves_raw(config) or kind == raw_state.SHARDING:
        _require_same_precision(found, config, kind)
        return
    if not was_distributed or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    for name in _LAYOUT_ARGUMENTS:
        now = getattr(running, name)
        before = getattr(saved, name, now)
        if before != now:
            raise InvalidInput(
                f"{found.folder} holds optimizer state as {kind}, which loads only under the same layout, but {name} "
                f"was {before} and is {now}; save with --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim"
            )


def _require_same_precision(found: _Found, config: PretrainConfig, kind: str | None) -> None:
    """State of few bits loads as it is or not at all: to cast it, or to cut it anew, gives it other scales."""
    saved, running = found.arguments, config.flat
    if kind != raw_state.SHARDING:
        raise InvalidInput(
            f"{found.folder} holds optimizer state as {kind}, not that of this job's precision-aware optimizer or"
            " eight-bit training; leave out --use-precision-aware-optimizer and --fp8-format, or pass --no-load-optim"
        )
    for name in (*_PRECISION_ARGUMENTS, *_LAYOUT_ARGUMENTS, "data_parallel_size"):
        before, now = getattr(saved, name, None), getattr(running, name)
        if before != now:
            raise InvalidInput(
                f"{found.folder} holds state of few bits as it was on each rank, but {name} was {before} and is {now};"
                " train with the same, or pass --no-load-optim"
            )


def _loadable_random_states(found: _Found, config: PretrainConfig) -> tuple[int, ...] | None:
    """How the random states of this checkpoint are sharded, or None if they are not those of this job's ranks."""
    saved, running, shape = found.arguments, config.flat, random_shape()
    fixed = ["expert_model_parallel_size", "data_parallel_random_init"]
    if config.training.data_parallel_random_init:
        fixed.append("data_parallel_size")
    same = all(getattr(saved, name, getattr(running, name)) == getattr(running, name) for name in fixed)
    if not same or found.random_shape not in (shape, shape[:2]):
        log.warning(
            "random states of %s belong to another parallel layout and are not loaded: dropout and other random "
            "choices will differ from the original run",
            found.folder,
        )
        return None
    if found.random_shape != shape:
        log.warning(
            "%s holds the random states of one data-parallel rank, as some releases of Megatron-LM save them: all "
            "data-parallel ranks go on with these",
            found.folder,
        )
    return found.random_shape


def _first_reason(error: BaseException) -> str:
    """One line for an error of core or torch; of torch's, which gathers those of all ranks, the first inside."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, UnreadableCheckpoint):
        return f"{error}; restore the file or take another iteration"
    return f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}"


def _strategy(found: _Found) -> Any:
    if found.sources is None or found.sources.chain.is_complete:
        return get_default_load_sharded_strategy(str(found.folder))
    return MergingLoadStrategy(found.sources)


def _load(found: _Found, state: TrainingState, parts: Parts) -> None:
    """Raises RankFailure on every rank if any rank could not load."""
    problem, reads, began_s = None, Reads(), time.monotonic()
    try:
        wanted = sharded_state_dict(state, dict(found.metadata), parts, is_loading=True)
        strategy = _strategy(found)
        if state.config.checkpoint.ckpt_fully_parallel_load:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        # Megatron-Core since 0.19 keeps what was `common.pt` in the sharded files.
        common = None if (found.folder / COMMON).exists() else lambda: open_dense(found.folder).common
        with verified_reads(found.items) as reads:
            loaded = load_with_common(wanted, found.folder, strategy, common)
    except (
        UnreadableCheckpoint,
        CheckpointingException,
        CheckpointException,
        OSError,
        RuntimeError,
        KeyError,
    ) as error:
        problem = _first_reason(error)
    raise_on_all_ranks(problem)
    if found.items:
        _report(found, state, reads, time.monotonic() - began_s)
    try:
        apply_state_dict(state, loaded, parts)
    except KeyError as error:
        # Core (0.16 to 0.19) chains its optimizers otherwise where experts have other data-parallel groups.
        problem = (
            f"Megatron-Core cannot bring the optimizer's state to this parallel layout ({error} is missing): start in"
            " the layout of the checkpoint, or give --no-load-optim"
        )
    raise_on_all_ranks(problem)


def _report(found: _Found, state: TrainingState, reads: Reads, seconds: float) -> None:
    """Raises RankFailure where bytes were loaded that nobody compared."""
    iteration = found.step if isinstance(found.step, int) else 0
    told = report(iteration, found.items, reads, seconds)
    unread = "torch read no item through FileSystemReader, so nothing was compared with its checksum"
    raise_on_all_ranks(None if told.read_bytes else unread)
    log.info("%s: %s", found.name, told)
    state.loads.append(told)
