"""Knows in which phase of a step training is, and lets an optimizer's step end whole when a peer is lost in it.

A peer may be lost in any collective of the step. Before the first master weight is written, the state of the iteration
before is whole, and perhaps the reduced gradients of this one. Once the update has begun it has to end, or the state is
neither: what follows it on this rank alone needs no peer, and compute weights, which the last collectives gather, are
derived from master weights when state is restored. So the guard lets errors of collectives before the update through,
and holds back those after its beginning until the step has ended; the process then parks the state of this iteration.

On a device the host runs ahead: it may be past the reduction while that still waits for a peer, and once communicators
are aborted (`interrupt`) what was under way ends with garbage in its results. So an update does not begin after that,
and gradients count as reduced only where the device was behind the reduction before.

Checked against Megatron-Core 0.19.2's `ChainedOptimizer.step`: every member prepares its gradients (with a loss scale,
a collective each), the norm is computed (collectives), gradients are clipped, zeros may be counted (collectives), then
every member updates its own part, each followed by a gather of compute weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

from megatron.core.optimizer import MegatronOptimizer

from ..core_versions.training import gathers_after_step, replaced
from ..device import arriving
from ..errors import PeerLost
from ..policy.parking import Cause, Decision, StepPhase, decide
from .gradients import Prepared

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
        self._is_interrupted = self._was_reduced = self._is_torn = False
        self._reduction: Marker | None = None

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

    def reduced(self, reduction: Marker | None = None) -> None:
        """The passes are over: this rank's part of the gradients will not change any more.

        reduction: where gradients are on a device, the end of their reduction there.
        """
        self.prepared, self._reduction = Prepared(), reduction
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
            raise self._lost_peer

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
                self._is_torn = self.phase in _PROTECTED and not is_reduced
            return True

    def decide(self, cause: Cause) -> Decision:
        """What to park when training is interrupted here."""
        return decide(self._known_phase(), cause, self.iteration)

    def _known_phase(self) -> StepPhase:
        """The phase that the device had come to for certain."""
        if self._is_torn:
            return StepPhase.UPDATING  # with gradients whose reduction was aborted
        # Whatever else ended a reduction on a device has left nobody knows what.
        is_final = self._was_reduced if self._is_interrupted else self._reduction is None
        return StepPhase.PASSES if self.phase is StepPhase.REDUCED and not is_final else self.phase

    def _follow(self, stack: contextlib.ExitStack) -> None:
        optimizer = self._optimizer
        stack.enter_context(replaced(optimizer, step=self._stepped(optimizer.step)))
        update = self._updating(optimizer.step_with_ready_grads)
        stack.enter_context(replaced(optimizer, step_with_ready_grads=update))
        if hasattr(optimizer, "count_zeros"):
            stack.enter_context(replaced(optimizer, count_zeros=self._tolerating(optimizer.count_zeros)))
        for member in getattr(optimizer, "chained_optimizers", [optimizer]):
            stack.enter_context(self.prepared.following(member))
            for owner, name in gathers_after_step(member):
                stack.enter_context(replaced(owner, **{name: self._tolerating(getattr(owner, name))}))

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
            with self._lock:
                if self._is_interrupted:
                    raise PeerLost("the optimizer's update does not begin: a peer is lost, and gradients are garbage")
                self.phase = StepPhase.UPDATING
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
