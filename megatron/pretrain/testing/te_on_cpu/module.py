"""`transformer_engine_torch` for the CPU: what Transformer Engine's Python finds in place of its compiled code."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

from megatron.pretrain.testing.te_on_cpu.kernels import (
    adam,
    blockwise,
    casts,
    four_bits,
    gemm,
    norms,
    optimizers,
    scales,
)

KERNELS = (norms, gemm, adam, optimizers, casts, four_bits, blockwise, scales)
"""Modules whose public functions are kernels, under their own names."""


_FORMATS = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
"""Number formats, with the numbers that the compiled code gives them."""


class Numbered(type):
    """The type of an enumeration that nothing computes with: whatever member is asked for gets a number of its own."""

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: number for name, number in vars(cls).items() if not name.startswith("__")}

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


class CompiledModule(ModuleType):
    """A module that has our kernels, all enumerations, and for every other kernel a function that refuses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _refusing(name) if name[0].islower() else Numbered(name, (), {})
        setattr(self, name, value)
        return value


def compiled_module() -> ModuleType:
    """A new `transformer_engine_torch`."""
    module = CompiledModule("transformer_engine_torch")
    forward = [f"GEMM{number}_{operand}" for number in (1, 2, 3) for operand in ("INPUT", "WEIGHT", "OUTPUT")]
    backward = [f"GRAD_{operand}{number}" for number in (1, 2, 3) for operand in ("OUTPUT", "INPUT")]
    contents: dict[str, Any] = {
        "DType": enum.IntEnum("DType", _FORMATS),
        "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", forward, start=0),
        "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", backward, start=0),
        # Versions that are new enough for all that the Python asks about.
        "get_cublasLt_version": lambda: 130000,
        "get_cudnn_version": lambda: 91200,
        "get_num_cublas_streams": lambda: 4,
    }
    for kernels in KERNELS:
        contents |= {name: getattr(kernels, name) for name in kernels.__all__}
    for name, value in contents.items():
        setattr(module, name, value)
    return module


def _refusing(name: str) -> Any:
    def missing(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"Transformer Engine's kernel {name} has no stand-in for the CPU: leave out the flag that asks for it, or"
            " train on --device cuda"
        )

    missing.__name__ = name
    return missing
