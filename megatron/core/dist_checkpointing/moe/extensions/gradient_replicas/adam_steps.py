"""The steps of this rank's optimizer as its peers can repeat them: gradients and settings, as Adam reads them.

Taken from hooks of torch's optimizers, of which Transformer Engine's `FusedAdam` is one. They run after unscaling and
clipping and before the schedule continues, and not at all in a step that is skipped. Gradients are copied there, in the
dtype that the optimizer reads: the next iteration clears them. From a GPU the copy is launched, and waited for by
whoever sends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer

from ...errors import UsageError
from ...megatron_state.optimizer_state import MASTER_OF_FUSED, SteppedTensor, optimizer_members
from ...megatron_state.quantization import is_quantized
from ...ports import Json, RecordedStep, SteppedShard
from ...types import StepJournal
from .recomputation import FUSED_ADAM, aligned

MOST_BUFFERS = 3
"""Of how many steps gradients are kept at once: as many as snapshots that may be on their way to peers."""

_TORCH = (torch.optim.Adam, torch.optim.AdamW)
_FUSED = "transformer_engine"
_FLAG = "--moe-ckpt-replicate gradients"


def check_repeatable(optimizer: MegatronOptimizer) -> None:
    """Refuse an optimizer of which a peer could not repeat a step to the bit. optimizer: of this rank.

    Raises:
        UsageError: It is neither Adam of torch nor `FusedAdam`, or keeps state that a step reads with a scale.
    """
    for member in optimizer_members(optimizer):
        inner = member.optimizer
        is_fused = type(inner).__name__ == FUSED_ADAM and type(inner).__module__.startswith(_FUSED)
        name = f"{type(inner).__module__}.{type(inner).__name__}"
        if type(inner) not in _TORCH and not is_fused:
            raise _unfollowed(
                f"{name}: peers repeat steps of torch.optim.Adam and AdamW and of {_FUSED}'s {FUSED_ADAM}"
            )
        if getattr(inner, "capturable", False):
            raise _unfollowed(f"{name} with capturable, whose settings are on the device")
        for main, state in inner.state.items():
            for field, value in {**state, "master weights": state.get(MASTER_OF_FUSED, main)}.items():
                if is_quantized(value) or value.dtype is not torch.float32:
                    raise _unfollowed(f"an optimizer with {field} in {value.dtype}: peers repeat steps in fp32")
                if value.is_cuda and not is_fused:
                    raise _unfollowed(f"{name} on {value.device}: peers repeat its steps on their CPUs")
            if is_quantized(main):
                raise _unfollowed("weights in eight bits, which the step casts")
        for group in inner.param_groups if is_fused else ():
            if len({parameter.dtype for parameter in group["params"]}) > 1:
                raise _unfollowed(f"{name} with weights of several dtypes in a group")


def _unfollowed(what: str) -> UsageError:
    return UsageError(f"{_FLAG} cannot follow {what}; use --moe-ckpt-replicate state")


class AdamSteps:
    """The `ports.StepRecorder` of live optimizers.

    Args:
        optimizer: What core's `get_megatron_optimizer` gave, with its state allocated.
        stepped: As `stepped_parameters` gives it.

    Raises:
        UsageError: A peer could not repeat its steps to the bit.
    """

    def __init__(self, optimizer: MegatronOptimizer, stepped: Sequence[SteppedTensor]) -> None:
        check_repeatable(optimizer)
        self._places: dict[int, tuple[SteppedTensor, int]] = {}
        self._nbytes = 0
        for one in stepped:
            self._places[id(one.main)] = (one, self._nbytes)
            self._nbytes += aligned(one.main.numel() * one.gradient_dtype.itemsize)
        self._on_gpu = any(one.main.is_cuda for one in stepped)
        self._free: list[torch.Tensor] = []
        self._made = 0
        members = optimizer_members(optimizer)
        inner = [member.optimizer for member in members]
        self._limit = max((float(member.config.clip_grad) for member in members), default=0.0)
        self._kind = type(inner[0]).__name__ if inner else "Adam"
        self._handles = [one.register_step_pre_hook(self._note) for one in inner]
        self._begin()

    @property
    def most_bytes(self) -> int:
        """What gradients take of the memory of this process at most."""
        return MOST_BUFFERS * self._nbytes

    def close(self) -> None:
        """Record nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._free.clear()

    def take(self, journal: StepJournal) -> RecordedStep | None:
        """As `ports.StepRecorder.take`."""
        buffer, groups, group_of, complete = self._buffer, tuple(self._groups), self._group_of, self._complete
        copied = _noticed() if self._on_gpu and buffer is not None else _nothing
        self._begin()
        if not complete:
            if buffer is not None:
                self._free.append(buffer)
            return None
        shards = tuple(
            SteppedShard(
                _prefix_of(one), one.shard.of.operator, group_of.get(key), first, one.main.numel(),
                str(one.gradient_dtype).removeprefix("torch."),
            )
            for key, (one, first) in self._places.items()
        )  # fmt: skip
        memory = memoryview(buffer.numpy()) if buffer is not None else memoryview(b"")
        step = RecordedStep(self._kind, groups, shards, memory, copied, partial(clip_factors, self._limit, journal))
        if buffer is not None:
            weakref.finalize(step, self._free.append, buffer).atexit = False
        return step

    def _begin(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._groups: list[dict[str, Json]] = []
        self._group_of: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._complete = True

    def _note(self, inner: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Called before each step of an inner optimizer."""
        if id(inner) in self._stepped or (self._buffer is None and not self._has_buffer()):
            self._complete = False
        self._stepped.add(id(inner))
        if not self._complete:
            return
        assert self._buffer is not None
        for group in inner.param_groups:
            self._groups.append({name: _plain(group[name]) for name in inner.defaults if name in group})
            if self._kind == FUSED_ADAM:
                self._groups[-1] |= _of_fused(inner, group)
            for main in group["params"]:
                one, first = self._places[id(main)]
                if one.gradient is not None:
                    if one.gradient.dtype is not one.gradient_dtype:
                        self._complete = False
                        return
                    nbytes = main.numel() * one.gradient_dtype.itemsize
                    place = self._buffer[first : first + nbytes].view(one.gradient_dtype)
                    # On the stream of the step: behind what clips, and before what clears.
                    place.copy_(one.gradient.detach().view(-1), non_blocking=self._on_gpu)
                    self._group_of[id(main)] = len(self._groups) - 1

    def _has_buffer(self) -> bool:
        if not self._free:
            if self._made == MOST_BUFFERS:
                return False
            self._free.append(torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._on_gpu))
            self._made += 1
        self._buffer = self._free.pop()
        return True


def _of_fused(fused: Any, group: dict[str, Any]) -> dict[str, Json]:
    """What `FusedAdam` has beside the settings of a group: the steps that it counts there, and how it was made."""
    dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in group["params"][:1]]
    return {
        "step": int(group.get("step", 0)),
        "adam_w_mode": bool(fused.adam_w_mode),
        "use_decoupled_grad": bool(fused.use_decoupled_grad),
        "weights": dtypes[0] if dtypes and fused.master_weights else None,
    }


def clip_factors(limit: float, journal: StepJournal) -> tuple[float, ...]:
    """By what core may have multiplied gradients before the step, with the norm that it computed.

    Args:
        limit: The norm that is clipped to (`--clip-grad`); 0: none.
        journal: The outcome of the step. Its norm may have to be waited for.

    Returns:
        One or several: core divides in fp64 where it has read the norm, and in fp32 where that stays on the device.
    """
    if journal.grad_norm is None or limit <= 0.0:
        return (1.0,)
    norm = float(journal.grad_norm)
    on_device = limit / (torch.tensor(norm, dtype=torch.float32) + 1.0e-6)
    return tuple(dict.fromkeys(min(1.0, factor) for factor in (limit / (norm + 1.0e-6), float(on_device))))


def _noticed() -> Callable[[], None]:
    """Waits until the device has done what it was given."""
    event = torch.cuda.Event()
    event.record()
    return lambda: event.synchronize()


def _nothing() -> None:
    pass


def _prefix_of(stepped: SteppedTensor) -> str:
    """What the keys of the records of this tensor's state begin with."""
    return stepped.shard.key("").removesuffix("/")


def _plain(value: Any) -> Json:
    """A setting of a group as a JSON value."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
