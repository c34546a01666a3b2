"""What Transformer Engine's Python asks of a CUDA device, as rows of the table of `cpu_device`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron.pretrain.testing.cpu_device.collectives import one_dtype_at_a_time
from megatron.pretrain.testing.cpu_device.patch import Patch, always

_H100 = SimpleNamespace(
    name="the CPU in place of an H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30
)
_asked = threading.local()


@contextlib.contextmanager
def _on_cuda() -> Iterator[None]:
    """For the block, and this thread, tensors and the device answer that they are CUDA's."""
    before, _asked.by_engine = passes_for_cuda(), True
    try:
        yield
    finally:
        _asked.by_engine = before


def passes_for_cuda() -> bool:
    """Whether this thread is where a module of Transformer Engine makes sure of CUDA."""
    return getattr(_asked, "by_engine", False)


def is_available(original: Any) -> Any:
    """For `torch.cuda.is_available`: True while a module of Transformer Engine makes sure."""

    @functools.wraps(original)
    def is_available() -> bool:
        return passes_for_cuda() or original()

    return is_available


def is_cuda(original: Any) -> Any:
    """For `Tensor.is_cuda`: True while a module of Transformer Engine makes sure."""
    return property(lambda tensor: passes_for_cuda() or original.__get__(tensor))


def run_on_cuda(original: Any) -> Any:
    """For methods that ask themselves: they run as if on CUDA."""

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with _on_cuda():
            return original(self, *arguments, **options)

    return run


def prepared_on_cuda(original: Any) -> Any:
    """For `prepare_forward`, which is a context in some releases and a function in others."""

    @functools.wraps(original)
    def prepare(self: Any, *arguments: Any, **options: Any) -> Any:
        with _on_cuda():
            prepared = original(self, *arguments, **options)
        return _entered(prepared) if hasattr(prepared, "__enter__") else prepared

    return prepare


def from_blocks(original: Any) -> Any:
    """For `forward` of the functions that take values from blocks: the kernel is given the tensor as it is."""

    def forward(_: Any, tensor: Any, dtype: Any) -> Any:
        return sys.modules["transformer_engine_torch"].dequantize(tensor, dtype)

    return staticmethod(functools.wraps(original)(forward))


@contextlib.contextmanager
def _entered(context: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        with _on_cuda():
            value = stack.enter_context(context)
        yield value


_BASE = "transformer_engine.pytorch.module.base:TransformerEngineBaseModule"

PATCHES: tuple[Patch, ...] = (
    Patch("torch.cuda", "is_available", is_available, "its modules refuse to be made without CUDA"),
    Patch("torch:Tensor", "is_cuda", is_cuda, "its modules refuse an input that is not on CUDA"),
    Patch("torch.cuda", "get_device_properties", always(_H100), "layouts and sizes of workspaces follow from it"),
    Patch("torch.cuda", "get_device_capability", always((9, 0)), "precisions and layouts follow from it"),
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        "_coalescing_manager",
        one_dtype_at_a_time,
        "weights of eight bits are gathered together with the others, and gloo mixes them up",
    ),
    *(
        Patch(
            "transformer_engine.pytorch.quantization",
            f"check_{recipe}_support",
            always((True, "")),
            "an H100 has no products of these, and the kernels here have",
        )
        for recipe in ("mxfp8", "nvfp4", "fp8_block_scaling")
    ),
    *(
        Patch(
            f"transformer_engine.pytorch.tensor.storage.{kind.lower()}_tensor_storage:_From{kind}Func",
            "forward",
            from_blocks,
            "takes a tensor to CUDA, which asks for its values again",
        )
        for kind in ("MXFP8", "NVFP4")
    ),
    Patch(_BASE, "__init__", run_on_cuda, "asks whether there is a CUDA device"),
    Patch(_BASE, "prepare_forward", prepared_on_cuda, "asks whether its input is on CUDA"),
    Patch(
        "transformer_engine.pytorch:DotProductAttention", "forward", run_on_cuda, "asks whether its input is on CUDA"
    ),
)
"""Applied after those of `cpu_device.table`, where Transformer Engine's Python was loaded."""
