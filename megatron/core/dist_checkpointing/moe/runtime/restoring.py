"""One try to carry a recovery plan out on one rank: its snapshots fetched, held open, restored, and replayed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..ports import (
    Clock,
    Execution,
    MappedReader,
    MappedStore,
    Reader,
    Restorer,
    SnapshotId,
    Store,
    TrainerState,
    Transport,
)
from ..recover.fetch import Carrier, Need
from ..recover.inventory import Place
from ..replay.densify import Load, Replay, ReplayPorts, ReplayStep, restore_trainer
from ..store.heap import HeapReader
from ..store.manifest import encode
from ..types import RecoveryPlan, Segment, StepJournal, Tier
from .inbox import StoreInbox


@dataclass(frozen=True)
class RecoveryPorts:
    """What a recovery works with; `transport` is used by nobody else meanwhile.

    execution: what runs iterations with frozen operators; None for strategies that replay none. make_room: fits the
    memory to what the strategy needs once it knows what it knew before the fault; called by all ranks together.
    """

    memory: MappedStore
    persistent: Store | None
    transport: Transport
    restorer: Restorer
    trainer: TrainerState
    clock: Clock
    execution: Execution | None = None
    make_room: Callable[[], None] = lambda: None


class Refused(MoECheckpointError):
    """A plan cannot be carried out because of one snapshot."""

    def __init__(self, place: Place, why: str) -> None:
        super().__init__(why)
        self.place = place


class Attempt:
    """The snapshots that this rank needs for one plan; they stay open, so that their bytes stay, until `close`.

    refused: those that cannot be had, with the reason. late: those for which the memory had no room.
    """

    def __init__(self, ports: RecoveryPorts, plan: RecoveryPlan, needed: Sequence[Need]) -> None:
        self._ports, self._base, self._target = ports, base_of(plan), plan.target
        self._rank = ports.transport.rank
        self._open = ExitStack()
        self._held: list[tuple[Need, Reader]] = []
        inbox = StoreInbox(ports.memory, ports.clock)
        carrier = Carrier(ports.transport, ports.memory.open, _encoded, inbox.land)
        self._arrived, self.refused = carrier.carry(needed)
        self.late = [reader for reader in self._arrived.values() if isinstance(reader, HeapReader)]
        for reader in self._arrived.values():
            if not isinstance(reader, HeapReader):
                self._open.enter_context(reader)
        for need in needed:
            if need.rank == self._rank and need.found.place not in self.refused:
                self._hold(need)

    def restore(self) -> None:
        """Fill the live state with NaN, then with that of the base, and with what a merge takes from before it."""
        self._ports.restorer.poison()
        for need, reader in self._held:
            if need.found.snapshot.iteration <= self._base:
                try:
                    self._ports.restorer.restore(reader.read, dict(need.parts))
                except MoECheckpointError as error:
                    self.refused[need.found.place] = str(error)
        place, reader_ = self.having("trainer", self._base) or (None, None)
        if place is not None and reader_ is not None and not self.refused:
            try:
                restore_trainer(self._ports.trainer, reader_)
            except MoECheckpointError as error:
                self.refused[place] = str(error)

    def having(self, name: str, iteration: int) -> tuple[Place, Reader] | None:
        """A snapshot of an iteration whose manifest has a scalar of this name."""
        for need, reader in self._of(iteration):
            if reader.manifest.facts.scalars.get(name) is not None:
                return need.found.place, reader
        return None

    def replay(self, plan: RecoveryPlan, operators: int, tolerance: float) -> Replay | None:
        """What makes the restored state dense; None if it is. Raises Refused when something is missing for it."""
        segment = next((one for one in plan.segments if one.replayed), None)
        if segment is None:
            return None
        steps = [self._step(segment, iteration) for iteration in segment.replayed]
        ports = self._ports
        assert ports.execution is not None
        replay = ReplayPorts(ports.restorer, ports.trainer, ports.execution, ports.transport, ports.clock)
        return Replay(replay, steps, operators, tolerance)

    def close(self) -> None:
        """Let go of all of them but the late ones."""
        self._open.close()
        self._held, self._arrived = [], {}

    def _hold(self, need: Need) -> None:
        """Open it, and verify what is read only after a replayed iteration: now another copy can still replace it."""
        place = need.found.place
        try:
            reader = self._arrived.get(place) or self._open.enter_context(self._opened(need))
            if need.found.snapshot.iteration > self._base and (torn := reader.verify()):
                raise UnreadableCheckpoint(f"record {torn[0].key} does not match its checksum")
            self._held.append((need, reader))
        except MoECheckpointError as error:
            self.refused[place] = str(error)

    def _opened(self, need: Need) -> Reader:
        store = self._ports.persistent if need.found.tier is Tier.PERSISTENT else self._ports.memory
        assert store is not None
        return store.open(need.found.snapshot)

    def _of(self, iteration: int) -> list[tuple[Need, Reader]]:
        return [(need, reader) for need, reader in self._held if need.found.snapshot.iteration == iteration]

    def _step(self, segment: Segment, iteration: int) -> ReplayStep:
        told = self.having("journal", iteration)
        if told is None:
            why = f"no snapshot of iteration {iteration} says how this rank's step came out"
            raise Refused(absent(iteration, self._rank), why)
        place, reader = told
        try:
            journal = StepJournal.from_data(cast("Mapping[str, Any]", reader.manifest.facts.scalars["journal"]))
        except (KeyError, TypeError) as error:
            raise Refused(place, f"its journal cannot be read: {type(error).__name__}: {error}") from error
        loads = tuple(Load(reader, dict(need.parts)) for need, reader in self._of(iteration) if need.parts)
        return ReplayStep(iteration, segment.frozen[iteration - segment.base - 1], journal, loads, reader)


def absent(iteration: int, rank: int) -> Place:
    """What stands for a snapshot that is nowhere, where the reason of a refusal is told."""
    return rank, SnapshotId(iteration, rank), Tier.PARKED


def base_of(plan: RecoveryPlan) -> int:
    """The iteration whose state is restored; later ones up to the target are replayed."""
    return min((segment.base for segment in plan.segments), default=plan.target)


def _encoded(reader: MappedReader) -> tuple[bytes, memoryview]:
    return encode(reader.manifest), reader.raw()
