"""Imports Megatron-Core, importing this module does, in half the time: a rank that is restarted is there sooner.

Core decorates its fused functions with `torch.compile` while it is imported, and that imports torch's compiler, which
few jobs need. Here functions are compiled when they are called first, and not at all where a CPU plays the device. And
Python looks for garbage again and again while a million objects come to be that all stay.

Where Python, torch or Megatron-Core is too old for the driver, the process ends here with a line that says so.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from moe_ckpt.megatron_core import load_megatron_core, refuse_unsupported_versions


@contextmanager
def compiled_at_first_call(torch: ModuleType) -> Iterator[None]:
    """What is given to `torch.compile` in the block is compiled at its first call, as `torch.compile` does it then."""
    compile_now = torch.compile

    def late(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(late, **options)
        compiled = None

        @functools.wraps(function)
        def first(*arguments: Any, **named: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                compiled = (compile_now if torch.compile is late else torch.compile)(function, **options)
            return compiled(*arguments, **named)

        return first

    torch.compile = late  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.compile = compile_now  # type: ignore[attr-defined]


def _import() -> None:
    refuse_unsupported_versions()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch

        with compiled_at_first_call(torch):
            load_megatron_core()
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


_import()
