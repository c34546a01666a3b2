"""Saves dense checkpoints, in the foreground or beside training, without ever ending the training."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.moe.dense_saves.directory import CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint, format_error
from megatron.core.dist_checkpointing.moe.megatron_state.popularity import TokenCounter
from megatron.core.dist_checkpointing.moe.storage.atomic import write_atomically
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.pretrain.agreement import RankFailure, all_done, on_rank_zero, raise_on_all_ranks
from megatron.pretrain.checkpoint.partial import next_chain, selected_shards
from megatron.pretrain.checkpoint.state import (
    Parts,
    TrainingState,
    content_metadata,
    gather_parameters,
    random_shape,
    sharded_state_dict,
)
from megatron.pretrain.checkpoint.writer import ShardWriter, plan_shards
from moe_ckpt.dense import items
from moe_ckpt.dense.chain import MANIFEST, PARTIAL_BACKEND_VERSION, Chain, encode
from moe_ckpt.dense.dense import open_dense
from moe_ckpt.dense.integrity import FORMAT_VERSION, MARK, Sums, seal

log = logging.getLogger(__name__)

SAVE_ERRORS = (OSError, RankFailure, UnreadableCheckpoint)
POLL_INTERVAL_S = 0.05


@dataclasses.dataclass
class _Pending:
    iteration: int
    shards: ShardWriter
    chain: Chain | None
    started_at: float


class Saver:
    """Saves to one directory; every method is a collective over all ranks.

    A checkpoint that cannot be written is reported; training goes on, and older checkpoints stay as they are.

    Args:
        state: what is saved.
        in_use: iterations that somebody reads just now, and that retention therefore keeps.
    """

    def __init__(self, state: TrainingState, in_use: Callable[[], frozenset[int]] = frozenset) -> None:
        checkpoint = state.config.checkpoint
        self._in_use = in_use
        assert checkpoint.save is not None
        self._state = state
        self._directory = CheckpointDirectory(checkpoint.save)
        self._pending: _Pending | None = None
        self._structure_checked = False
        self.saved_iteration: int | None = None
        by_load = checkpoint.save_experts is not None and checkpoint.save_experts_selection == "load-aware"
        self._counter = TokenCounter(state.chunks) if by_load else None

    def save(self) -> None:
        """Save the state as it is now; with `--async-save` the writing goes on beside training."""
        self.wait()
        iteration, started_at = self._state.progress.iteration, time.monotonic()
        try:
            shards, chain = self._prepare(iteration)
            pending = _Pending(iteration, shards, chain, started_at)
            if self._state.config.checkpoint.async_save:
                pending.shards.start()
            else:
                pending.shards.run()
        except SAVE_ERRORS as error:
            self._report_failure(iteration, error)
            return
        self._pending = pending
        if not self._state.config.checkpoint.async_save:
            self.wait()

    def poll(self) -> None:
        """Finish a save that was started earlier, if every rank has written its part."""
        if self._pending is not None and all_done(self._pending.shards.is_done()):
            self.wait()

    def wait(self) -> None:
        """Finish a save that was started earlier, waiting for it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not all_done(pending.shards.is_done()):
            time.sleep(POLL_INTERVAL_S)
        try:
            sums, parts = pending.shards.finish()
            on_rank_zero(lambda: self._publish(pending, sums, parts), errors=(OSError, UnreadableCheckpoint))
        except SAVE_ERRORS as error:
            self._report_failure(pending.iteration, error)
            return
        self.saved_iteration = pending.iteration
        self._state.lineage.saved(pending.chain)
        elapsed_s = time.monotonic() - pending.started_at
        log.info("saved checkpoint of iteration %d to %s in %.2f s", pending.iteration, self._directory.root, elapsed_s)
        self._retain()

    def abandon(self) -> None:
        """Give up a save that was started earlier, on this rank alone: its folder is never announced."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.shards.abandon()
        self.close()

    def close(self) -> None:
        """Count tokens no longer; nothing is saved after that."""
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def is_published(self, iteration: int) -> bool:
        """Whether the checkpoint of an iteration is there, and announced."""
        errors = OSError, UnreadableCheckpoint
        try:
            return on_rank_zero(lambda: iteration in self._directory.candidates(), errors=errors)
        except errors:
            return False

    def _prepare(self, iteration: int) -> tuple[ShardWriter, Chain | None]:
        """Stage everything but the shards, and plan those; with `--save-experts` the chain says which experts."""
        config = self._state.config
        folder = Path(on_rank_zero(lambda: str(self._directory.stage(iteration))))
        raise_on_all_ranks(_refusal(folder))
        gather_parameters(self._state)
        metadata = content_metadata(config)
        rng = random_shape() if config.checkpoint.save_rng else None
        parts = Parts(optimizer=config.checkpoint.save_optim, rng=rng)
        state_dict = sharded_state_dict(self._state, metadata, parts)
        state_dict["content_metadata"] = metadata | {MARK: FORMAT_VERSION}
        sharded, common = save_preprocess(state_dict, validate_access_integrity=not self._structure_checked)
        self._structure_checked = True
        on_rank_zero(lambda: write_atomically(folder / COMMON_STATE_FNAME, _serialized(common)))
        chain = None
        if config.checkpoint.save_experts is not None:
            counted = self._counter.take()() if self._counter is not None else {}
            chain = next_chain(config, self._directory, sharded, self._state.lineage, iteration, counted)
            sharded = selected_shards(sharded, chain)
        group = None
        if config.checkpoint.ckpt_fully_parallel_save:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return plan_shards(sharded, folder, fully_parallel_group=group), chain

    def _publish(self, pending: _Pending, sums: Sums, parts: items.ItemSums) -> None:
        iteration, chain = pending.iteration, pending.chain
        staging = self._directory.staging(iteration)
        if chain is not None:
            write_atomically(staging / MANIFEST, encode(chain))
        version = 1 if chain is None or chain.is_complete else PARTIAL_BACKEND_VERSION
        marker = json.dumps(dataclasses.asdict(CheckpointingConfig("torch_dist", version)))
        write_atomically(staging / CONFIG_FNAME, marker.encode())
        # Shards that other nodes wrote to disks of their own are missing here: not a checkpoint anyone could load.
        open_dense(staging)
        write_atomically(staging / items.NAME, items.encode(parts))
        seal(staging, sums)
        self._directory.publish(iteration)

    def _retain(self) -> None:
        keep_last = self._state.config.checkpoint.keep_last
        if keep_last is None or torch.distributed.get_rank() != 0:
            return
        try:
            removed = self._directory.retain(keep_last, self._in_use())
        except (OSError, UnreadableCheckpoint) as error:
            log.warning("older checkpoints could not be removed (--keep-last %d): %s", keep_last, error)
            return
        if removed:
            log.info("removed checkpoints of iterations %s (--keep-last)", ", ".join(map(str, removed)))

    def _report_failure(self, iteration: int, error: Exception) -> None:
        log.error(
            "checkpoint of iteration %d was NOT saved to %s: %s; training goes on, the last saved iteration is %s",
            iteration,
            self._directory.root,
            error,
            self.saved_iteration,
        )
        if torch.distributed.get_rank() == 0:
            self._directory.discard(iteration)


def _refusal(folder: Path) -> str | None:
    """Why this rank cannot write into `folder`, asked before the planning, in which a rank must not fail alone."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return format_error(error)


def _serialized(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
