"""Puts the complete live state of a rank aside in memory when a peer is lost, so that it need not be computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import MoECheckpointError, UsageError
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


class Moving(Protocol):
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


@dataclass(frozen=True)
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
    moving: Moving
    gradients: Gradients | None = None


@dataclass(frozen=True)
class Parked:
    """What was put aside: the state after `iteration` (None: nothing), and gradients of the one after it.

    nbytes: of what was copied; 0 where the state was parked before. why: what was not done, and why not; else empty.
    """

    iteration: int | None
    gradients: bool
    nbytes: int
    duration_s: float
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
        """Bytes of the segments that the store needs: one for the state, and one for gradients if there are any."""
        state = self._ports.capturer.layout(self._plan(0), trainer=True)
        gradients = self._gradients_layout(self._ports.trainer.tensors())
        return [max(1, state.nbytes), *([] if gradients is None else [max(1, gradients.nbytes)])]

    def note(self, iteration: int) -> None:
        """The state after `iteration` is whole: remember what the next passes will change of it."""
        ports = self._ports
        self._noted = _Noted(iteration, ports.trainer.scalars(), ports.trainer.tensors(), ports.moving.copy())

    def park(self, decision: Decision, scalars: Mapping[str, Json], timeout_s: float) -> Parked:
        """Copy and seal what was decided. Never raises: what cannot be done is told in `why`.

        scalars: what the manifest says besides the trainer's own, such as the journal of that iteration.
        timeout_s: how long to wait for copies. Copies for other snapshots should have ended.
        """
        begun_s = self._ports.clock.now_s()
        until_s, nbytes, parked = begun_s + timeout_s, 0, None
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
            why = f"rank {self._ports.rank}: {what} not parked: {_told(error)}"
        return Parked(parked, with_gradients, nbytes, self._ports.clock.now_s() - begun_s, why)

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
        found = [*listing.sealed, *(torn.snapshot for torn in listing.torn)]
        return [one for one in found if one.rank == self._ports.rank and one.kind in (PARKED, GRADIENTS)]

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
        layout = self._gradients_layout(moved.random)
        assert ports.gradients is not None and layout is not None
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

    def _gradients_layout(self, random: Mapping[str, memoryview]) -> Layout | None:
        ports = self._ports
        if ports.gradients is None:
            return None
        states = [Field(f"{RANDOM}{name}", "uint8", (random[name].nbytes,)) for name in sorted(random)]
        return Layout.of([*ports.gradients.fields(), *ports.moving.fields(), *states])

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


def _told(error: Exception) -> str:
    """Errors for people speak for themselves, others by their type."""
    return str(error) if isinstance(error, MoECheckpointError | TimeoutError) else f"{type(error).__name__}: {error}"
