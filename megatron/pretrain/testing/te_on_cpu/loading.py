"""Brings Transformer Engine's Python into this process, once, with our module in place of the compiled one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings

from megatron.pretrain.testing.te_on_cpu.wheel import find

# Its own switch for building without a GPU: no CUDA libraries are loaded. Functions stay uncompiled, and the softmax is
# that of torch's operators.
_SETTINGS = {
    "NVTE_PROJECT_BUILDING": "1",
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_MASKED_SOFTMAX_FUSION": "0",
}


def is_loaded() -> bool:
    """Whether `load` was called in this process."""
    return _loaded


def load() -> None:
    """Import Transformer Engine's Python over our kernels; a second call does nothing.

    Raises:
        MissingWheel: The wheel is not there.
        RuntimeError: Another Transformer Engine, or Megatron-Core, was imported before.
    """
    global _loaded
    if _loaded:
        return
    folder = find()
    for name in ("transformer_engine", "megatron.core.utils"):
        if name in sys.modules:
            raise RuntimeError(f"{name} was imported before Transformer Engine's Python for the CPU: load that first")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

    from megatron.pretrain.testing.te_on_cpu import absent
    from megatron.pretrain.testing.te_on_cpu.module import compiled_module

    sys.modules["transformer_engine_torch"] = compiled_module()
    absent.fill_in()
    sys.path.insert(0, str(folder))
    _import()
    _loaded = True


def _import() -> None:
    """Import all of it. Its package looks for compiled code in its first line, so it runs after what looks is taken
    out."""
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.loader is not None  # `find` has seen it
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    common = importlib.import_module("transformer_engine.common")
    common.__dict__["load_framework_extension"] = lambda *compiled: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("transformer_engine.pytorch")  # an error of its own, which the package would hide
        spec.loader.exec_module(package)


_loaded = False
