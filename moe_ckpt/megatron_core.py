"""Brings Megatron-Core into a process that started without it (see `moe_ckpt.skip_megatron_core`)."""

from __future__ import annotations

import importlib
import sys
import warnings

SHARED = "megatron.core.dist_checkpointing"


def load_megatron_core() -> None:
    """Run the packages of the wheel that were skipped at the start, quietly; for what reads dense checkpoints."""
    warnings.filterwarnings("ignore", r"(?:Transformer Engine|Apex).* not installed", UserWarning)
    if "skipped" in sys.modules[SHARED].__dict__:
        del sys.modules["megatron.core"], sys.modules[SHARED]
        importlib.import_module(SHARED).__dict__["moe"] = importlib.import_module(f"{SHARED}.moe")
