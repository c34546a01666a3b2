"""What a standby does before it knows its rank: it chooses the device and imports all that training needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module

from megatron.pretrain.device import device_of, values_of
from megatron.pretrain.errors import PretrainError

_MODULES = ("megatron.core.dist_checkpointing.moe.stock", "torch._dynamo")
"""What the entry script has not imported itself; optimizers import the second when one is made."""
_TOKENIZERS = "megatron.core.tokenizers.text.models"
"""Megatron-LM imports them, and `transformers` with them, once flags have been parsed."""


def warm_up(argv: Sequence[str]) -> None:
    """Choose the device and import what these flags need; flags that cannot work are for the ranks to refuse."""
    from megatron.pretrain.initialize import use_cpu

    with contextlib.suppress(PretrainError, SystemExit):
        if device_of(argv) == "cpu":
            use_cpu()
        for name in _MODULES:
            import_module(name)
        warm_up_flags(argv)


def warm_up_flags(argv: Sequence[str]) -> None:
    """Import and read what Megatron-LM needs from the moment on that it parses its flags."""
    from megatron.pretrain.flags import read_docstrings

    import_tokenizers(argv)
    read_docstrings()


def import_tokenizers(argv: Sequence[str]) -> None:
    """Import core's tokenizers, for `NullTokenizer` without `transformers`, of which it has no use.

    A rank that no standby stands in for is there the sooner.
    """
    hidden = asks_for_null_tokenizer(argv) and "transformers" not in sys.modules
    if hidden:
        sys.modules["transformers"] = None  # type: ignore[assignment]  # importing it fails as if it were not there
    try:
        with contextlib.suppress(ImportError):  # which each release keeps elsewhere
            import_module(_TOKENIZERS)
    finally:
        if hidden:
            del sys.modules["transformers"]


def asks_for_null_tokenizer(argv: Sequence[str]) -> bool:
    """By these flags alone: not where a file or a checkpoint has another say."""
    found = values_of(argv, "--tokenizer-type", "--yaml-cfg")
    return found == {"tokenizer_type": "NullTokenizer", "yaml_cfg": None} and "--use-checkpoint-args" not in argv
