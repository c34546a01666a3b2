"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.moe.errors import UsageError


def check_output(out: Path) -> None:
    """Before anything is read or measured, which may take a while. Raises UsageError where --out cannot be written."""
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out {out} cannot be written: give a file in a folder that exists and may be written to")
