"""One try to carry a recovery plan out on one rank: its snapshots fetched, held open, restored, and replayed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error
from ..policy.segments import base_for, ranks_of, segment_of
from ..ports import (
    Clock,
    Execution,
    Json,
    MappedReader,
    MappedStore,
    Reader,
    Restorer,
    SnapshotId,
    Store,
    TrainerState,
    Transport,
)
from ..replay.densify import Logs, Replay, ReplayPorts, ReplayStep, SnapshotLoad, StageFeed, restore_trainer
from ..replication.replica_receiver import ReplicaReceiver, StoreReplica
from ..storage.base import HostBuffer
from ..storage.manifest import decode, encode
from ..strategies import Job
from ..types import GRADIENTS, LOG, STANDBY, OperatorId, RecoveryPlan, ReplaySegment, StepJournal, Tier, Topology
from .fetch import Carrier, Need
from .gathered_metadata import GatheredMetadata, RefusedCopies, StepOutcome
from .inventory import CopyLocation, Found
from .timeline import Milestone, Timestamps


@dataclass(frozen=True)
class RecoveryPorts:
    """What a recovery works with; `transport` is used by nobody else meanwhile.

    execution: what runs iterations with frozen operators; None for strategies that replay none. make_room: fits the
    memory to what the strategy needs once it knows what it knew before the fault; called by all ranks together.
    standby: parked state, boundary logs and kept gradients, without which all stages roll back together. boundary:
    makes what feeds a replayed iteration from the logs of the stages beside it. timestamps: of what was done.
    """

    memory: MappedStore
    persistent: Store | None
    transport: Transport
    restorer: Restorer
    trainer: TrainerState
    clock: Clock
    execution: Execution | None = None
    make_room: Callable[[], None] = lambda: None
    standby: MappedStore | None = None
    boundary: Callable[[Logs], StageFeed] | None = None
    timestamps: Timestamps = field(default_factory=Timestamps)

    def open(self, found: Found) -> MappedReader | Reader:
        """A reader of what this rank found, or reads from storage. Raises UnreadableCheckpoint, StoreFailure."""
        if found.tier is Tier.PERSISTENT:
            assert self.persistent is not None
            return self.persistent.open(found.snapshot)
        return self.open_in_memory(found.snapshot)

    def open_in_memory(self, snapshot: SnapshotId) -> MappedReader:
        """As `open`, of what lies in this rank's memory."""
        store = self.standby if snapshot.kind in STANDBY else self.memory
        assert store is not None
        return store.open(snapshot)


