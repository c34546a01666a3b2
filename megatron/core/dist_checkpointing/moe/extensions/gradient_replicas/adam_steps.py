"""The steps of this rank's optimizer as its peers can repeat them: gradients and settings, as Adam reads them.

Taken from hooks of torch's optimizers, which run after unscaling and clipping and before the schedule goes on, and not
at all in a step that is skipped. Copied there and then: the next iteration clears the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.optimizer import MegatronOptimizer

from ...errors import UsageError
from ...megatron_state.optimizer_state import SteppedTensor, optimizer_members
from ...ports import Json, RecordedStep, SteppedShard

MOST_BUFFERS = 3
"""Of how many steps gradients are kept at once: as many as snapshots that may be on their way to peers."""

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
_FLAG = "--moe-ckpt-replicate gradients"


def check_repeatable(optimizer: MegatronOptimizer, stepped: Sequence[SteppedTensor]) -> None:
    """Refuse an optimizer of which a peer could not repeat a step to the bit.

    Args:
        optimizer: The optimizer of this rank.
        stepped: The tensors that it steps.

    Raises:
        UsageError: It is no Adam of torch, or steps in another dtype than fp32 or on a GPU.
    """
    for member in optimizer_members(optimizer):
        inner = member.optimizer
        name = f"{type(inner).__module__}.{type(inner).__name__}"
        if type(inner) not in _KINDS:
            raise UsageError(
                f"{_FLAG} cannot follow {name}: peers repeat steps of torch.optim.Adam and AdamW on their CPUs; use"
                " --moe-ckpt-replicate state"
            )
        for state in inner.state.values():
            for field, value in state.items():
                if value.dtype is not torch.float32 or value.is_cuda:
                    raise UsageError(
                        f"{_FLAG} cannot follow an optimizer with {field} in {value.dtype} on {value.device}: peers"
                        " repeat steps in fp32 on their CPUs; use --moe-ckpt-replicate state"
                    )
    for one in stepped:
        if one.main.dtype is not torch.float32 or one.main.is_cuda:
            raise UsageError(
                f"{_FLAG} cannot follow master weights in {one.main.dtype} on {one.main.device}: peers repeat steps in"
                " fp32 on their CPUs; use --moe-ckpt-replicate state"
            )


class AdamSteps:
    """The `ports.StepRecorder` of live optimizers.

    Args:
        optimizer: What core's `get_megatron_optimizer` gave, with its state allocated.
        stepped: As `stepped_parameters` gives it.

    Raises:
        UsageError: A peer could not repeat its steps to the bit.
    """

    def __init__(self, optimizer: MegatronOptimizer, stepped: Sequence[SteppedTensor]) -> None:
        check_repeatable(optimizer, stepped)
        self._places: dict[int, tuple[SteppedTensor, int]] = {}
        self._numel = 0
        for one in stepped:
            self._places[id(one.main)] = (one, self._numel)
            self._numel += one.main.numel()
        self._free: list[torch.Tensor] = []
        self._made = 0
        inner = [member.optimizer for member in optimizer_members(optimizer)]
        self._kind = type(inner[0]).__name__ if inner else "Adam"
        self._handles = [one.register_step_pre_hook(self._note) for one in inner]
        self._begin()

    @property
    def most_bytes(self) -> int:
        """What gradients take of the memory of this process at most."""
        return MOST_BUFFERS * 4 * self._numel

    def close(self) -> None:
        """Record nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._free.clear()

    def take(self) -> RecordedStep | None:
        """As `ports.StepRecorder.take`."""
        buffer, groups, group_of, complete = self._buffer, tuple(self._groups), self._group_of, self._complete
        self._begin()
        if not complete:
            if buffer is not None:
                self._free.append(buffer)
            return None
        shards = tuple(
            SteppedShard(_prefix_of(one), one.shard.of.operator, group_of.get(key), first, one.main.numel())
            for key, (one, first) in self._places.items()
        )
        memory = memoryview(buffer.numpy()) if buffer is not None else memoryview(b"")
        step = RecordedStep(self._kind, groups, shards, memory)
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
            for main in group["params"]:
                one, first = self._places[id(main)]
                if one.gradient is not None:
                    self._buffer[first : first + main.numel()].copy_(one.gradient.detach().view(-1))
                    self._group_of[id(main)] = len(self._groups) - 1

    def _has_buffer(self) -> bool:
        if not self._free:
            if self._made == MOST_BUFFERS:
                return False
            self._free.append(torch.empty(self._numel, dtype=torch.float32))
            self._made += 1
        self._buffer = self._free.pop()
        return True


def _prefix_of(stepped: SteppedTensor) -> str:
    """What the keys of the records of this tensor's state begin with."""
    return stepped.shard.key("").removesuffix("/")


def _plain(value: Any) -> Json:
    """A setting of a group as a JSON value."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
