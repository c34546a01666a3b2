"""What a standby does before it knows its rank: it chooses the device and imports all that training needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module

from megatron.pretrain.errors import PretrainError

_MODULES = ("megatron.core.dist_checkpointing.moe.stock", "torch._dynamo")
"""What the entry script has not imported itself; optimizers import the second when one is made."""
_TOKENIZERS = "megatron.core.tokenizers.text.models"
"""Megatron-LM (0.19) imports them, and `transformers` with them, once flags have been parsed."""


def warm_up(argv: Sequence[str]) -> None:
    """Choose the device and import what these flags need; flags that cannot work are for the ranks to refuse."""
    from megatron.pretrain.device import device_of
    from megatron.pretrain.initialize import use_cpu

    with contextlib.suppress(PretrainError, SystemExit):
        if device_of(argv) == "cpu":
            use_cpu()
        for name in _MODULES:
            import_module(name)
        warm_up_flags()


def warm_up_flags() -> None:
    """Import and read what Megatron-LM needs from the moment on that it parses its flags."""
    from megatron.pretrain.flags import read_docstrings

    with contextlib.suppress(ImportError):  # which each release keeps elsewhere
        import_module(_TOKENIZERS)
    read_docstrings()
