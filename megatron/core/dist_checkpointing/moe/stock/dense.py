"""Which of its own checkpoints the stock loop has, and would load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"


def newest_checkpoint(args: Any) -> tuple[int, bool]:
    """The iteration that loading gives, -1 if there is nothing to load; and whether the flags name a certain one.

    A collective.
    """
    asked_for = getattr(args, "ckpt_step", None) is not None or bool(args.finetune) or args.load is None
    return newest_iteration(args.load), asked_for


def newest_iteration(folder: str | None) -> int:
    """The newest iteration of which a folder has a whole checkpoint, -1 if none. A collective: rank 0 looks."""
    found = [_iteration_in(folder) if folder is not None and torch.distributed.get_rank() == 0 else -1]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def _iteration_in(folder: str) -> int:
    try:
        text = (Path(folder) / TRACKER).read_text().strip()
    except OSError:
        return -1
    # A released model, which training begins from.
    return int(text) if text.isdecimal() else 0
