"""What becomes of torch's operators: those on tensors of the device are given to its current stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.pretrain.testing.async_device.device import AsyncDevice, BlockingCopy
from megatron.pretrain.testing.async_device.memory import Block, nbytes_of

_CPU = torch.device("cpu")
_OF_RESULT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WITHOUT_KERNEL = ("empty", "new_empty")


class Operators(TorchDispatchMode):
    """Gives operators to a device, for the thread that enters this.

    Tensors of the device are tensors of the CPU whose storage the device knows, so that autograd, gloo and Python see
    nothing unusual. There are five kinds of operators:

        views               nothing is read: they run at once
        copies              to or from the host: `copy`
        need the host       their result is a number or has a size that depends on values, they draw random numbers
                            (there is one generator, the host's), or they write to host memory: the stream is waited
                            for, then they run
        collectives         are gloo's, on the host: what touches their tensors is waited for
        all others          memory for their results is allocated now, by the shapes of meta tensors; they run later

    Args:
        device: The device.
    """

    def __init__(self, device: AsyncDevice) -> None:
        super().__init__()
        self._device, self._memory = device, device.memory
        self._known_shapes: dict[Any, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the compiler, of which nothing is used here, takes seconds to load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._device.is_running_work:
            return func(*args, **kwargs)
        wants_device = _is_cuda(kwargs.get("device"))
        if wants_device:
            kwargs["device"] = _CPU
        on_device = any(self._memory.block_of(one) is not None for one in _tensors((args, kwargs)))
        name = func.name().partition("::")[2].partition(".")[0]
        if not on_device and not wants_device:
            pinned = bool(kwargs.pop("pin_memory", None))
            made = func(*args, **kwargs)
            return self._memory.allocate_pinned(made) if pinned else made
        kwargs.pop("pin_memory", None)
        if func.namespace == "c10d":
            # Only for these tensors: other work may run later, as it may under NCCL.
            for block in self._blocks(*_tensors((args, kwargs))):
                for work in list(block.last_work.values()):
                    self._device.wait_for(work)
            return func(*args, **kwargs)
        if name == "copy_" and self._is_host(args[0]) != self._is_host(args[1]):
            return self.copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        if name == "_to_copy" and wants_device and self._is_host(args[0]):
            return self.moved(args[0], kwargs.get("dtype"), bool(kwargs.get("non_blocking")))
        if torch.Tag.inplace_view in func.tags or _is_view(func):
            return func(*args, **kwargs)
        return self._operator(func, name, args, kwargs)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copy between host and device, as `cudaMemcpyAsync` does: the host waits unless its memory is page-locked.

        Args:
            target: One of the two is on the device.
            source: The other is on the host.
            non_blocking: Whether the host wants to continue.

        Raises:
            RuntimeError: The host memory lies neither in one locked range nor in none.
        """
        to_host = self._is_host(target)
        host = target if to_host else source
        start = host.data_ptr(), nbytes_of(host.size(), host.stride(), host.dtype)
        touched, locked = self._memory.touches(*start), self._memory.holds(*start)  # in this order: more is locked
        if touched and not locked:
            raise RuntimeError("CUDA error: invalid argument: a copy goes over the border of locked memory")
        if not to_host and not locked:
            source = source.clone()  # through the driver's own buffers, which are filled before the call returns
        seen = [self._at_address(one) if one is host and locked else self._seen(one) for one in (target, source)]

        def run() -> None:
            if locked and not self._memory.holds(*start):
                raise RuntimeError("an illegal memory access was encountered: pages were unlocked before the copy")
            seen[0].copy_(seen[1])

        work = self._device.give(run, "copy", blocks=self._blocks(target, source))
        if non_blocking and not locked:
            self._device.blocking.append(BlockingCopy(to_host, threading.current_thread().name, start[1]))
        if non_blocking and (locked or not to_host):
            self._device.copied_to_host[threading.current_thread().name] += start[1] * to_host
            self._device.progress()
        else:
            self._device.wait_for(work)
        return target

    def moved(self, source: torch.Tensor, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
        """A copy of a host tensor on the device, or the other way round.

        Args:
            source: On one of them.
            dtype: Of the copy; None: the same.
            non_blocking: Whether the host wants to continue.
        """
        made = torch.empty_like(source, dtype=dtype, device="meta")
        size, stride = made.size(), made.stride()
        if not self._is_host(source):
            target = torch.empty_strided(size, stride, dtype=made.dtype)
            if non_blocking:  # torch makes these in page-locked memory
                target = self._memory.allocate_pinned(target)
            return self.copy(target, source, non_blocking)
        return self.copy(self._memory.allocate(size, stride, made.dtype), source, non_blocking)

    def _operator(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        written = _written(func, args, kwargs)
        at_once = torch.Tag.nondeterministic_seeded in func.tags or bool(_OF_RESULT & set(func.tags))
        if at_once or any(map(self._is_host, _tensors(written))):
            return self._at_once(func, args, kwargs)
        returned = [_returned(one, func, args, kwargs) for one in func._schema.returns]
        made = None
        if any(one is None for one in returned):
            if written:
                return self._at_once(func, args, kwargs)
            try:
                made = _mapped(self._allocated, self._shapes(func, args, kwargs))
            except (NotImplementedError, RuntimeError):  # no kernel for shapes, or shapes that depend on values
                return self._at_once(func, args, kwargs)
            if name.startswith(_WITHOUT_KERNEL):
                return made
        seen_args, seen_kwargs = _mapped(self._read, args), _mapped(self._read, kwargs)
        results = [self._seen(one) for one in _tensors(made)]

        def run() -> None:
            found = func(*seen_args, **seen_kwargs)
            for result, value in zip(results, _tensors(found) if results else (), strict=True):
                result.copy_(value)

        self._device.give(run, name, blocks=self._blocks(*_tensors((args, kwargs, made))))
        self._device.progress()
        if made is not None:
            return made
        return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results on the device "meta", which has shapes and no memory; the same for the same shapes."""
        key = func, _key(args), _key(kwargs)
        if key not in self._known_shapes:
            self._known_shapes[key] = func(*_mapped(_meta, args), **_on_meta(kwargs))
        return self._known_shapes[key]

    def _at_once(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._device.current_stream().synchronize()
        given = {id(one) for one in _tensors((args, kwargs))}
        found = func(*args, **kwargs)

        def placed(one: torch.Tensor) -> torch.Tensor:
            if id(one) in given or not self._is_host(one):
                return one
            tensor = self._allocated(one)
            self._seen(tensor).copy_(one)
            return tensor

        return _mapped(placed, found)

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        return self._memory.allocate(like.size(), like.stride(), like.dtype)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return self._memory.block_of(tensor) is None

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._memory.block_of(tensor)
        return tensor if block is None else self._memory.without_reference(tensor, block)

    def _at_address(self, host: torch.Tensor) -> torch.Tensor:
        """A host tensor as a copy sees it. What `cudaHostRegister` has locked is kept mapped by its owner alone."""
        if not self._memory.is_registered(host):
            return host
        nbytes = nbytes_of(host.size(), host.stride(), host.dtype)
        raw = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(host.data_ptr()), dtype=torch.uint8)
        return raw.view(host.dtype).as_strided(host.size(), host.stride())

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """As a kernel sees it; of host tensors, which are numbers, the value at the launch."""
        return tensor.clone() if self._is_host(tensor) else self._seen(tensor)

    def _blocks(self, *tensors: torch.Tensor) -> list[Block]:
        found = map(self._memory.block_of, tensors)
        return [block for block in found if block is not None]


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return not func._schema.is_mutable and any(one.alias_info is not None for one in returns)


def _argument(at: int, argument: Any, args: Any, kwargs: Any) -> Any:
    return args[at] if at < len(args) and not argument.kwarg_only else kwargs.get(argument.name)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [
        _argument(at, one, args, kwargs)
        for at, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


def _returned(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that a result is; None for a new one."""
    if result.alias_info is None:
        return None
    for at, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and set(one.alias_info.before_set) & set(result.alias_info.before_set):
            return _argument(at, one, args, kwargs)
    return None


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved: dict[str, Any] = _mapped(_meta, kwargs)
    if moved.get("device") is not None:
        moved["device"] = torch.device("meta")
    return moved


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """What operators take or give, with all tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)([_mapped(change, one) for one in value])
    if type(value) is dict:
        return {key: _mapped(change, one) for key, one in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in it, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for one in value.values() if type(value) is dict else value:
            yield from _tensors(one)


def _key(value: Any) -> Any:
    """The same for what gives results of the same shapes."""
    if isinstance(value, torch.Tensor):
        return tuple(value.size()), value.stride(), value.dtype
    if type(value) in (list, tuple):
        return tuple(map(_key, value))
    if type(value) is dict:
        return tuple((key, _key(one)) for key, one in value.items())
    return type(value), value
