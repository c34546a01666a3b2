"""Stand-ins for packages that Transformer Engine imports and that training on the CPU never uses.

`pydantic` checks the fields of recipes, whose dataclasses work without, and `einops` serves inference: both are
replaced where they are not installed. Of Transformer Engine itself two parts are replaced always: Triton's kernels,
which need a GPU, and the export to ONNX, which needs 54 MB of packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from types import ModuleType
from typing import Any

_ENGINE = "transformer_engine.pytorch"
_KERNELS = "cross_entropy grouped_dbias_dscales mhc pad permutation".split()
"""Modules of `transformer_engine.pytorch.triton`, of all releases."""


class Unusable(ModuleType):
    """A module without contents: what is taken from it fails when it is called, by name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"

        def missing(*arguments: Any, **options: Any) -> Any:
            raise NotImplementedError(f"{place} does not run on the CPU: leave out the flag that asks for it")

        return missing


def fill_in() -> None:
    """Put the stand-ins where imports look first."""
    if importlib.util.find_spec("pydantic") is None:
        decorators = _module("pydantic.dataclasses", dataclass=_dataclass)
        _module("pydantic", dataclasses=decorators)
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = Unusable("einops")
    sys.modules[f"{_ENGINE}.onnx_extensions"] = Unusable(f"{_ENGINE}.onnx_extensions")
    kernels = {name: Unusable(f"{_ENGINE}.triton.{name}") for name in _KERNELS}
    _module(f"{_ENGINE}.triton", __path__=[], **kernels)
    sys.modules.update({module.__name__: module for module in kernels.values()})


def _dataclass(**options: Any) -> Any:
    """As pydantic's: fields that a class does not have are passed over. Megatron-Core gives such ones."""

    def decorated(cls: type) -> type:
        made: Any = dataclasses.dataclass(**options)(cls)
        initialize, known = made.__init__, {field.name for field in dataclasses.fields(made)}

        @functools.wraps(initialize)
        def without_others(self: Any, *arguments: Any, **given: Any) -> None:
            initialize(self, *arguments, **{name: value for name, value in given.items() if name in known})

        made.__init__ = without_others
        result: type = made
        return result

    return decorated


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module
