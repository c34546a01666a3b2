"""Imports Megatron-Core, importing this module does, in half the time: a rank that is restarted is there sooner.

Core decorates its fused functions with `torch.compile` while it is imported, and that imports torch's compiler, which
few jobs need. Here functions are compiled when they are called first, and not at all where a CPU plays the device. Its
timers import wandb, an eighth of the rest. And Python looks for garbage again and again while a million objects come to
be that all stay.

A rank that a launcher has started ends at once at Ctrl-C from here on, and outlives who reads its output.

Where Python, torch or Megatron-Core is too old for the driver, or has no training loop, the process ends here with a
line that says so.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron.pretrain.device import wants_engine_on_cpu
from megatron.pretrain.exit_noise import OF_LAUNCHERS, end_at_once_when_interrupted, outlive_readers
from moe_ckpt.megatron_core import UNUSABLE, load_megatron_core, refuse_unsupported_versions

KERNELS = {"transformer_engine": "transformer_engine.pytorch", "apex": "apex"}
"""Packages with CUDA kernels that Megatron-Core uses where they can be imported, and what it imports of them."""


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


class _Writer:
    """Stands for wandb in core's timers, which do nothing with it but to ask whether a writer is that package."""

    def __eq__(self, writer: object) -> bool:
        return writer is sys.modules.get("wandb")

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def timers_without_wandb() -> Iterator[None]:
    """Core's timers, imported in the block, do not import wandb; they write to it once the job has imported it."""
    # Where None stands there, `import wandb` fails as if it were not installed.
    imported = sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]
    yield
    if imported is None:
        del sys.modules["wandb"]
        importlib.import_module("megatron.core.timers").wandb = _Writer()


def refuse_half_installed() -> None:
    """End the process with a line and exit code 2 where a package with kernels is there and breaks when imported.

    An ImportError says that it is not installed, to Megatron-Core too; anything else would end that with a traceback.
    """
    for package, module in KERNELS.items():
        try:
            if importlib.util.find_spec(package) is not None:
                importlib.import_module(module)
        except ImportError:
            continue
        except Exception as error:
            said = " ".join(str(error).split())
            sys.stderr.write(
                f"{package} is half installed: importing {module} fails with {type(error).__name__}: {said}; install it"
                f" again for this machine's CUDA and torch, or uninstall it\n"
            )
            raise SystemExit(UNUSABLE) from None


def refuse_core_without_loop() -> None:
    """End the process with a line and exit code 2 where Megatron-Core comes without `megatron.training`.

    As a source tree of which only `megatron/core` was taken.
    """
    if importlib.util.find_spec("megatron.training") is None:
        core = importlib.util.find_spec("megatron.core")
        folders = ", ".join(core.submodule_search_locations or ()) if core is not None else ""
        sys.stderr.write(
            f"megatron-core ({folders}) has no training loop beside it: there is no megatron.training; pip install"
            " 'megatron-core>=0.17,<0.20', or put a whole Megatron-LM on PYTHONPATH\n"
        )
        raise SystemExit(UNUSABLE)


def _load_engine_for_cpu() -> None:
    """Where flags ask for Transformer Engine on the CPU: Megatron-Core looks for it while it is imported."""
    if not wants_engine_on_cpu(sys.argv[1:]):
        return
    from megatron.pretrain.testing import te_on_cpu

    try:
        te_on_cpu.load()
    except te_on_cpu.MissingWheel as error:
        sys.stderr.write(f"--device cpu --transformer-impl transformer_engine: {error}\n")
        raise SystemExit(UNUSABLE) from None


def _import() -> None:
    if not OF_LAUNCHERS.isdisjoint(os.environ):
        end_at_once_when_interrupted()
        outlive_readers()
    refuse_unsupported_versions()
    refuse_core_without_loop()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch

        with compiled_at_first_call(torch), timers_without_wandb():
            _load_engine_for_cpu()
            refuse_half_installed()
            load_megatron_core()
    finally:
        gc.freeze()
        # Else bindings made with nanobind, such as triton's, report each frozen object as leaked.
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()


_import()
