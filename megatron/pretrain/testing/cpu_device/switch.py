"""Installs the table of patches in this process and takes it back."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator

import torch

from megatron.pretrain.testing.cpu_device.table import LOOP_PATCHES, PATCHES
from megatron.pretrain.testing.te_on_cpu import is_loaded

_undo: contextlib.ExitStack | None = None


def install() -> None:
    """Map CUDA to the CPU for this process, for Megatron-LM too, which this imports; a second call does nothing.

    Compiled functions (`torch.compile`, which Megatron-Core decorates its fusions with) run eagerly from here on; what
    is decorated while this is in effect stays as it is.

    Raises:
        AttributeError: torch or Megatron-Core no longer have an attribute of the table. Nothing is changed then.
    """
    global _undo
    if _undo is not None:
        return
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            patch.apply(stack)
        if is_loaded():
            from megatron.pretrain.testing.cpu_device.engine import PATCHES as OF_TRANSFORMER_ENGINE

            for patch in OF_TRANSFORMER_ENGINE:
                patch.apply(stack)
        importlib.import_module("megatron.training.training")  # says what is missing, where something is
        for patch in LOOP_PATCHES:
            patch.apply(stack)
        if "torch._dynamo" in sys.modules:  # else nothing was compiled before, and it takes seconds to load
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)
        _undo = stack.pop_all()


def uninstall() -> None:
    """Put back every original, and delete what did not exist; does nothing if nothing is installed."""
    global _undo
    if _undo is not None:
        _undo.close()
        _undo = None


def is_installed() -> bool:
    """Whether `install()` is in effect in this process."""
    return _undo is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Install for the duration of the block, unless it was installed before: then it stays."""
    before = is_installed()
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()
