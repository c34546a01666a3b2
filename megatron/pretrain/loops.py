"""Which training loop a job has: that of Megatron-LM where Megatron-Core brings it, else the driver's own."""

from __future__ import annotations

import os
from importlib.metadata import version

LOOP = "LOOP"
"""Environment variable: `stock` or `own`, in place of what the release of Megatron-Core decides."""


def has_stock_loop() -> bool:
    """Whether this job trains in the loop of Megatron-LM, which wheels have from 0.17 on."""
    chosen = os.environ.get(LOOP)
    if chosen is not None:
        return chosen == "stock"
    major, minor = version("megatron-core").split(".")[:2]
    return (int(major), int(minor)) >= (0, 17)
