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
    Clock,
    Json,
    MappedReader,
    MappedStore,
    Reader,
    Restorer,
    SnapshotId,
    Store,
    StoreFailure,
    TrainerState,
    Transport,
)
from ..recover.fetch import Carrier, Need, needs
from ..recover.inventory import Catalogue, Place, catalogue, listing, operators_told
from ..recover.table import RecoveryTable
from ..store.manifest import encode
from ..types import Lost, OperatorId, RecoveryPlan, SnapshotPlan, Tier
from .inbox import StoreInbox
from .keeper import Identity

log = logging.getLogger(__name__)

RANDOM = "random/"


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

    kept: pieces of snapshots in the memory of all ranks. persisted: snapshots in storage, of all ranks.
    """

    plan: RecoveryPlan
    timeline: Timeline
    kept: tuple[Piece, ...]
    persisted: tuple[SnapshotPlan, ...]
    table: RecoveryTable = field(repr=False)


class Recovery:
    """One attempt of a job to go on from what an earlier one left; all methods are collectives over all ranks."""

    def __init__(
        self, job: Job, strategy: Strategy, ports: RecoveryPorts, identity: Identity, owners: Sequence[int]
    ) -> None:
        self._owners = frozenset(owners) | {ports.transport.rank}
        self._job, self._strategy, self._ports = job, strategy, ports
        self._identity = identity
        self._rank = ports.transport.rank
        self._catalogue: Catalogue | None = None
        self._timeline: Timeline = ()
        self._plan: RecoveryPlan | None = None
        self._damaged: dict[Place, str] = {}

    def look(self) -> RecoveryPlan | None:
        """Take stock and plan; None when nothing was found, or nothing that suffices, which is then logged."""
        begun_s = self._ports.clock.now_s()
        self._catalogue = self._take_stock()
        log.debug("inventory took %.3f s", self._ports.clock.now_s() - begun_s)
        self._plan = self._planned() if self._catalogue.found else None
        return self._plan

    def carry_out(self) -> Outcome | None:
        """Restore the planned state, or what is left of it when copies prove damaged; None when nothing suffices.

        Live state is filled with NaN first, so after None it has to be built anew.
        """
        begun_s = self._ports.clock.now_s()
        while self._plan is not None:
            assert self._catalogue is not None
            refused, restored = self._attempt(self._plan)
            all_refused = self._gathered_refusals(refused)
            if not all_refused:
                return self._finished(self._plan, restored, begun_s)
            for place, why in all_refused.items():
                log.warning(
                    "refused the %s that rank %d holds (%s): %s", place[1], place[0], place[2].name.lower(), why
                )
            if all_refused.keys() <= self._damaged.keys():
                raise UnreadableCheckpoint(next(iter(all_refused.values())))
            self._damaged |= all_refused
            self._plan = self._planned()
        return None

    def discard(self, newer_than: int) -> None:
        """Free what belongs to a future that will not be, and all in memory: training begins from another state."""
        self._tidy(frozenset(), newer_than)

    def _take_stock(self) -> Catalogue:
        rows: list[Json] = []
        accepts, job = self._identity.topology, self._identity.job
        stores = [(self._ports.memory, Tier.OWN_MEMORY, job), (self._ports.persistent, Tier.PERSISTENT, None)]
        for store, tier, of_job in stores:
            if store is not None:
                try:
                    rows += listing(store, tier, self._rank, accepts, of_job)
                except StoreFailure as error:
                    log.error("rank %d: what is in the %s tier cannot be listed: %s", self._rank, tier.name, error)
        told: Json = {
            "node": str(self._job.topology.node(self._rank)),
            "operators": operators_told(self._identity.operators),
            "found": rows,
        }
        return catalogue(cast("list[Mapping[str, Any]]", self._ports.transport.gather(told)))

    def _planned(self) -> RecoveryPlan | None:
        """The plan for the newest timeline that anything can be made of; copies of different ones never mix."""
        assert self._catalogue is not None
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

    def _attempt(self, plan: RecoveryPlan) -> tuple[dict[Place, str], dict[str, Any]]:
        """Fetch and restore; returns what was refused, and the scalars that belong to the restored state."""
        assert self._catalogue is not None
        mine = self._catalogue.of(self._timeline)
        needed = needs(plan, mine.inventory(self._damaged), mine.without(self._damaged))
        carrier = Carrier(
            self._ports.transport,
            self._ports.memory.open,
            _encoded,
            StoreInbox(self._ports.memory, self._ports.clock).land,
        )
        arrived, refused = carrier.carry(needed)
        self._ports.restorer.poison()
        restored: dict[str, Any] = {}
        with ExitStack() as stack:
            for reader in arrived.values():
                stack.enter_context(reader)
            for need in needed:
                place = need.found.place
                if need.rank != self._rank or place in refused:
                    continue
                try:
                    reader = arrived.get(place) or stack.enter_context(self._opened(need))
                    self._restore(need, reader, plan.target, restored)
                except MoECheckpointError as error:
                    refused[place] = str(error)
        if not refused:
            lacking = self._ports.restorer.missing() or self._lacking(restored, plan.target)
            refused = {(self._rank, SnapshotId(plan.target, self._rank), Tier.PARKED): lacking} if lacking else {}
        return refused, restored

    def _lacking(self, restored: Mapping[str, Any], target: int) -> str:
        """What must be restored besides operators and was not."""
        return "" if "trainer" in restored else f"no snapshot of iteration {target} has this rank's random states"

    def _opened(self, need: Need) -> Reader:
        store = self._ports.persistent if need.found.tier is Tier.PERSISTENT else self._ports.memory
        assert store is not None
        return store.open(need.found.snapshot)

    def _restore(self, need: Need, reader: Reader, target: int, restored: dict[str, Any]) -> None:
        self._ports.restorer.restore(reader.read, dict(need.parts))
        scalars = reader.manifest.facts.scalars
        if reader.manifest.snapshot.iteration == target and "trainer" in scalars:
            tensors = {
                one.key.removeprefix(RANDOM): reader.read(one.key)
                for one in reader.manifest.layout.fields
                if one.operator is None and one.key.startswith(RANDOM)
            }
            self._ports.trainer.restore(cast("Mapping[str, Json]", scalars["trainer"]), tensors)
            restored.update(scalars)

    def _gathered_refusals(self, refused: Mapping[Place, str]) -> dict[Place, str]:
        told: Json = [
            [finder, one.iteration, one.rank, one.kind, tier.value, why] for (finder, one, tier), why in refused.items()
        ]
        rows = [row for rows in self._ports.transport.gather(told) for row in cast("list[Any]", rows)]
        return {(row[0], SnapshotId(row[1], row[2], row[3]), Tier(row[4])): row[5] for row in rows}

    def _finished(self, plan: RecoveryPlan, restored: Mapping[str, Any], begun_s: float) -> Outcome:
        assert self._catalogue is not None
        self._ports.restorer.complete()
        plan = self._strategy.resumed(plan, restored["strategy"], max(plan.target, self._catalogue.newest_iteration))
        self._ports.transport.gather(None)  # nobody frees a copy that another rank still restores from
        kept = self._common(self._ports.memory, plan.target)
        persisted = self._common(self._ports.persistent, plan.target) if self._ports.persistent else ()
        timeline = past(self._timeline, plan.target)
        names = frozenset((piece.plan.iteration, piece.kind) for piece in kept)
        self._tidy(names, plan.target)
        duration_s = self._ports.clock.now_s() - begun_s
        table = RecoveryTable(plan, self._catalogue.nodes, self._damaged_told(), duration_s, self._strategy.plt)
        return Outcome(plan, timeline, kept, _whole(persisted), table)

    def _damaged_told(self) -> tuple[str, ...]:
        return tuple(f"{place[1]}, held by rank {place[0]}: {why}" for place, why in sorted(self._damaged.items()))

    def _common(self, store: Store, newest: int) -> tuple[Piece, ...]:
        """The pieces up to iteration `newest` of which every rank has its share in `store`."""
        rows = listing(store, Tier.PERSISTENT, self._rank, self._identity.topology, None)
        told = cast(
            "list[list[Any]]", self._ports.transport.gather([row for row in rows if cast("list[Any]", row)[-1] == ""])
        )
        merged: dict[tuple[int, str, str], dict[OperatorId, Any]] = {}
        held: dict[tuple[int, str, str], int] = {}
        stock = catalogue([{"node": "", "operators": [], "found": rows} for rows in told])
        for one in stock.of(self._timeline).found:
            key = one.snapshot.iteration, one.snapshot.kind, one.digest
            merged.setdefault(key, {}).update(one.plan.parts)
            held[key] = held.get(key, 0) + 1
        return tuple(
            Piece(kind, SnapshotPlan(iteration, merged[iteration, kind, digest]))
            for iteration, kind, digest in sorted(merged)
            if held[iteration, kind, digest] == len(told) and iteration <= newest
        )

    def _tidy(self, kept: frozenset[tuple[int, str]], newest: int) -> None:
        """Free copies that nothing refers to any more: torn ones, and what is newer than where training goes on."""
        try:
            self._ports.memory.sweep()
            for snapshot in self._ports.memory.snapshots().sealed:
                if (snapshot.iteration, snapshot.kind) not in kept or snapshot.rank not in self._owners:
                    self._ports.memory.free(snapshot)
            if self._ports.persistent is not None:
                self._ports.persistent.sweep()
                for snapshot in self._ports.persistent.snapshots().sealed:
                    if snapshot.rank == self._rank and snapshot.iteration > newest:
                        self._ports.persistent.free(snapshot)
        except StoreFailure as error:
            log.error("rank %d: copies that are not needed any more could not be freed: %s", self._rank, error)


def _encoded(reader: MappedReader) -> tuple[bytes, memoryview]:
    return encode(reader.manifest), reader.raw()


def _whole(pieces: Sequence[Piece]) -> tuple[SnapshotPlan, ...]:
    """One plan per iteration from its pieces."""
    merged: dict[int, dict[OperatorId, Any]] = {}
    for piece in pieces:
        merged.setdefault(piece.plan.iteration, {}).update(piece.plan.parts)
    return tuple(SnapshotPlan(iteration, parts) for iteration, parts in sorted(merged.items()))
