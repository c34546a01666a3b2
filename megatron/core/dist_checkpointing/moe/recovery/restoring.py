"""One try to carry a recovery plan out on one rank: its snapshots fetched, held open, restored, and replayed from.

What another rank found travels first (`fetching`). What lies in storage, or in the rank's own memory, is opened in
place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, cast

from ..errors import MoECheckpointError, UnreadableCheckpoint, UsageError, format_error
from ..policy.rollback import base_for, ranks_of, segment_of
from ..ports import (
    Clock,
    Execution,
    Json,
    MappedReader,
    MappedStore,
    OlderMemory,
    Reader,
    Restorer,
    SnapshotId,
    Store,
    TrainerState,
    Transport,
)
from ..replay.densify import Logs, Replay, ReplayPorts, ReplayStep, SnapshotLoad, StageFeed, restore_trainer
from ..replication.agreement import raise_on_all_ranks
from ..storage.base import HostBuffer
from ..strategies import Job
from ..types import (
    GRADIENTS,
    LOG,
    STANDBY,
    OperatorId,
    RecoveryPlan,
    ReplaySegment,
    StepJournal,
    Tier,
    Topology,
)
from ..types.operators import scaled
from .exactness import DivergenceNotes
from .fetching import SnapshotFetcher
from .inventory import CopyLocation, timeline_of
from .sources import (
    GatheredMetadata,
    KeptReplay,
    KeptState,
    RefusedCopies,
    SnapshotRequest,
    StepOutcome,
    requested,
)
from .timeline import Milestone, Timestamps

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecoveryPorts:
    """What a recovery works with; `transport` is used by nobody else meanwhile.

    Attributes:
        execution: Runs iterations with frozen operators; None for strategies that replay none.
        make_room: Fits the memory to what the strategy needs once it knows what it knew before the fault; called by all
            ranks together.
        standby: Parked state, boundary logs and kept gradients, without which all stages roll back together.
        boundary: Makes what feeds a replayed iteration from the logs of the stages beside it.
        timestamps: Of what was done.
        notes: Of replays that diverged.
        kept: What live state is already.
        older: What other layouts left in memory.
        dtypes: Of live tensors, by the keys of their records.
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
    notes: DivergenceNotes = field(default_factory=DivergenceNotes)
    kept: KeptState = field(default_factory=KeptState)
    older: OlderMemory = field(default_factory=OlderMemory)
    dtypes: Callable[[], Mapping[str, str]] = dict

    def open(self, snapshot: SnapshotId, tier: Tier) -> MappedReader | Reader:
        """A reader of what this rank found, or reads from storage.

        Args:
            snapshot: What to read.
            tier: Where it lies.

        Raises:
            UnreadableCheckpoint, StoreFailure: It cannot be read.
        """
        if tier is Tier.PERSISTENT:
            assert self.persistent is not None
            return self.persistent.open(snapshot)
        return self.open_in_memory(snapshot)

    def open_in_memory(self, snapshot: SnapshotId) -> MappedReader:
        """As `open`, of what lies in this rank's memory."""
        return self.store_of(snapshot).open(snapshot)

    def store_of(self, snapshot: SnapshotId) -> MappedStore:
        """The part of this rank's memory in which such a snapshot lies."""
        store = self.standby if snapshot.kind in STANDBY else self.memory
        assert store is not None
        return store


class _MeasuredReads:
    """Reads of records, verified as they are: how many bytes, and how long they took."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.nbytes, self._took_s = clock, 0, 0.0

    def of(self, reader: Reader) -> Callable[[str], memoryview]:
        """The reader's `read`."""

        def read(key: str) -> memoryview:
            begun_s = self._clock.now_s()
            data = reader.read(key)
            self._took_s += self._clock.now_s() - begun_s
            self.nbytes += data.nbytes
            return data

        return read

    def __str__(self) -> str:
        rate = f" at {scaled(self.nbytes / self._took_s)}/s" if self._took_s > 0 else ""
        return f"restore: rank 0 read and verified {scaled(self.nbytes)}{rate}"


