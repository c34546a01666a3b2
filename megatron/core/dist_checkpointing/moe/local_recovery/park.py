"""Parks the complete live state of a rank in memory when a peer is lost, so that it need not be computed again.

What is parked depends on where in a step the loss is heard of; `policy.parking` decides it. If the state of iteration t
is still whole, what the passes of t+1 have changed of it (random states, what routers count, expert biases) is put back
to what `note` remembered after t. If gradients of t+1 are kept too, the same things go beside them as the passes left
them: the step that a later process makes of the gradients must find the state that it would have found here.
Whatever goes wrong is reported in words and costs what is parked, never how the process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import UsageError, format_error
from ..policy.parking import Decision
from ..ports import (
    RANDOM,
    Capturer,
    Clock,
    Facts,
    Field,
    Json,
    Layout,
    MappedStore,
    MappedWriter,
    NoRoom,
    SnapshotId,
    StoreFailure,
    TrainerState,
)
from ..strategies import Piece
from ..types import GRADIENTS, PARKED, SnapshotPlan, full_plan

ToFacts = Callable[[Piece, Mapping[str, Json]], Facts]


class ChangingBuffers(Protocol):
    """State of operators that forward and backward passes change, such as what routers count."""

    def fields(self) -> Sequence[Field]:
        """Its records, with the keys that snapshots have them under."""

    def copy(self) -> Any:
        """The values as they are now."""

    def put_back(self, copy: Any) -> None:
        """Make the live values what they were when `copy` was made."""

    def records(self, copy: Any) -> Mapping[str, memoryview]:
        """The values of a copy as bytes, by key."""


class Gradients(Protocol):
    """Gradients after their reduction, as the optimizer's step needs them."""

    def fields(self) -> Sequence[Field]:
        """Their records; known at any time."""

    def copy(self, buffer: Callable[[str], memoryview]) -> None:
        """Copy each into the buffer of its key; called in a step that did not end. Nothing refers to them later."""


@dataclass(frozen=True, kw_only=True)
class ParkPorts:
    """What a parker works with.

    store: has segments of the parker's `sizes`, which nobody else uses. facts: what manifests say; see `Identity`.
    gradients: None where they may not be final when a peer is lost: then none are kept.
    """

    store: MappedStore
    capturer: Capturer
    trainer: TrainerState
    clock: Clock
    rank: int
    facts: ToFacts
    moving: ChangingBuffers
    gradients: Gradients | None = None


@dataclass(frozen=True)
class Parked:
    """What was put aside.

    Attributes:
        iteration: After which the state stands; None: nothing was parked.
        gradients: Whether those of the iteration after it were.
        nbytes: Of what was copied; 0 where the state was parked before.
        why: What was not done, and why not; else empty.
    """

    iteration: int | None
    gradients: bool
    nbytes: int
    why: str


@dataclass(frozen=True)
class _Noted:
    """What the passes of the next iteration will change, as it was after `iteration`."""

    iteration: int
    scalars: Mapping[str, Json]
    random: Mapping[str, memoryview]
    moving: Any


