"""Lets unmodified Megatron-Core 0.16.1 train on the CPU with gloo: one table of reversible mappings.

Megatron-Core asks CUDA for devices, streams and random numbers in some 350 places and writes `device="cuda"` as a
literal. `install()` maps exactly those names to the CPU, `uninstall()` puts every original back. Each row of `PATCHES`
says what is replaced, by what, and why; a row whose attribute is gone from torch or Megatron-Core makes `install()`
fail before anything is changed. Nothing happens on import, so a run on GPUs that never calls `install()` is untouched.

Random numbers. CPU kernels draw from torch's default generator, so that one generator *is* the device's: the
`torch.cuda` random functions read and write it, and saving the device's state saves everything that dropout and
initialisation depend on. There is no second, host-side generator, so inside `megatron.core.tensor_parallel.random`
(the tracker and activation recomputation) the host state is void: an empty tensor that never changes. Everywhere else
`torch.manual_seed`, `torch.get_rng_state` and `torch.set_rng_state` mean what they always mean on a CPU; a checkpoint
that stores both states stores the same bytes twice, in any order of restoring. The one consequence to know: code that
draws from torch's default generator on the side (a `DataLoader` draws its base seed there whenever it is iterated)
moves the device's sequence too, and has to be given a generator of its own to leave it alone.

Host copies. On a GPU `tensor.cpu()` and `tensor.to("cpu")` are copies, on the CPU they are the tensor itself. Where
Megatron-Core depends on the copy, the table makes one.

Optimizer. The rows about Adam are for torch's own: the fused ones of Transformer Engine and Apex, which Megatron-Core
takes wherever they can be imported, need a GPU. Neither may be importable in a process that calls `install()`.

Checked against megatron-core 0.16.1 with torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.jit import _builtins

CPU = torch.device("cpu")
ABSENT = object()
"""Stands for an attribute that does not exist in its owner's own namespace."""


class CpuStream:
    """A stream on a device that runs everything in program order: there is nothing to wait for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record `event`, or a new one, and return it."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def _wait(self, *_: object) -> None:
        """What this would wait for has already run."""

    wait_stream = wait_event = synchronize = _wait


class CpuEvent:
    """A point in program order, with the time at which it was recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._recorded_s = 0.0

    def record(self, stream: CpuStream | None = None) -> None:
        """Take the time."""
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        """Whether everything before this event has run: always."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds from this event to `end_event`, as `torch.cuda.Event.elapsed_time` gives them."""
        return (end_event._recorded_s - self._recorded_s) * 1e3

    def _wait(self, *_: object) -> None:
        """Everything before this event has already run."""

    wait = synchronize = _wait


