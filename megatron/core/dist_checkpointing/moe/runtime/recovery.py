"""The order of events of a recovery: what was found, what is planned, fetched, restored and reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import MoECheckpointError, RecoveryImpossible, UnreadableCheckpoint
from ..policy.strategies import Job, Piece, Strategy
from ..policy.timelines import Timeline, past
from ..ports import (
    RANDOM,
    Clock,
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
from ..recover.fetch import Carrier, Need, needs
from ..recover.inventory import Catalogue, Place
from ..recover.table import RecoveryTable
from ..store.heap import HeapReader
from ..store.manifest import encode
from ..types import Lost, OperatorId, RecoveryPlan, SnapshotPlan, Tier
from .inbox import StoreInbox
from .keeper import Identity
from .stock import Stock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryPorts:
    """What a recovery works with; `transport` is used by nobody else meanwhile."""

    memory: MappedStore
    persistent: Store | None
    transport: Transport
    restorer: Restorer
    trainer: TrainerState
    clock: Clock


@dataclass(frozen=True)
class Outcome:
    """A recovery that was carried out: training goes on after `plan.target`, whose snapshot has this timeline.

    kept: pieces of snapshots in the memory of all ranks. persisted: snapshots in storage, of all ranks. spare: pieces
    in the memory of some ranks, by iteration and kind, to be kept until a newer snapshot is protected.
    """

    plan: RecoveryPlan
    timeline: Timeline
    kept: tuple[Piece, ...]
    persisted: tuple[SnapshotPlan, ...]
    spare: frozenset[tuple[int, str]]
    table: RecoveryTable = field(repr=False)


class Recovery:
    """One attempt of a job to go on from what an earlier one left; all methods are collectives over all ranks."""

    def __init__(
        self, job: Job, strategy: Strategy, ports: RecoveryPorts, identity: Identity, owners: Sequence[int]
    ) -> None:
        self._owners = frozenset(owners) | {ports.transport.rank}
        self._job, self._strategy, self._ports = job, strategy, ports
        self._identity, self._rank = identity, ports.transport.rank
        node = job.topology.node(self._rank)
        self._stock = Stock(ports.memory, ports.persistent, ports.transport, identity, node)
        self._catalogue = Catalogue((), {}, ())
        self._timeline: Timeline = ()
        self._plan: RecoveryPlan | None = None
        self._damaged: dict[Place, str] = {}
        self._late: list[HeapReader] = []

    def look(self) -> RecoveryPlan | None:
        """Take stock and plan; None when nothing was found, or nothing that suffices, which is then logged.

        Raises StoreFailure when a store cannot be listed, which a restart may mend.
        """
        self._catalogue = self._stock.take()
        self._plan = self._planned() if self._catalogue.found else None
        return self._plan

    @property
    def is_own(self) -> bool:
        """Whether the plan goes on from a state that this job itself left, and not from one of another job."""
        if self._plan is None:
            return False
        at = [one for one in self._catalogue.of(self._timeline).found if one.snapshot.iteration == self._plan.target]
        return any(one.job == self._identity.job for one in at if not one.why)

    @property
    def unusable(self) -> str:
        """Why sealed snapshots in storage cannot be used by this job; empty if there are none."""
        found = [one for one in self._catalogue.found if one.tier is Tier.PERSISTENT and one.why and not one.torn]
        return f"{found[0].snapshot}: {found[0].why}" if found else ""

    def carry_out(self) -> Outcome | None:
        """Restore the planned state, or what is left of it when copies prove damaged; None when nothing suffices.

        Live state is filled with NaN first, so after None it has to be built anew.
        """
        begun_s = self._ports.clock.now_s()
        while self._plan is not None:
            refused, plan = self._attempt(self._plan)
            all_refused = self._gathered_refusals(refused)
            if not all_refused:
                return self._finished(plan, begun_s)
            for place, why in all_refused.items():
                log.warning(
                    "refused the %s that rank %d holds (%s): %s", place[1], place[0], place[2].name.lower(), why
                )
            if all_refused.keys() <= self._damaged.keys():
                raise UnreadableCheckpoint(next(iter(all_refused.values())))
            self._damaged |= all_refused
            self._plan = self._planned()
        return None

    def discard(self) -> None:
        """Free all in memory: training begins from another state than any that is there."""
        self._stock.tidy((), ())

    def _planned(self) -> RecoveryPlan | None:
        """The plan for the newest timeline that anything can be made of; copies of different ones never mix."""
        problem: RecoveryImpossible | None = None
        for timeline in self._catalogue.timelines:
            inventory = self._catalogue.of(timeline).inventory(self._damaged)
            try:
                plan = self._strategy.recover(inventory, Lost(), self._job.topology)
            except RecoveryImpossible as error:
                problem = problem or error
                continue
            self._timeline = timeline
            return plan
        for one in self._catalogue.found if self._rank == 0 else ():
            log.info("found the %s at rank %d (%s) %s", one.snapshot, one.finder, one.tier.name.lower(), one.why)
        log.warning(
            "what was found in memory and storage does not suffice to recover: %s",
            problem or "no copy is intact, or of this job and layout",
        )
        return None

    def _attempt(self, plan: RecoveryPlan) -> tuple[dict[Place, str], RecoveryPlan]:
        """Fetch and restore; returns what was refused, and the plan with the tokens that it loses."""
        mine = self._catalogue.of(self._timeline)
        needed = needs(plan, mine.inventory(self._damaged), mine.without(self._damaged))
        inbox, memory = StoreInbox(self._ports.memory, self._ports.clock), self._ports.memory
        arrived, refused = Carrier(self._ports.transport, memory.open, _encoded, inbox.land).carry(needed)
        self._late = [reader for reader in arrived.values() if isinstance(reader, HeapReader)]
        self._ports.restorer.poison()
        base: tuple[Place, Mapping[str, Any]] | None = None
        with ExitStack() as stack:
            for reader in arrived.values():
                if not isinstance(reader, HeapReader):
                    stack.enter_context(reader)
            for need in needed:
                place = need.found.place
                if need.rank != self._rank or place in refused:
                    continue
                try:
                    reader = arrived.get(place) or stack.enter_context(self._opened(need))
                    if self._restore(need, reader, plan.target):
                        base = place, reader.manifest.facts.scalars
                except MoECheckpointError as error:
                    refused[place] = str(error)
        if not refused:
            return self._resumed(plan, base)
        return refused, plan

    def _resumed(
        self, plan: RecoveryPlan, base: tuple[Place, Mapping[str, Any]] | None
    ) -> tuple[dict[Place, str], RecoveryPlan]:
        """Take up what the strategy remembered, once all else is restored."""
        lacking = self._ports.restorer.missing()
        if base is None:
            lacking = lacking or f"no snapshot of iteration {plan.target} has this rank's random states"
        if base is None or lacking:
            return {(self._rank, SnapshotId(plan.target, self._rank), Tier.PARKED): lacking}, plan
        place, scalars = base
        newest = max(plan.target, self._catalogue.newest_iteration)
        try:
            return {}, self._strategy.resumed(plan, scalars["strategy"], newest)
        except (MoECheckpointError, KeyError, TypeError, ValueError) as error:
            return {place: f"the strategy cannot go on from it: {type(error).__name__}: {error}"}, plan

    def _opened(self, need: Need) -> Reader:
        store = self._ports.persistent if need.found.tier is Tier.PERSISTENT else self._ports.memory
        assert store is not None
        return store.open(need.found.snapshot)

    def _restore(self, need: Need, reader: Reader, target: int) -> bool:
        """Restore what is needed of a snapshot; whether it is the one with the trainer state of the target."""
        self._ports.restorer.restore(reader.read, dict(need.parts))
        scalars = reader.manifest.facts.scalars
        if reader.manifest.snapshot.iteration != target or "trainer" not in scalars:
            return False
        tensors = {
            one.key.removeprefix(RANDOM): reader.read(one.key)
            for one in reader.manifest.layout.fields
            if one.operator is None and one.key.startswith(RANDOM)
        }
        self._ports.trainer.restore(cast("Mapping[str, Json]", scalars["trainer"]), tensors)
        return True

    def _gathered_refusals(self, refused: Mapping[Place, str]) -> dict[Place, str]:
        told: Json = [
            [finder, one.iteration, one.rank, one.kind, tier.value, why] for (finder, one, tier), why in refused.items()
        ]
        rows = [row for rows in self._ports.transport.gather(told) for row in cast("list[Any]", rows)]
        return {(row[0], SnapshotId(row[1], row[2], row[3]), Tier(row[4])): row[5] for row in rows}

    def _finished(self, plan: RecoveryPlan, begun_s: float) -> Outcome:
        self._ports.restorer.complete()
        self._ports.transport.gather(None)  # nobody frees a copy that another rank still restores from
        used = {source.iteration for source in plan.sources}
        self._stock.land_late(self._late, used)
        self._late = []
        kept = self._stock.common(Tier.OWN_MEMORY, self._timeline, plan.target)
        persisted = self._stock.common(Tier.PERSISTENT, self._timeline, plan.target)
        names, spare = frozenset((piece.plan.iteration, piece.kind) for piece in kept), frozenset[tuple[int, str]]()
        if plan.target not in {iteration for iteration, _ in names}:
            # Some rank has it in storage only: then no rank gives up its own copy yet.
            spare = frozenset(
                (one.snapshot.iteration, one.snapshot.kind)
                for one in self._catalogue.of(self._timeline).found
                if one.snapshot.iteration in used and one.tier is not Tier.PERSISTENT
            )
        self._stock.tidy(names | spare, self._owners)
        duration_s = self._ports.clock.now_s() - begun_s
        table = RecoveryTable(plan, self._catalogue.nodes, self._damaged_told(), duration_s, self._strategy.plt)
        return Outcome(plan, past(self._timeline, plan.target), kept, _whole(persisted), spare - names, table)

    def _damaged_told(self) -> tuple[str, ...]:
        """What was refused when it was listed, and what when it was read."""
        told = [(one.place, one.why) for one in self._catalogue.found if one.why and not one.torn]
        told += self._damaged.items()
        return tuple(f"{place[1]}, held by rank {place[0]}: {why}" for place, why in sorted(told))


def _encoded(reader: MappedReader) -> tuple[bytes, memoryview]:
    return encode(reader.manifest), reader.raw()


def _whole(pieces: Sequence[Piece]) -> tuple[SnapshotPlan, ...]:
    """One plan per iteration from its pieces."""
    merged: dict[int, dict[OperatorId, Any]] = {}
    for piece in pieces:
        merged.setdefault(piece.plan.iteration, {}).update(piece.plan.parts)
    return tuple(SnapshotPlan(iteration, parts) for iteration, parts in sorted(merged.items()))
