"""Compares the bytes of a checkpoint with what was saved, before any of them is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing.moe.store.dense import DenseCheckpoint
from megatron.core.dist_checkpointing.moe.store.integrity import NAME, FileSum, damaged, expected, shares
from megatron.pretrain.agreement import raise_together

log = logging.getLogger(__name__)


def sums_of(parts: Iterable[DenseCheckpoint]) -> dict[Path, FileSum]:
    """What the files of a checkpoint were when they were saved; `parts` are the iterations that it is loaded from.

    Raises UnreadableCheckpoint for an integrity file that is damaged, or missing although there was one.
    """
    sums: dict[Path, FileSum] = {}
    for part in parts:
        found = expected(part.directory, part.common)
        if found is None:
            log.info("%s has no %s: its bytes are loaded without being checked", part.directory, NAME)
        sums |= found or {}
    return sums


def require_intact(sums: Mapping[Path, FileSum]) -> None:
    """Compare all files with their sums, each rank its share of them; a collective over all ranks.

    Raises RankFailure on every rank, which names the file, if any has changed.
    """
    own = shares(sums, dist.get_world_size())[dist.get_rank()]
    found = damaged({path: sums[path] for path in own})
    raise_together(f"{found[0]}; restore the file or take another iteration" if found else None)