class _DeviceGenerators:
    """`torch.cuda.default_generators` of a machine whose every device, however it is named, is the CPU."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


class _TorchWithoutHostRng:
    """The `torch` module, but with a host random state that is empty and never changes."""

    _void_state = torch.empty(0, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_rng_state(self) -> torch.Tensor:
        return self._void_state

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class Patch:
    """One replaced attribute. `owner` and `name` locate it, `replace` makes the new value from the original one."""

    owner: str
    """Module or class, as `pkgutil.resolve_name` takes it: `torch.cuda` or `torch:Tensor`."""
    name: str
    replace: Callable[[Any], Any]
    """Gets the original (`ABSENT` if there is none); a function of its own for each name, because `torch.compile`
    refuses one object under two torch names that it treats differently."""
    reason: str
    may_be_absent: bool = False
    """True where the attribute is missing from some installations of the checked upstream version."""


def _always(value: object) -> Callable[[Any], Any]:
    """A replacement function that returns `value` whatever it is called with."""

    def replace(original: Any) -> Any:
        def constant(*args: object, **kwargs: object) -> object:
            return value

        return constant

    return replace


def _value(value: object) -> Callable[[Any], Any]:
    """A replacement that is `value` itself."""
    return lambda original: value


def _call_at_once(original: Any) -> Any:
    def lazy_call(callback: Callable[[], object], **kwargs: object) -> None:
        callback()

    return lazy_call


def _no_stream_context(original: Any) -> Any:
    def stream(stream: CpuStream | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return stream


def _on_cpu(device: Any) -> Any:
    """`device`, or the CPU if it names a CUDA device."""
    if isinstance(device, str):
        return CPU if device[:4] == "cuda" else device
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


@functools.cache
def _factory(original: Any) -> Any:
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


def _tensor_to(original: Any) -> Any:
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


def _tensor_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self

    return cuda


def _tensor_pin_memory(original: Any) -> Any:
    @functools.wraps(original)
    def pin_memory(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return self.clone()

    return pin_memory


def _tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
        return original(self, *args, **kwargs)

    return type_


def _splits_as_integers(original: Any) -> Any:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _gather_uneven(original: Any) -> Any:
    @functools.wraps(original)
    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        ranks = group.size()
        if output_split_sizes is None or ranks == 1:
            return original(input_, group, None, use_global_buffer)
        output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        for_each_rank, split_sizes = torch.cat([input_] * ranks), [len(input_)] * ranks
        torch.distributed.all_to_all_single(output, for_each_rank, output_split_sizes, split_sizes, group=group)
        return output

    return gather


def _adam_state_from_the_start(original: Any) -> Any:
    @functools.wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            state = self.optimizer.state[parameter]
            if not state:
                state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        return original(self)

    return state_dict


def _restore_own_step(original: Any) -> Any:
    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    return set_states


def _schedule_copies(original: Any) -> Any:
    @functools.wraps(original)
    def schedule_async_call(self: Any, async_req: Any) -> None:
        if async_req.preload_fn:
            args = list(async_req.async_fn_args)
            args[1] = [_bucket_with_copies(bucket) for bucket in async_req.preload_fn()]
            async_req = async_req._replace(async_fn_args=tuple(args), preload_fn=None)
        return original(self, async_req)

    return schedule_async_call


def _bucket_with_copies(bucket: tuple[Any, Any, tuple[Any, Any]]) -> tuple[Any, Any, tuple[Any, Any]]:
    file_name, storage_key, (bytes_data, tensor_data) = bucket
    return file_name, storage_key, (bytes_data, [(item, tensor.clone()) for item, tensor in tensor_data])


def _async_worker_on_cpu(*args: Any, **kwargs: Any) -> None:
    """What the persistent checkpoint worker, a fresh process, runs: install there too, then upstream's loop."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    uninstall()  # a main module that installs when imported has done so before this function runs
    upstream_loop = PersistentAsyncCaller.async_loop
    install()
    upstream_loop(*args, **kwargs)


