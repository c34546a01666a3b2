"""Compares the bytes of a checkpoint with what was saved, before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist

from moe_ckpt.dense.integrity import FileSum, damaged, shares

from .agreement import all_done, raise_on_all_ranks

POLL_INTERVAL_S = 0.05


def require_intact(sums: Mapping[Path, FileSum]) -> None:
    """Compare all files with their sums, each rank its share of them; a collective over all ranks.

    Raises RankFailure on every rank, which names the file, if any has changed.
    """
    own = shares(sums, dist.get_world_size())[dist.get_rank()]
    with ThreadPoolExecutor(1, "integrity") as beside:
        summing = beside.submit(damaged, {path: sums[path] for path in own})
        # A single huge file may take one rank longer than a collective may last.
        while True:
            wait([summing], POLL_INTERVAL_S)
            if all_done(summing.done()):
                break
        found = summing.result()
    raise_on_all_ranks(f"{found[0]}; restore the file or take another iteration" if found else None)
