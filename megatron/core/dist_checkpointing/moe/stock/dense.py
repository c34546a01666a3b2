"""Which of its own checkpoints the stock loop would load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"


def newest_checkpoint(args: Any) -> tuple[int, bool]:
    """The iteration that loading gives, -1 if there is nothing to load; and whether the flags name a certain one.

    A collective: rank 0 looks.
    """
    asked_for = getattr(args, "ckpt_step", None) is not None or bool(args.finetune) or args.load is None
    found = [_iteration_in(args.load) if args.load is not None and torch.distributed.get_rank() == 0 else -1]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0], asked_for


def _iteration_in(folder: str) -> int:
    try:
        text = (Path(folder) / TRACKER).read_text().strip()
    except OSError:
        return -1
    # A released model, which training begins from.
    return int(text) if text.isdecimal() else 0
