"""The reduced gradients that a rank's own step needs: kept when a peer is lost before the step, and applied later.

Kept is what the optimizer's step has in hand when it asks for the norm: the gradient of each master weight that the
rank steps, reduced, divided by the loss scale, not clipped yet. Whoever knows the norm and the verdict takes the step
from there with nobody else, to the same bit. Checked against Megatron-Core 0.19.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from ..core_versions.training import gathers_after_step, replaced
from ..errors import UsageError
from ..megatron_state.operators import StateTensor
from ..megatron_state.optimizer_state import SteppedTensor, optimizer_members
from ..megatron_state.restore import Upload, write_record
from ..ports import Field
from ..types import StepJournal

GRADIENT = "gradient"
"""The field in the keys of gradients."""

Read = Callable[[str], memoryview]


class Prepared:
    """Which members of an optimizer have prepared their gradients since the last reduction."""

    def __init__(self) -> None:
        self._ready: set[int] = set()

    @contextlib.contextmanager
    def following(self, member: MegatronOptimizer) -> Iterator[None]:
        """Notice when this member prepares its gradients."""

        def noted(prepare: Callable[[], bool]) -> Callable[[], bool]:
            def prepared() -> bool:
                found = prepare()
                self._ready.add(id(member))
                return found

            return prepared

        def unscaling(unscale: Callable[[], bool]) -> Callable[[], bool]:
            def unscaled() -> bool:
                # Gradients are divided in place before the ranks compare what they found: only that can fail.
                self._ready.add(id(member))
                return unscale()

            return unscaled

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(member, prepare_grads=noted(member.prepare_grads)))
            if getattr(member, "grad_scaler", None):
                unscale = unscaling(member._unscale_main_grads_and_check_for_nan)
                stack.enter_context(replaced(member, _unscale_main_grads_and_check_for_nan=unscale))
            yield

    @torch.no_grad()
    def finish(self, optimizer: MegatronOptimizer) -> None:
        """Prepare what was not prepared yet, without the other ranks; loss scales stay as they are."""
        for member in optimizer_members(optimizer):
            if id(member) in self._ready:
                continue
            _give_gradients(member)
            if getattr(member, "grad_scaler", None):
                gradients = member._collect_main_grad_data_for_unscaling()
                found = torch.zeros_like(member.found_inf)
                if gradients:
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, member.grad_scaler.inv_scale)
            self._ready.add(id(member))


class LiveGradients:
    """The `local_recovery.park.Gradients` of live training.

    Args:
        optimizer: What core's `get_megatron_optimizer` gave.
        stepped: As `stepped_parameters` gives it.
        prepared: Tells how far the step had come.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        stepped: Sequence[SteppedTensor],
        prepared: Callable[[], Prepared],
    ) -> None:
        self._optimizer, self._stepped, self._prepared = optimizer, tuple(stepped), prepared

    def fields(self) -> tuple[Field, ...]:
        """As `local_recovery.park.Gradients.fields`: flat, of the dtype in which the optimizer takes them."""
        return tuple(
            Field(one.shard.key(GRADIENT), _named(one.gradient_dtype), (one.main.numel(),)) for one in self._stepped
        )

    @torch.no_grad()
    def copy(self, buffer: Callable[[str], memoryview]) -> None:
        """As `local_recovery.park.Gradients.copy`. Raises UsageError where a master weight has no gradient."""
        self._prepared().finish(self._optimizer)
        for one in self._stepped:
            if one.gradient is None:
                raise UsageError(f"the master weights of {one.shard.of.name} have no gradient that could be kept")
            _copy_out(one.gradient, buffer(one.shard.key(GRADIENT)))


class LiveBuffers:
    """The `local_recovery.park.ChangingBuffers` of live training: router counters and expert biases, copied on their
    own device.

    Args:
        tensors: All state of this rank.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._buffers = tuple(state for state in tensors if state.field == "buffer")

    def fields(self) -> tuple[Field, ...]:
        """As `local_recovery.park.Moving.fields`."""
        return tuple(state.record for state in self._buffers)

    def copy(self) -> tuple[torch.Tensor, ...]:
        """As `local_recovery.park.Moving.copy`."""
        return tuple(state.tensor.clone() for state in self._buffers)

    def put_back(self, copy: tuple[torch.Tensor, ...]) -> None:
        """As `local_recovery.park.Moving.put_back`."""
        with torch.no_grad():
            for state, value in zip(self._buffers, copy, strict=True):
                state.tensor.copy_(value)

    def records(self, copy: tuple[torch.Tensor, ...]) -> Mapping[str, memoryview]:
        """As `local_recovery.park.Moving.records`."""
        return {
            state.key: memoryview(value.contiguous().view(torch.uint8).cpu().numpy())
            for state, value in zip(self._buffers, copy, strict=True)
        }

    def restore(self, read: Read) -> None:
        """Copy the records of all buffers, fetched by key, into the live state."""
        for state in self._buffers:
            write_record(state.key, read(state.key), state.tensor)


@torch.no_grad()
def roll_forward(optimizer: MegatronOptimizer, stepped: Sequence[SteppedTensor], read: Read, step: StepJournal) -> None:
    """Take the step of kept gradients with the norm and the verdict of its journal; no collective.

    Before it the state is that of the iteration before, learning rates and step counts included; afterwards master
    weights and moments are those of the iteration, and the compute weights of what this rank steps. Those of others
    have to be gathered, schedules and loss scales are the caller's.

    Args:
        optimizer: The chain of optimizers.
        stepped: As `stepped_parameters` gives it.
        read: Gives the kept gradients by key.
        step: The journal of the iteration, from a rank that has it.

    Raises:
        UsageError: It cannot be done with this optimizer or this journal.
        UnreadableCheckpoint: A record is not of these master weights.
    """
    if type(optimizer) is not ChainedOptimizer:
        raise UsageError(f"kept gradients cannot be applied with the optimizer {type(optimizer).__name__}")
    if step.skipped:
        return
    if step.grad_norm is None:
        raise UsageError("the journal has no gradient norm: kept gradients cannot be applied without it")
    for member in optimizer_members(optimizer):
        _give_gradients(member)  # every master weight gets a gradient, whose values are replaced below
    upload = Upload()
    for one in stepped:
        key = one.shard.key(GRADIENT)
        if one.gradient is None:
            raise UsageError(f"the master weights of {one.shard.of.name} take no gradient")
        write_record(key, read(key), one.gradient, upload)
    upload.end()
    with contextlib.ExitStack() as stack:
        # What ranks would compute together: the norm comes from the journal, the rest is known or not wanted.
        alone: dict[str, Any] = {
            "prepare_grads": lambda: False,
            "get_grad_norm": lambda: step.grad_norm,
            "count_zeros": lambda: None,
        }
        stack.enter_context(replaced(optimizer, **alone))
        for member in optimizer_members(optimizer):
            for owner, name in gathers_after_step(member):
                stack.enter_context(replaced(owner, **{name: _nothing}))
        ChainedOptimizer.step(optimizer)
    optimizer.zero_grad()


def _nothing(*unused: Any, **options: Any) -> None:
    """In place of a collective that others do not take part in."""


def _give_gradients(member: Any) -> None:
    """Let master weights have their gradients as they lie in the model's gradient buffers."""
    if isinstance(member, FP32Optimizer):
        member.prepare_grads()
    else:
        member._copy_model_grads_to_main_grads()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy_out(tensor: torch.Tensor, into: memoryview) -> None:
    if tensor.numel():
        torch.frombuffer(into, dtype=tensor.dtype).copy_(tensor.reshape(-1))
