"""Knows in which phase of a step training is, and lets an optimizer's step end whole when a peer is lost in it.

A peer may be lost in any collective of the step. Before the first master weight is written, the state of the iteration
before is whole, and perhaps the reduced gradients of this one. Once the update has begun it has to end, or the state is
neither: what follows it on this rank alone needs no peer, and compute weights, which the last collectives gather, are
derived from master weights when state is restored. So the guard lets errors of collectives before the update through,
and holds back those after its beginning until the step has ended; the process then parks the state of this iteration.

On a device the host runs ahead: it may be past the reduction, or the norm, while that still waits for a peer, and once
communicators are aborted (`interrupt`) what was under way ends with garbage in its results. So an update does not begin
after that, gradients count as reduced only where the device was behind the reduction before, and state as updated only
where it was behind the norm.

Checked against Megatron-Core 0.19.2's `ChainedOptimizer.step`: every member prepares its gradients (with a loss scale,
a collective each), the norm is computed (collectives), gradients are clipped, zeros may be counted (collectives), then
every member updates its own part, each followed by a gather of compute weights.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import torch

from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from ..core_versions.seams import casts_itself
from ..core_versions.training import gathers_after_step, last_before_clipping, norm_as_in_training, replaced
from ..device import arriving
from ..errors import PeerLost, UsageError
from ..megatron_state.operators import StateTensor
from ..megatron_state.optimizer_state import SteppedTensor, members_by_layer, optimizer_members
from ..megatron_state.restore import Upload, write_record
from ..policy.parking import Cause, Decision, StepPhase, decide
from ..ports import Field
from ..storage.system import within_locks
from ..types import StepJournal

# The reduced gradients that a rank's own step needs: kept when a peer is lost before the step, and applied later.
#
# Kept is what the optimizer's step has in hand when it asks for the norm: the gradient of each master weight that the
# rank steps, reduced, divided by the loss scale, not clipped yet. Whoever knows the norm and the verdict takes the step
# from there with nobody else, to the same bit.

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
    weights and moments are those of the iteration, and of what this rank steps the compute weights of more than eight
    bits. The others have to be cast and gathered, and schedules are the caller's. Loss scales count an overflow in all
    parts of the optimizer, as in a replay: which of them saw it is known to whoever has the trainer state.

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
    # A part that the rank of the trainer state does not have, such as that of the experts, keeps this scale.
    for member, _ in members_by_layer(optimizer):
        if scaler := getattr(member, "grad_scaler", None):
            scaler.update(step.skipped and step.grad_norm is None)  # skipped for its norm: no overflow
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
    norm = norm_as_in_training(optimizer, float(step.grad_norm))
    with contextlib.ExitStack() as stack:
        # What ranks would compute together: the norm comes from the journal, the rest is known or not wanted.
        alone: dict[str, Any] = {
            "prepare_grads": lambda: False,
            "get_grad_norm": lambda: norm,
            "count_zeros": lambda: None,
        }
        stack.enter_context(replaced(optimizer, **alone))
        for owner, name in _gathers(optimizer):
            stack.enter_context(replaced(owner, **{name: _nothing}))
        for member in filter(casts_itself, optimizer_members(optimizer)):
            # Weights of eight bits: to cast them is a collective too, and all ranks do when they rejoin.
            stack.enter_context(replaced(member, _get_fp8_params_and_shard_fp32_from_fp8=lambda: ([], [], [])))
        ChainedOptimizer.step(optimizer)
    optimizer.zero_grad()


def _gathers(optimizer: MegatronOptimizer) -> list[tuple[Any, str]]:
    """As `gathers_after_step`, of a chain and of all in it: chains have gathers of their own, and so have stubs."""
    owners = (optimizer, *getattr(optimizer, "chained_optimizers", ()))
    return [gather for owner in owners for gather in gathers_after_step(owner)]


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
    source = tensor.reshape(-1).view(torch.uint8)
    for start, end in within_locks(into):
        torch.frombuffer(into, dtype=torch.uint8)[start:end].copy_(source[start:end])


_BEHIND_S = 1.0
_POLL_S = 0.001
_OUTSIDE = (StepPhase.REPLAYING, StepPhase.ROLLING_FORWARD)
_PROTECTED = (StepPhase.UPDATING, StepPhase.UPDATED)


class Marker(Protocol):
    """A point in what a device was given to do, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""


@dataclass(frozen=True)
class Stepped:
    """What the optimizer's step came to: whether it updated, and the norm of all gradients before clipping."""

    updated: bool
    grad_norm: SupportsFloat | None