class RestoreTask:
    """The snapshots that this rank needs for one plan; they stay open, so that their bytes stay, until `close`.

    Sequence: `restore`, then `replay` where iterations are run again. Both raise RefusedCopies. resumed: the replay
    that live state is in the middle of, and that is continued; then nothing is restored.
    """

    def __init__(
        self,
        ports: RecoveryPorts,
        plan: RecoveryPlan,
        phases: Sequence[Sequence[SnapshotRequest]],
        topology: Topology,
        resumed: KeptReplay | None = None,
    ) -> None:
        self._ports, self._plan, self._topology, self._resumed = ports, plan, topology, resumed
        self._rank, self._open = ports.transport.rank, ExitStack()
        self._base = base_for(plan, self._rank, topology)
        self._held: list[tuple[SnapshotRequest, Reader]] = []
        go = requested(phases, ports.transport)
        self._arrived, self._refused = SnapshotFetcher(ports.transport, ports.store_of).carry(go) if go else ({}, {})
        for reader in self._arrived.values():
            if reader not in self.late:
                self._open.enter_context(reader)
        for need in chain.from_iterable(phases):
            if need.found.place not in self._refused:
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
        """Fill the live state with NaN, then with that of the base, and with what a merge takes from before it; where
        it is that of the base already, nothing is copied. A collective.

        Raises UsageError, on all ranks before anything is written, where state is in other dtypes or of other flags.
        """
        raise_on_all_ranks(self._ports.transport, self._check_flags)
        if self._resumed is not None:
            self._continue(self._resumed)
            return
        wanted = [one for one in self._held if one[0].parts and one[0].found.snapshot.iteration <= self._base]
        if self._ports.kept.is_that_of(reader for _, reader in wanted):
            self._ports.restorer.keep()
        else:
            self._fill(wanted)
        trainer = self.having("trainer", self._base)
        if trainer is not None and not self._refused:
            place, reader = trainer
            try:
                restore_trainer(self._ports.trainer, reader)
            except MoECheckpointError as error:
                self._refused[place] = str(error)
        if self._refused:
            raise RefusedCopies(self._refused)

    def _check_flags(self) -> None:
        """All copies have the dtypes and schedules of before, and none is damaged: no other copy, and nothing older,
        would fit. As many bytes may be other values: fp16 and bf16."""
        now = self._ports.dtypes()
        for need, reader in self._held:
            for one in reader.manifest.layout.fields:
                if (dtype := now.get(one.key, one.dtype)) != one.dtype:
                    raise UsageError(
                        f"the {need.found.snapshot} has {one.key} in {one.dtype}, and this job has it in {dtype}: start"
                        " with the dtypes of before (--bf16, --fp16, --main-params-dtype, --exp-avg-dtype,"
                        " --exp-avg-sq-dtype), or begin from a checkpoint under another job id"
                    )
        trainer = self.having("trainer", self._base) if self._resumed is None else None
        scalars = trainer[1].manifest.facts.scalars["trainer"] if trainer is not None else None
        if isinstance(scalars, Mapping) and (problem := self._ports.trainer.misfit(scalars)):
            raise UsageError(
                f"the trainer state of iteration {self._base} {problem}; start with the flags of before, or begin from"
                " a checkpoint under another job id"
            )

    def _continue(self, kept: KeptReplay) -> None:
        """Operators that are still frozen in the next iteration have compute weights only."""
        if self._refused:
            raise RefusedCopies(self._refused)
        self._ports.restorer.keep(self._frozen_first())
        self._ports.trainer.restore(kept.scalars, {name: memoryview(data) for name, data in kept.tensors.items()})

    def _fill(self, wanted: Sequence[tuple[SnapshotRequest, Reader]]) -> None:
        self._ports.kept.forget()
        # What is not restored, by whatever defect, must never be taken for state: NaN shows in the first loss.
        self._ports.restorer.poison()
        measured = _MeasuredReads(self._ports.clock)
        for need, reader in wanted:
            try:
                self._ports.restorer.restore(measured.of(reader), dict(need.parts))
            except MoECheckpointError as error:
                self._refused[need.found.place] = str(error)
        if self._rank == 0 and measured.nbytes:
            log.info("%s", measured)

    def having(self, name: str, iteration: int) -> tuple[CopyLocation, Reader] | None:
        """A snapshot of this rank's state whose manifest has a certain scalar; None where there is none.

        Args:
            name: Of the scalar.
            iteration: Of the snapshot.
        """
        for need, reader in self._of(iteration):
            if reader.manifest.facts.scalars.get(name) is not None:
                return need.found.place, reader
        return None

    def missing(self) -> str:
        """What of the base this rank lacks, for people; empty if nothing."""
        lacking = self._ports.restorer.missing(self._frozen_first())
        if self.having("trainer", self._base) is None:
            lacking = lacking or f"no snapshot of iteration {self._base} has this rank's random states"
        return lacking

    def _frozen_first(self) -> Collection[OperatorId]:
        """In the first iteration that is run again, or the next one of a replay that continues."""
        if self._resumed is not None:
            return self._resumed.segment.frozen[self._resumed.iteration - self._resumed.segment.base]
        segment = segment_of(self._plan, self._rank, self._topology)
        return segment.frozen[0] if segment and segment.frozen else ()

    def replay(
        self,
        segment: ReplaySegment,
        job: Job,
        own: frozenset[OperatorId],
        unlogged: tuple[frozenset[int], frozenset[int]],
        comparable: Collection[int],
        metadata: GatheredMetadata,
    ) -> Replay:
        """The replay that makes the restored state dense.

        Args:
            segment: The stages that replay together, and the iterations.
            job: Has all operators, and the tolerance.
            own: The operators of these stages.
            unlogged: The iterations whose log this rank lacks and can make again, and those of which any member does.
            comparable: Iterations of which all logs say what was received of this segment.
            metadata: How the iterations came out when they ran first.

        Raises:
            RefusedCopies: Something is missing for it.
        """
        alone, members = len(segment.stages) < self._topology.pp, ranks_of(segment, self._topology)
        outside = job.order.named(job.order.bits(job.operators) & ~job.order.bits(own))
        lacked_here, lacked = unlogged
        # To log again what is sent to the stages outside, and to compare it, gradients have to flow on to them, on all
        # ranks alike.
        flowing = frozenset(comparable) | lacked
        steps = [
            replace(
                self._step(segment, iteration, metadata, frozenset() if iteration in flowing else outside),
                compares=alone and iteration in comparable,
            )
            for iteration in segment.replayed
            if self._resumed is None or iteration > self._resumed.iteration
        ]
        ports, ended = self._ports, partial(self._ports.timestamps.mark, Milestone.REPLAYED)
        assert ports.execution is not None
        replay = ReplayPorts(
            restorer=ports.restorer,
            trainer=ports.trainer,
            execution=ports.execution,
            transport=ports.transport,
            clock=ports.clock,
            boundary=ports.boundary,
            ended=ended,
        )
        tolerance = job.config.replay_tolerance
        if not alone:
            return Replay(replay, steps, len(own), tolerance)
        compared = dict(self._resumed.compared) if self._resumed is not None else {}
        return Replay(replay, steps, len(own), tolerance, members=members, unlogged=lacked_here, compared=compared)

    def close(self) -> None:
        """Release all of them but the late ones."""
        self._open.close()
        self._held, self._arrived = [], {}

    def _hold(self, need: SnapshotRequest) -> None:
        """Open it, and verify what is read only after a replayed iteration: now another copy can still replace it."""
        place = need.found.place
        try:
            reader = self._arrived.get(place) or self._open.enter_context(
                self._ports.open(need.found.snapshot, need.found.tier)
            )
            # Bytes that match the manifest of another past are wrong in this one.
            if timeline_of(reader.manifest) != need.found.timeline:
                raise UnreadableCheckpoint(
                    f"the {need.found.snapshot} was replaced by that of another attempt since it was listed"
                )
            is_checked = place in self._arrived or need.found.snapshot.iteration <= self._base
            if not is_checked and (torn := reader.verify()):
                raise UnreadableCheckpoint(f"record {torn[0].key} does not match its checksum")
            self._held.append((need, reader))
        except MoECheckpointError as error:
            self._refused[place] = str(error)

    def _of(self, iteration: int) -> list[tuple[SnapshotRequest, Reader]]:
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
    """Stands for a snapshot that is nowhere, in a refusal.

    Args:
        iteration: Of the snapshot.
        rank: Whose it would be.
    """
    return rank, SnapshotId(iteration, rank), Tier.PARKED