class Attempt:
    """The snapshots that this rank needs for one plan; they stay open, so that their bytes stay, until `close`.

    Sequence: `restore`, then `replay` where iterations are run again. Both raise RefusedCopies.
    """

    def __init__(self, ports: RecoveryPorts, plan: RecoveryPlan, needed: Sequence[Need], topology: Topology) -> None:
        self._ports, self._plan, self._topology = ports, plan, topology
        self._rank = ports.transport.rank
        self._base = base_for(plan, self._rank, topology)
        self._open = ExitStack()
        self._held: list[tuple[Need, Reader]] = []
        carrier = Carrier(ports.transport, ports.open_in_memory, _encoded, self._land)
        self._arrived, self._refused = carrier.carry(needed)
        for reader in self._arrived.values():
            if reader not in self.late:
                self._open.enter_context(reader)
        for need in needed:
            if need.rank == self._rank and need.found.place not in self._refused:
                self._hold(need)

    @property
    def late(self) -> list[HostBuffer]:
        """What arrived in ordinary memory and is state, which has to outlive this recovery."""
        arrived = (reader for reader in self._arrived.values() if isinstance(reader, HostBuffer))
        return [reader for reader in arrived if reader.manifest.snapshot.kind not in (LOG, GRADIENTS)]

    @property
    def gradients(self) -> Reader | None:
        """The reduced gradients with which this rank rolls forward."""
        return next((reader for need, reader in self._held if need.found.snapshot.kind == GRADIENTS), None)

    def restore(self) -> None:
        """Fill the live state with NaN, then with that of the base, and with what a merge takes from before it."""
        # What is not restored, by whatever defect, must never be taken for state: NaN shows in the first loss.
        self._ports.restorer.poison()
        for need, reader in self._held:
            if need.parts and need.found.snapshot.iteration <= self._base:
                try:
                    self._ports.restorer.restore(reader.read, dict(need.parts))
                except MoECheckpointError as error:
                    self._refused[need.found.place] = str(error)
        trainer = self.having("trainer", self._base)
        if trainer is not None and not self._refused:
            place, reader = trainer
            try:
                restore_trainer(self._ports.trainer, reader)
            except MoECheckpointError as error:
                self._refused[place] = str(error)
        if self._refused:
            raise RefusedCopies(self._refused)

    def having(self, name: str, iteration: int) -> tuple[CopyLocation, Reader] | None:
        """A snapshot of this rank's state at an iteration whose manifest has a scalar of this name."""
        for need, reader in self._of(iteration):
            if reader.manifest.facts.scalars.get(name) is not None:
                return need.found.place, reader
        return None

    def missing(self) -> str:
        """What of the base this rank lacks, for people; empty if nothing."""
        segment = segment_of(self._plan, self._rank, self._topology)
        lacking = self._ports.restorer.missing(segment.frozen[0] if segment and segment.frozen else ())
        if self.having("trainer", self._base) is None:
            lacking = lacking or f"no snapshot of iteration {self._base} has this rank's random states"
        return lacking

    def replay(
        self,
        segment: ReplaySegment,
        job: Job,
        required: Mapping[int, Collection[OperatorId]],
        unlogged: Mapping[int, frozenset[int]],
        metadata: GatheredMetadata,
    ) -> Replay:
        """What makes the restored state dense. Raises RefusedCopies when something is missing for it.

        required: the operators of each rank. unlogged: by member, the iterations whose log it lacks and can make again.
        """
        alone, members = len(segment.stages) < self._topology.pp, ranks_of(segment, self._topology)
        own = frozenset[OperatorId]().union(*(required[rank] for rank in members))
        outside = frozenset(job.operators) - own
        # To log again what is sent to the stages outside, gradients have to flow on to them, on all ranks alike.
        flowing = frozenset[int]().union(*unlogged.values())
        steps = [
            self._step(segment, iteration, metadata, frozenset() if iteration in flowing else outside)
            for iteration in segment.replayed
        ]
        ports, ended = self._ports, partial(self._ports.timestamps.mark, Milestone.REPLAYED)
        assert ports.execution is not None
        replay = ReplayPorts(
            ports.restorer, ports.trainer, ports.execution, ports.transport, ports.clock, ports.boundary, ended
        )
        tolerance = job.config.replay_tolerance
        if not alone:
            return Replay(replay, steps, len(own), tolerance)
        return Replay(replay, steps, len(own), tolerance, members=members, unlogged=unlogged[self._rank])

    def close(self) -> None:
        """Let go of all of them but the late ones."""
        self._open.close()
        self._held, self._arrived = [], {}

    def _land(self, source: int, manifest: bytes) -> StoreReplica | HostBuffer:
        """Where a snapshot arrives: state in the store where it belongs, what only this recovery needs outside."""
        wanted = decode(manifest, f"manifest from rank {source}")
        ports, kind = self._ports, wanted.snapshot.kind
        if kind in (LOG, GRADIENTS):
            return HostBuffer(source, wanted)
        store = ports.standby if kind in STANDBY else ports.memory
        assert store is not None
        return ReplicaReceiver(store, ports.clock).begin_for_recovery(source, manifest)

    def _hold(self, need: Need) -> None:
        """Open it, and verify what is read only after a replayed iteration: now another copy can still replace it."""
        place = need.found.place
        try:
            reader = self._arrived.get(place) or self._open.enter_context(self._ports.open(need.found))
            is_checked = place in self._arrived or need.found.snapshot.iteration <= self._base
            if not is_checked and (torn := reader.verify()):
                raise UnreadableCheckpoint(f"record {torn[0].key} does not match its checksum")
            self._held.append((need, reader))
        except MoECheckpointError as error:
            self._refused[place] = str(error)

    def _of(self, iteration: int) -> list[tuple[Need, Reader]]:
        held = (item for item in self._held if item[0].found.snapshot.iteration == iteration)
        return [item for item in held if item[0].found.is_state]

    def _step(
        self, segment: ReplaySegment, iteration: int, metadata: GatheredMetadata, outside: frozenset[OperatorId]
    ) -> ReplayStep:
        journal, trainer = self._outcome(iteration, metadata.outcomes.get(iteration))
        loads = tuple(SnapshotLoad(reader, dict(need.parts)) for need, reader in self._of(iteration) if need.parts)
        logs = {
            way: reader
            for need, reader in self._held
            for way in need.feeds
            if need.found.snapshot.iteration == iteration
        }
        frozen = segment.frozen[iteration - segment.base - 1]
        return ReplayStep(iteration, frozen, journal, loads, trainer, logs, outside)

    def _outcome(self, iteration: int, gathered: StepOutcome | None) -> tuple[StepJournal, Reader | Mapping[str, Json]]:
        """How an iteration came out: as this rank's own snapshot has it, or as another rank's does."""
        own = self.having("journal", iteration)
        if own is None and gathered is not None:
            return gathered.journal, gathered.trainer
        if own is None:
            why = f"no snapshot of iteration {iteration} says how this rank's step came out"
            raise RefusedCopies({absent(iteration, self._rank): why})
        place, reader = own
        try:
            return StepJournal.from_data(cast("Mapping[str, Any]", reader.manifest.facts.scalars["journal"])), reader
        except (KeyError, TypeError) as error:
            raise RefusedCopies({place: f"its journal cannot be read: {format_error(error)}"}) from error


def absent(iteration: int, rank: int) -> CopyLocation:
    """Stands for a snapshot that is nowhere, in a refusal."""
    return rank, SnapshotId(iteration, rank), Tier.PARKED


def _encoded(reader: MappedReader) -> tuple[bytes, memoryview]:
    return encode(reader.manifest), reader.raw()