_FACTORIES = (
    *("tensor", "as_tensor", "empty", "empty_strided", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like"),
)

_DEVICE = (
    Patch("torch.cuda", "is_available", _always(False), "no CUDA path is taken, on a machine with a GPU too"),
    Patch("torch.cuda", "current_device", _always(CPU), "is passed on as `device=` everywhere"),
    Patch("torch.cuda", "device_count", _always(1), "ranks are taken modulo the number of devices"),
    Patch("torch.cuda", "set_device", _always(None), "the async checkpoint worker selects its device"),
    Patch("torch.cuda", "synchronize", _always(None), "timers, p2p and checkpoints wait for the device"),
)

_STREAMS = (
    Patch("torch.cuda", "Stream", _value(CpuStream), "dispatcher, shared experts and DDP make side streams"),
    Patch("torch.cuda", "Event", _value(CpuEvent), "overlap and timing code records events"),
    Patch("torch.cuda", "stream", _no_stream_context, "side streams are entered as contexts"),
    Patch("torch.cuda", "current_stream", _always(CpuStream()), "side streams wait for it"),
    Patch("torch.cuda", "default_stream", _always(CpuStream()), "DDP's communication stream waits for it"),
    Patch("torch.cuda", "is_current_stream_capturing", _always(False), "there are no CUDA graphs"),
    Patch("torch:Tensor", "record_stream", _always(None), "memory is not reused before the program says so"),
    Patch("torch.cuda.nvtx", "range_push", _always(0), "NVTX ranges raise without a CUDA build"),
    Patch("torch.cuda.nvtx", "range_pop", _always(0), "NVTX ranges raise without a CUDA build"),
    Patch("torch.cuda", "reset_peak_memory_stats", _always(None), "raises without CUDA, where other counters are 0"),
)

_RANDOM = (
    Patch("torch.cuda", "default_generators", _value(_DeviceGenerators()), "CPU kernels draw from this generator"),
    Patch("torch.cuda.random", "current_device", _always(0), "imported by name: index of the device's generator"),
    Patch("torch.cuda.random", "device_count", _always(1), "imported by name: number of generators to save and seed"),
    Patch("torch.cuda.random", "_lazy_init", _always(None), "there is no CUDA context to make"),
    Patch("torch.cuda.random", "_lazy_call", _call_at_once, "seeds and states are set now, not once CUDA is there"),
    Patch("megatron.core.tensor_parallel.random", "_lazy_call", _call_at_once, "imported by name"),
    Patch(
        "megatron.core.tensor_parallel.random",
        "torch",
        _value(_TorchWithoutHostRng()),
        "`fork` warns when the host's random state moves, and here the device's is the same one",
    ),
)

_TENSORS = (
    *(Patch("torch", name, _factory, '`device="cuda"` literals and pinned memory') for name in _FACTORIES),
    Patch("torch:Tensor", "to", _tensor_to, '`device="cuda"` literals'),
    Patch("torch:Tensor", "cuda", _tensor_cuda, "tensors are on the device already"),
    Patch("torch:Tensor", "pin_memory", _tensor_pin_memory, "a copy: what is pinned is freed on the device after it"),
    Patch("torch:Tensor", "type", _tensor_type, "optimizers compare it with 'torch.cuda.FloatTensor' and the like"),
)

_MEGATRON = (
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        _value(None),
        "an undefined name without Transformer Engine, asked for by the router",
        may_be_absent=True,
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_integers,
        "leaves what is not on a GPU a tensor, and all-to-all takes integers as split sizes",
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        _gather_uneven,
        "gloo gathers equal sizes only; expert tensor parallelism gathers as many tokens as each rank has",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "state_dict",
        _adam_state_from_the_start,
        "torch's Adam (fused ones need a GPU) has no state before its first step; that fails here, on every fresh load",
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "_set_main_param_and_optimizer_states",
        _restore_own_step,
        "of torch's Adam, loading shares one `step` among all parameters, so that each of them counts it up, then "
        "overwrites it with the one before loading (dp_reshardable) or fails for want of it (fully_reshardable)",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller",
        "schedule_async_call",
        _schedule_copies,
        "the worker would share the tensors' memory and write what training makes of them",
    ),
    Patch(
        "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller",
        "async_loop",
        lambda original: staticmethod(_async_worker_on_cpu),
        "the worker is a fresh process, and selects a CUDA device first",
    ),
)

PATCHES: tuple[Patch, ...] = (*_DEVICE, *_STREAMS, *_RANDOM, *_TENSORS, *_MEGATRON)
"""Everything that `install()` replaces, in order."""

_undo: contextlib.ExitStack | None = None


def install() -> None:
    """Map CUDA to the CPU for this process; a second call does nothing.

    Compiled functions (`torch.compile`, which Megatron-Core decorates its fusions with) run eagerly from here on: on a
    CPU they would need a C++ compiler and minutes.

    Raises:
        AttributeError: torch or Megatron-Core no longer have an attribute of the table. Nothing is changed then.
    """
    global _undo
    if _undo is not None:
        return
    with contextlib.ExitStack() as stack:
        for patch in PATCHES:
            _apply(patch, stack)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
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


def _apply(patch: Patch, undo: contextlib.ExitStack) -> None:
    owner = pkgutil.resolve_name(patch.owner)
    original = getattr(owner, patch.name, ABSENT)
    if original is ABSENT and not patch.may_be_absent:
        raise AttributeError(
            f"{patch.owner} has no {patch.name} to map to the CPU: "
            "use megatron-core 0.16.1 and a torch that cpu_device.py was checked with"
        )
    own = vars(owner).get(patch.name, ABSENT)
    undo.callback(_restore, owner, patch.name, own)
    setattr(owner, patch.name, patch.replace(original))


def _restore(owner: Any, name: str, own: object) -> None:
    if own is not ABSENT:
        setattr(owner, name, own)
    elif name in vars(owner):
        delattr(owner, name)
