"""What lies in memory and storage: listed on each rank, told to all; and what of it is given up after a recovery."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.strategies import Piece
from ..policy.timelines import Timeline
from ..ports import Json, MappedStore, SnapshotId, Store, StoreFailure, Transport
from ..recover.inventory import Catalogue, catalogue, is_past, listing, operators_told
from ..snapshot.identity import Identity
from ..store.heap import HeapReader
from ..types import LOG, OperatorId, SnapshotPlan, Tier

log = logging.getLogger(__name__)


class Stock:
    """The stores of one rank; all methods but `land_late`, `tidy` and `tidy_standby` are collectives over all ranks.

    standby: of parked state, boundary logs and kept gradients, if this job has such a store.
    """

    def __init__(
        self,
        memory: MappedStore,
        persistent: Store | None,
        transport: Transport,
        identity: Identity,
        *,
        standby: MappedStore | None = None,
    ) -> None:
        self._memory, self._persistent, self._transport = memory, persistent, transport
        self._identity, self._standby = identity, standby

    def take(self, node: int) -> Catalogue:
        """Everything that any rank finds; this one runs on `node`.

        Raises StoreFailure on all ranks when one cannot list what it has. A store that cannot be read now is not an
        empty one: going on as if it were would give up what lies in it.
        """
        rows, problem = self._listed(Tier.OWN_MEMORY, self._memory, self._identity.job)
        if self._standby is not None:
            more, trouble = self._listed(Tier.OWN_MEMORY, self._standby, self._identity.job)
            rows, problem = rows + more, problem or trouble
        if self._persistent is not None:
            more, trouble = self._listed(Tier.PERSISTENT, self._persistent, None)
            rows, problem = rows + more, problem or trouble
        told = self._transport.gather(
            {
                "node": str(node),
                "operators": operators_told(self._identity.operators),
                "found": rows,
                "problem": problem,
            }
        )
        everybody = cast("list[Mapping[str, Any]]", told)
        for rank, one in enumerate(everybody):
            if one["problem"]:
                raise StoreFailure(f"rank {rank}: what earlier attempts left cannot be listed: {one['problem']}")
        return catalogue(everybody)

    def common(self, tier: Tier, timeline: Timeline, newest: int) -> tuple[Piece, ...]:
        """The pieces up to iteration `newest` of which every rank has its share; none if any rank cannot tell.

        Of a window, all of its pieces or none: a part of one restores nothing.
        """
        store = self._memory if tier is Tier.OWN_MEMORY else self._persistent
        if store is None:
            return ()
        rows, problem = self._listed(Tier.PERSISTENT, store, None)
        if problem:
            log.error("rank %d: %s", self._transport.rank, problem)
        intact = None if problem else [row for row in rows if cast("list[Any]", row)[-1] == ""]
        told = cast("list[list[Any] | None]", self._transport.gather(intact))
        if any(one is None for one in told):
            return ()
        merged: dict[tuple[int, str, str], dict[OperatorId, Any]] = {}
        held: dict[tuple[int, str, str], int] = {}
        spans: dict[tuple[int, str, str], range] = {}
        everybody = catalogue([{"node": "", "operators": [], "found": found or []} for found in told])
        for one in everybody.of(timeline).found:
            key = one.snapshot.iteration, one.snapshot.kind, one.digest
            merged.setdefault(key, {}).update(one.plan.parts)
            held[key], spans[key] = held.get(key, 0) + 1, one.span
        pieces = [
            Piece(kind, SnapshotPlan(iteration, merged[iteration, kind, digest]), spans[iteration, kind, digest])
            for iteration, kind, digest in sorted(merged)
            if held[iteration, kind, digest] == len(told) and iteration <= newest
        ]
        return tuple(whole_windows(pieces))

    def land_late(self, arrived: Sequence[HeapReader], needed: Collection[int]) -> None:
        """Move snapshots that found no room while they were fetched into memory, in place of what nobody needs.

        Called when all ranks have restored: snapshots of other iterations than the `needed` ones are given up for it.
        """
        if not arrived:
            return
        with self._told("a fetched snapshot is not kept in memory"):
            for snapshot in self._memory.snapshots().sealed:
                if snapshot.iteration not in needed:
                    self._memory.free(snapshot)
            for one in arrived:
                _land(one, self._memory)

    def tidy(self, kept: Collection[tuple[int, str]], owners: Collection[int]) -> None:
        """Free all in memory but the pieces `kept`, by iteration and kind, of these owners; and what is torn.

        Nothing that is persistent is given up: a copy of another timeline is never mixed with this one's, and retention
        removes what this attempt has superseded.
        """
        for store in filter(None, (self._memory, self._persistent)):
            try:
                store.sweep()
            except StoreFailure as error:
                log.error("rank %d: torn snapshots could not be removed: %s", self._transport.rank, error)
        with self._told("memory could not be freed"):
            listed = self._memory.snapshots()
            for torn in listed.torn:
                self._memory.free(torn.snapshot)
            for snapshot in listed.sealed:
                if (snapshot.iteration, snapshot.kind) not in kept or snapshot.rank not in owners:
                    self._memory.free(snapshot)

    def tidy_standby(
        self,
        kept: Collection[SnapshotId] = (),
        logged: range = range(0),
        arrived: Sequence[HeapReader] = (),
        *,
        timeline: Timeline = (),
    ) -> None:
        """Free all in the standby store but what is `kept`, and the logs of iterations `logged`, of this timeline; then
        move in what arrived for this rank."""
        store, standby = self._standby, "the standby store could not be tidied"
        if store is None:
            return
        with self._told(standby):
            store.sweep()
        with self._told(standby):
            listed = store.snapshots()
            for torn in listed.torn:
                store.free(torn.snapshot)
            for snapshot in listed.sealed:
                is_wanted = snapshot in kept or (snapshot.kind == LOG and snapshot.iteration in logged)
                if not (is_wanted and _is_of(store, snapshot, timeline)):
                    store.free(snapshot)
            for one in arrived:
                _land(one, store)

    def journal_log(self, iteration: int, scalars: Mapping[str, Json], timeline: Timeline) -> None:
        """Let this rank's log of an iteration say how that came out, if it was sealed before the rank knew it.

        Else nobody may know it any more once parked state is freed, and then nothing is replayed alone past it.
        """
        store, snapshot = self._standby, SnapshotId(iteration, self._transport.rank, LOG)
        if store is None or not _is_of(store, snapshot, timeline):
            return
        with self._told(f"the {snapshot} cannot be completed"):
            with store.open(snapshot) as reader:
                manifest = reader.manifest
                if manifest.facts.scalars.get("journal") is not None:
                    return
                records = {field.key: bytes(reader.read(field.key)) for field in manifest.layout.fields}
            store.free(snapshot)
            with store.reserve(snapshot, manifest.layout) as writer:
                for key, data in records.items():
                    writer.put(key, data)
                writer.seal(replace(manifest.facts, scalars={**manifest.facts.scalars, **scalars}), manifest.checksums)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What a store refuses costs protection, and is said."""
        try:
            yield
        except (StoreFailure, UnreadableCheckpoint, UsageError) as error:
            log.error("rank %d: %s: %s", self._transport.rank, what, error)

    def _listed(self, tier: Tier, store: Store, of_job: str | None) -> tuple[list[Json], str]:
        """The rows of one store, and the reason why there are none."""
        identity = self._identity
        try:
            return listing(store, tier, self._transport.rank, identity.topology, of_job, identity.strategy), ""
        except StoreFailure as error:
            return [], str(error)


def _land(one: HeapReader, store: MappedStore) -> None:
    """Move a snapshot that arrived in ordinary memory into a store. Raises StoreFailure, UsageError."""
    manifest = one.manifest
    with store.reserve(manifest.snapshot, manifest.layout) as writer:
        for field in manifest.layout.fields:
            writer.put(field.key, one.read(field.key))
        writer.seal(manifest.facts, manifest.checksums)


def _is_of(store: MappedStore, snapshot: SnapshotId, timeline: Timeline) -> bool:
    """Whether a snapshot is there and lies in the past of `timeline`."""
    try:
        with store.open(snapshot) as reader:
            led = cast("list[Any]", reader.manifest.facts.scalars["timeline"])
    except (UnreadableCheckpoint, KeyError):
        return False
    return is_past(tuple((name, after) for name, after in led), snapshot.iteration, timeline)


def whole_windows(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of windows of which an iteration is there for each one of the span; others are as good as lost."""
    there: dict[tuple[str, range], set[int]] = {}
    for piece in pieces:
        there.setdefault((piece.kind, piece.span), set()).add(piece.plan.iteration)
    return (piece for piece in pieces if there[piece.kind, piece.span].issuperset(piece.span))