class StepGuard:
    """Follows one training process through its iterations.

    In each: `passes`, `reduced`, then `optimizer.step()` in a block of `stepping`, at last `stands`. What belongs to
    the iteration besides the optimizer (schedules, progress) is best moved on inside the block: what the block raises
    for a peer that was lost after the update began, it raises at its end.

    Args:
        optimizer: What core's `get_megatron_optimizer` gave, chained or alone.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self.phase, self.iteration = StepPhase.IDLE, 0
        self.stepped: Stepped | None = None
        self.prepared = Prepared()
        self._lost_peer: BaseException | None = None
        # Against the thread that interrupts: an update begins before it does, or not at all.
        self._lock = threading.Lock()
        self._is_interrupted = self._was_reduced = self._is_clipped = self._is_torn = False
        self._mark: Callable[[], Marker] | None = None
        self._reduction: Marker | None = None
        self._norm: Marker | None = None

    def stands(self, iteration: int, phase: StepPhase = StepPhase.IDLE) -> None:
        """The state after an iteration is whole.

        Args:
            iteration: The iteration.
            phase: IDLE where training stands there, REJOINING where it waits there for others.
        """
        self.phase, self.iteration, self.stepped = phase, iteration, None

    def enter(self, phase: StepPhase) -> None:
        """What follows is no training: REPLAYING or ROLLING_FORWARD, until `stands` is called."""
        self.phase = phase

    def passes(self, iteration: int) -> None:
        """Forward and backward passes of `iteration` begin, after the one that stands."""
        if self.phase not in _OUTSIDE:
            self.phase, self.iteration, self.stepped = StepPhase.PASSES, iteration - 1, None

    def reduced(self, mark: Callable[[], Marker] | None = None) -> None:
        """The passes are over: this rank's part of the gradients will not change any more.

        mark: where gradients are on a device, marks a point in the work of the current stream there: now behind the
            reduction of gradients, later in the step behind their norm.
        """
        self.prepared, self._is_clipped = Prepared(), False
        self._mark, self._reduction = mark, mark() if mark is not None else None
        if self.phase not in _OUTSIDE:
            self.phase = StepPhase.REDUCED

    @contextlib.contextmanager
    def stepping(self, iteration: int) -> Iterator[None]:
        """The block with `optimizer.step()`, which may be replaced; what a replay does in it is not followed.

        Raises where the block ends the first error of a collective that came after the update had begun.
        """
        if self.phase in _OUTSIDE:
            yield
            return
        if self.phase is not StepPhase.REDUCED:
            self.reduced()
        self.iteration, self._lost_peer = iteration - 1, None
        with contextlib.ExitStack() as stack:
            self._follow(stack)
            yield
        if self._lost_peer is not None:
            self.await_update()
            raise self._lost_peer

    def await_update(self) -> None:
        """This thread closes connections next, which aborts whatever the device has not come to.

        A norm may still be under way with all peers that it needs. A state is torn if its norm was aborted.
        """
        until_s = time.monotonic() + _BEHIND_S
        while self._is_behind() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self._is_torn = self._is_torn or self._is_behind()

    def interrupt(self, *, force: bool = False) -> bool:
        """Communicators are about to be aborted, by another thread: no update begins from here on.

        False, and nothing is done, while one is under way, or what belongs to its iteration; unless forced.
        """
        with self._lock:
            if self.phase in _PROTECTED and not force:
                return False
            if not self._is_interrupted:
                self._is_interrupted = True
                is_reduced = self._reduction is None or self._reduction.query()
                self._was_reduced = self.phase is StepPhase.REDUCED and is_reduced
                self._is_torn = self._is_behind() or (self.phase in _PROTECTED and not is_reduced)
            return True

    def _is_behind(self) -> bool:
        """Whether the device has not come to the newest update: an abort leaves garbage in the norm that it clips by.

        Also where the host is in the next iteration already: nothing makes it wait for a norm that stays on the device.
        """
        return self._norm is not None and not self._norm.query()

    def decide(self, cause: Cause) -> Decision:
        """What to park when training is interrupted here."""
        return decide(self._known_phase(), cause, self.iteration)

    def _known_phase(self) -> StepPhase:
        """The phase that the device had come to for certain."""
        if self._is_torn:
            return StepPhase.UPDATING  # with gradients whose reduction, or whose norm, was aborted
        # Whatever else ended a reduction on a device has left nobody knows what.
        is_final = self._was_reduced if self._is_interrupted else self._reduction is None
        is_final = is_final and not self._is_clipped
        return StepPhase.PASSES if self.phase is StepPhase.REDUCED and not is_final else self.phase

    def _follow(self, stack: contextlib.ExitStack) -> None:
        optimizer = self._optimizer
        stack.enter_context(replaced(optimizer, step=self._stepped(optimizer.step)))
        update = self._updating(optimizer.step_with_ready_grads)
        stack.enter_context(replaced(optimizer, step_with_ready_grads=update))
        for name, follow in ((last_before_clipping(optimizer), self._clipping), ("count_zeros", self._tolerating)):
            if hasattr(optimizer, name):
                stack.enter_context(replaced(optimizer, **{name: follow(getattr(optimizer, name))}))
        for member in getattr(optimizer, "chained_optimizers", [optimizer]):
            stack.enter_context(self.prepared.following(member))
        for owner, name in _gathers(optimizer):
            stack.enter_context(replaced(owner, **{name: self._tolerating(getattr(owner, name))}))

    def _clipping(self, norms: Callable[[], Any]) -> Callable[[], Any]:
        def known() -> Any:
            found = norms()
            # Core clips next, in place: a roll-forward would clip them once more if they were kept.
            self._is_clipped = True
            return found

        return known

    def _stepped(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def stepped() -> Any:
            outcome = step()
            updated, norm, _ = outcome
            self.phase = StepPhase.UPDATED
            self.stepped = Stepped(bool(updated), arriving(norm))
            return outcome

        return stepped

    def _updating(self, update: Callable[[], bool]) -> Callable[[], bool]:
        def updating() -> bool:
            # Behind norm and clipping, ahead of the update: all on the current stream, which waits for the collectives
            # of the norm on the streams of their communicators. Recorded without the lock: where the queue of the
            # device is full the host waits in it, and must not keep the thread that aborts waiting.
            norm = self._mark() if self._mark is not None else None
            with self._lock:
                if self._is_interrupted:
                    raise PeerLost("the optimizer's update does not begin: a peer is lost, and gradients are garbage")
                self.phase, self._norm = StepPhase.UPDATING, norm
            return update()

        return updating

    def _tolerating(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A collective whose loss does not matter to the update: after the first error none of them is begun."""

        def kept(*arguments: Any, **options: Any) -> Any:
            if self._lost_peer is not None:
                return None
            try:
                return collective(*arguments, **options)
            except Exception as error:  # raised where the block ends, when the update is whole
                self._lost_peer = error
                return None

        return kept
