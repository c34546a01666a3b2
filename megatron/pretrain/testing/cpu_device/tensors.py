"""Tensors that are asked for on CUDA and made, or left, on the CPU. Each function here makes one replacement."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.jit import _builtins

CPU = torch.device("cpu")


@functools.cache
def factory(original: Any) -> Any:
    """For functions of torch that make tensors: no CUDA device, no pinned memory."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and device is not CPU:
                kwargs["device"] = _on_cpu(device)
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    # TorchScript knows torch's functions by identity: the cache keeps this one alive as long as its id is registered.
    _builtins._register_builtin(factory, _builtins._find_builtin(original))
    return factory


def to(original: Any) -> Any:
    """For `Tensor.to`: the CPU wherever a CUDA device is named."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            first = args[0]
            if first is not CPU and isinstance(first, (str, torch.device)):
                args = (_on_cpu(first), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def init_data(original: Any) -> Any:
    """For `ShardedTensor.init_data`: the CPU wherever a CUDA device is named."""

    @functools.wraps(original)
    def init_data(self: Any, device: Any, init_fn: Any = torch.empty) -> None:
        original(self, _on_cpu(device), init_fn)

    return init_data


def cuda(original: Any) -> Any:
    """For `Tensor.cuda`: the tensor itself."""

    @functools.wraps(original)
    def cuda(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self

    return cuda


def pin_memory(original: Any) -> Any:
    """For `Tensor.pin_memory`: a copy, as pinning makes one."""

    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self.clone()

    return pin_memory


def type_(original: Any) -> Any:
    """For `Tensor.type`: the name that the type has on a GPU, given and taken."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            name = original(self)
            # Of a subclass torch asks twice, and the second time for what was said the first time.
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
        return original(self, *args, **kwargs)

    return type_


def _on_cpu(device: Any) -> Any:
    """`device`, or the CPU if it names a CUDA device."""
    if isinstance(device, str):
        return CPU if device[:4] == "cuda" else device
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device
