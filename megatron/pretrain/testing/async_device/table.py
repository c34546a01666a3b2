"""Which attributes of torch are an asynchronous device's while it is installed."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron.pretrain.testing.async_device.device import AsyncDevice
from megatron.pretrain.testing.async_device.operators import Operators
from megatron.pretrain.testing.cpu_device.patch import Patch, always, just

_FACTORIES = (
    *("empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace", "rand", "randn", "randint"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)
_PROPERTIES = SimpleNamespace(name="an asynchronous CPU", pci_domain_id=0, pci_bus_id=0, pci_device_id=0)


def patches(device: AsyncDevice) -> tuple[Patch, ...]:
    """The rows for a device."""
    operators = Operators(device)
    return (
        Patch("torch.cuda", "Stream", just(device.Stream), "streams run late"),
        Patch("torch.cuda", "Event", just(device.Event), "events are reached late"),
        Patch("torch.cuda", "stream", just(device.stream), "each thread has a current stream"),
        Patch("torch.cuda", "current_stream", just(device.current_stream), "each thread has a current stream"),
        Patch("torch.cuda", "default_stream", lambda _: lambda device_=None: device.default, "training's"),
        Patch("torch.cuda", "synchronize", just(device.synchronize), "runs all"),
        Patch("torch.cuda", "cudart", lambda _: lambda: device, "locks pages"),
        Patch("torch.cuda", "current_device", lambda _: lambda: device.thread_index, "each thread has its own"),
        Patch("torch.cuda", "set_device", just(device.set_device), "each thread has its own"),
        Patch("torch.cuda", "device", just(device.device), "each thread has its own"),
        Patch("torch.cuda", "is_initialized", always(True), "what calls CUDA is asked for"),
        Patch("torch.cuda", "_lazy_init", always(None), "there is no driver"),
        Patch("torch.cuda", "is_current_stream_capturing", always(False), "there are no CUDA graphs"),
        Patch("torch.cuda", "get_device_properties", always(_PROPERTIES), "places of devices are looked up"),
        Patch("torch:Tensor", "is_cuda", lambda _: property(_on_device(device)), "asked everywhere"),
        Patch("torch:Tensor", "device", functools.partial(_device, device), "is passed on as `device=`"),
        Patch("torch:Tensor", "record_stream", lambda _: _record_stream(device), "keeps memory for a stream"),
        Patch("torch:Tensor", "is_pinned", lambda _: lambda self, *_: device.memory.is_locked(self), "as locked"),
        Patch("torch:Tensor", "pin_memory", lambda _: lambda self, *_: device.memory.allocate_pinned(self), "a copy"),
        Patch("torch:Tensor", "cpu", functools.partial(_cpu, operators, device), "a copy that the host waits for"),
        Patch("torch:Tensor", "cuda", functools.partial(_cuda, operators, device), "a copy"),
        Patch("torch:Tensor", "to", functools.partial(_to, operators, device), "a copy where a device is named"),
        Patch("torch:Tensor", "tolist", functools.partial(_through_host, device), "reads memory past the operators"),
        Patch("torch:Tensor", "numpy", functools.partial(_host_only, device), "refused for tensors of a device"),
        Patch("torch:Tensor", "__reduce_ex__", functools.partial(_after_all, device), "reads memory as it is"),
        Patch("torch", "tensor", _made_on_host, "is made on the host, past the operators"),
        Patch("torch", "as_tensor", _made_on_host, "is made on the host, past the operators"),
        *(Patch("torch", name, _unmapped, "not on the CPU where a device is named") for name in _FACTORIES),
        Patch(
            "megatron.core.transformer.moe.token_dispatcher",
            "maybe_move_tensor_to_cpu",
            inspect.unwrap,
            "core's own, which copies on a side stream",
        ),
        Patch("threading:Thread", "run", functools.partial(_with_operators, device), "operators of all threads"),
    )


def _on_device(device: AsyncDevice) -> Callable[[torch.Tensor], bool]:
    return lambda tensor: device.memory.block_of(tensor) is not None


def _device(device: AsyncDevice, original: Any) -> Any:
    own, here = original.__get__, torch.device("cuda", device.index)
    return property(lambda tensor: own(tensor) if device.memory.block_of(tensor) is None else here)


def _record_stream(device: AsyncDevice) -> Any:
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if (block := device.memory.block_of(self)) is not None:
            block.used_by.add(stream)

    return record_stream


def _cpu(operators: Operators, device: AsyncDevice, original: Any) -> Any:
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if device.memory.block_of(self) is None else operators.moved(self.detach(), None, False)

    return cpu


def _cuda(operators: Operators, device: AsyncDevice, original: Any) -> Any:
    def cuda(self: torch.Tensor, where: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        if device.memory.block_of(self) is not None:
            return self
        return operators.moved(self.detach(), None, non_blocking)

    return cuda


def _to(operators: Operators, device: AsyncDevice, original: Any) -> Any:
    to_dtype = inspect.unwrap(original)

    @functools.wraps(to_dtype)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        where = kwargs.pop("device", None)
        if args and isinstance(args[0], torch.Tensor):
            where, args = args[0].device, (args[0].dtype, *args[1:])
        elif (args and isinstance(args[0], str | torch.device | int)) or (args and args[0] is None):
            where, args = args[0], args[1:]
        non_blocking = bool(kwargs.get("non_blocking", args[1] if len(args) > 1 else False))
        moved = self
        if where is not None:
            on_device = device.memory.block_of(self) is not None
            if _names_device(where) and not on_device:
                moved = self.cuda(non_blocking=non_blocking)
            elif on_device and not _names_device(where):
                moved = operators.moved(self.detach(), None, non_blocking)
        args = tuple(one for one in args if one is not None)
        dtypes = [one for one in args if isinstance(one, torch.dtype)]
        wanted = kwargs.get("dtype", dtypes[0] if dtypes else None)
        copy = bool(kwargs.get("copy", False)) and moved is self
        return to_dtype(moved, wanted or moved.dtype, copy=copy)

    return to


def _names_device(where: Any) -> bool:
    return isinstance(where, int) or torch.device(where).type == "cuda"


def _through_host(device: AsyncDevice, original: Any) -> Any:
    return lambda self: original(self.cpu())


def _host_only(device: AsyncDevice, original: Any) -> Any:
    def numpy(self: torch.Tensor, **options: Any) -> Any:
        if device.memory.block_of(self) is not None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy: use Tensor.cpu() first")
        return original(self, **options)

    return numpy


def _after_all(device: AsyncDevice, original: Any) -> Any:
    def reduce_ex(self: torch.Tensor, protocol: int) -> Any:
        if device.memory.block_of(self) is not None:
            device.synchronize()
        return original(self, protocol)

    return reduce_ex


def _made_on_host(original: Any) -> Any:
    unmapped = inspect.unwrap(original)

    @functools.wraps(unmapped)
    def make(data: Any, *args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor) and unmapped.__name__ == "as_tensor":
            return data.to(device if device is not None else data.device, *args, **options)
        requires_grad = options.pop("requires_grad", False)
        made: torch.Tensor = unmapped(_on_host(data), *args, **options)
        made = made if device is None or not _names_device(device) else made.to(device)
        return (made.pin_memory() if pin_memory else made).requires_grad_(requires_grad)

    return make


def _on_host(data: Any) -> Any:
    """Lists of tensors of the device are read past the operators, too."""
    if type(data) in (list, tuple):
        return type(data)([_on_host(one) for one in data])
    return data.cpu() if isinstance(data, torch.Tensor) else data


def _unmapped(original: Any) -> Any:
    """Past the mapping of `cpu_device`, whose devices are all the CPU."""
    unmapped = inspect.unwrap(original)

    @functools.wraps(unmapped)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        made: torch.Tensor = unmapped(*args, **kwargs)
        return made

    return factory


def _with_operators(device: AsyncDevice, original: Any) -> Any:
    def run(self: threading.Thread) -> None:
        with Operators(device):
            original(self)

    return run