class Parker:
    """Parks the state of one rank: `note` after each iteration, `park` once when training is interrupted.

    A process that is killed while it parks leaves a torn snapshot, which nobody uses.
    """

    def __init__(self, ports: ParkPorts) -> None:
        self._ports = ports
        self._noted: _Noted | None = None
        self._kept: tuple[int | None] | None = None  # what `keep_only` left, if nothing was parked since
        ports.capturer.layout(self._plan(0), trainer=True)  # prepared now, not in a hurry

    def sizes(self) -> list[int]:
        """Bytes of the segments that the store needs; see `park_sizes`."""
        ports = self._ports
        return park_sizes(ports.capturer, ports.trainer, ports.moving, ports.gradients)

    def note(self, iteration: int) -> None:
        """The state after `iteration` is whole: remember what the next passes will change of it."""
        ports = self._ports
        states = ports.capturer.states  # those of a snapshot of this very state, if one has just begun
        tensors = ports.trainer.tensors() if states is None else states
        self._noted = _Noted(iteration, ports.trainer.scalars(), tensors, ports.moving.copy())

    def park(self, decision: Decision, scalars: Mapping[str, Json], timeout_s: float) -> Parked:
        """Copy and seal what was decided. Never raises.

        Args:
            decision: Which state is parked, and whether gradients are.
            scalars: What the manifest says besides the trainer's own, such as the journal of that iteration.
            timeout_s: How long to wait for copies. Copies for other snapshots should have ended.

        Returns:
            What was parked; its `why` says what cannot be done.
        """
        until_s, nbytes, parked = self._ports.clock.now_s() + timeout_s, 0, None
        why = "" if decision.iteration is not None else decision.why
        with_gradients, self._kept = False, None
        try:
            if decision.iteration is not None:
                moved = self._settle(decision.iteration, timeout_s)
                nbytes = self._park_state(decision.iteration, scalars, until_s)
                parked = decision.iteration
                if decision.gradients and self._ports.gradients is not None:
                    nbytes += self._park_gradients(decision.iteration + 1, moved)
                    with_gradients = True
        except Exception as error:  # whatever it is costs what is parked, never how the process ends
            what = "its gradients were" if parked is not None else "the state was"
            why = f"rank {self._ports.rank}: {what} not parked: {format_error(error)}"
        return Parked(parked, with_gradients, nbytes, why)

    def keep_only(self, iteration: int | None) -> None:
        """Free what this rank parked at other iterations, and gradients of others than the next one; None: all.

        Raises StoreFailure.
        """
        if self._kept == (iteration,):
            return  # in every iteration of training
        kept = () if iteration is None else ((PARKED, iteration), (GRADIENTS, iteration + 1))
        for snapshot in self._own():
            if (snapshot.kind, snapshot.iteration) not in kept:
                self._ports.store.free(snapshot)
        self._kept = (iteration,)

    def _plan(self, iteration: int) -> SnapshotPlan:
        return full_plan(iteration, self._ports.capturer.operators)

    def _own(self) -> list[SnapshotId]:
        listing = self._ports.store.snapshots()
        found = [*listing.sealed, *(torn.snapshot for torn in listing.torn if not torn.is_newer)]
        mine = (snapshot for snapshot in found if snapshot.rank == self._ports.rank)
        return [snapshot for snapshot in mine if snapshot.kind in (PARKED, GRADIENTS)]

    def _settle(self, iteration: int, timeout_s: float) -> _Noted:
        """Make the live state that of `iteration`, and return what was changed since; nothing is being copied."""
        ports, noted = self._ports, self._noted
        with suppress(StoreFailure):  # of a copy for another snapshot, which is not missed here
            ports.capturer.end(timeout_s)
        if noted is None or iteration not in (noted.iteration, noted.iteration + 1):
            known = "nothing" if noted is None else f"iteration {noted.iteration}"
            raise UsageError(f"iteration {iteration} is to be parked, but what was noted last is {known}")
        moved = _Noted(iteration + 1, {}, ports.trainer.tensors(), ports.moving.copy())
        if iteration == noted.iteration:
            ports.trainer.restore(noted.scalars, noted.random)
            ports.moving.put_back(noted.moving)
        return moved

    def _park_state(self, iteration: int, scalars: Mapping[str, Json], until_s: float) -> int:
        ports = self._ports
        plan, snapshot = self._plan(iteration), SnapshotId(iteration, ports.rank, PARKED)
        facts = ports.facts(Piece(PARKED, plan), {**scalars, "trainer": ports.trainer.scalars()})
        if self._is_parked(snapshot, facts):
            return 0
        layout = ports.capturer.layout(plan, trainer=True)
        with self._reserved(snapshot, layout) as writer:
            ports.capturer.begin([(layout, writer)])
            ports.capturer.end(max(0.0, until_s - ports.clock.now_s()))
            writer.seal(facts)
        return layout.nbytes

    def _is_parked(self, snapshot: SnapshotId, facts: Facts) -> bool:
        """Whether this very state was parked before, as by a process that waited for others with it."""
        if snapshot not in self._ports.store.snapshots().sealed:
            return False
        with self._ports.store.open(snapshot) as reader:
            return reader.manifest.facts.scalars.get("timeline") == facts.scalars.get("timeline")

    def _park_gradients(self, iteration: int, moved: _Noted) -> int:
        ports = self._ports
        assert ports.gradients is not None
        layout = _gradients_layout(ports.gradients, ports.moving, moved.random)
        snapshot = SnapshotId(iteration, ports.rank, GRADIENTS)
        facts = ports.facts(Piece(GRADIENTS, SnapshotPlan(iteration, {})), {})
        if self._is_parked(snapshot, facts):
            return 0
        with self._reserved(snapshot, layout) as writer:
            ports.gradients.copy(writer.buffer)
            for key, data in ports.moving.records(moved.moving).items():
                writer.put(key, data)
            for name, data in moved.random.items():
                writer.put(f"{RANDOM}{name}", data)
            writer.seal(facts)
        return layout.nbytes

    def _reserved(self, snapshot: SnapshotId, layout: Layout) -> MappedWriter:
        """A writer in place of what the store has of this name; without room, in place of what was parked earlier."""
        store = self._ports.store
        store.free(snapshot)
        try:
            return store.reserve(snapshot, layout)
        except NoRoom:
            for older in self._own():
                if older.kind == snapshot.kind:
                    store.free(older)
            return store.reserve(snapshot, layout)


def park_sizes(
    capturer: Capturer, trainer: TrainerState, moving: ChangingBuffers, gradients: Gradients | None
) -> list[int]:
    """Bytes of the segments for parked state: one for the state, and one for gradients if there are any.

    Args:
        capturer: Gives the layout of the state.
        trainer: Gives the random states.
        moving: What passes change, which is parked with gradients.
        gradients: As the optimizer's step needs them; None where they are not parked.
    """
    layouts = [capturer.layout(full_plan(0, capturer.operators), trainer=True)]
    if gradients is not None:
        layouts.append(_gradients_layout(gradients, moving, trainer.tensors()))
    return [max(1, layout.nbytes) for layout in layouts]


def _gradients_layout(gradients: Gradients, moving: ChangingBuffers, random: Mapping[str, memoryview]) -> Layout:
    states = [Field(f"{RANDOM}{name}", "uint8", (random[name].nbytes,)) for name in sorted(random)]
    return Layout.of([*gradients.fields(), *moving.fields(), *states])
