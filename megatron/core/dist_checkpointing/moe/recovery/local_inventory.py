"""What lies in the stores of one rank: listed and gathered for a plan; given up or kept once that is carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import filterfalse
from operator import itemgetter

import msgspec

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.lineage import Lineage
from ..ports import Json, MappedStore, SnapshotId, Store, StoreFailure, Transport
from ..replication.agreement import raise_on_all_ranks
from ..snapshot.persisting import Identity
from ..storage.base import HostBuffer
from ..strategies import Piece
from ..types import CONSTANT, LOG, OperatorId, Part, SnapshotPlan, Tier
from .exactness import Divergence
from .inventory import Catalogue, InventoryRow, SnapshotEntry, catalogue, is_past, listing, rank_inventory

log = logging.getLogger(__name__)


class LocalInventory:
    """The stores of one rank; `gather` and `common` are collectives over all ranks.

    Args:
        memory: Of snapshots.
        persistent: Storage, if the job has any.
        transport: To all ranks.
        identity: Of the job's snapshots.
        standby: Of parked state, boundary logs and kept gradients, if this job has such a store.
        is_spared: Whether a snapshot in memory is of another layout: those are neither listed nor freed here.
        older: The timelines of these.
    """

    def __init__(
        self,
        memory: MappedStore,
        persistent: Store | None,
        transport: Transport,
        identity: Identity,
        *,
        standby: MappedStore | None = None,
        is_spared: Callable[[SnapshotId], bool] = lambda snapshot: False,
        older: Callable[[], Collection[Lineage]] = tuple,
    ) -> None:
        self._memory, self._persistent, self._transport = memory, persistent, transport
        self._is_spared, self._older = is_spared, older
        self._identity, self._standby = identity, standby

    def gather(self, node: int, notes: Iterable[Divergence] = ()) -> Catalogue:
        """What all ranks find; a collective.

        Args:
            node: On which this rank runs.
            notes: Replays that diverged before.

        Raises:
            StoreFailure: On all ranks when one cannot list what it has. A store that cannot be read now is not an empty
                one: going on as if it were would give up what lies in it.
        """
        rows = raise_on_all_ranks(self._transport, self._all_rows, (StoreFailure,))
        own = rank_inventory(str(node), self._identity.operators, rows, notes, self._older())
        return catalogue(self._transport.gather(own))

    def common(self, tier: Tier, timeline: Lineage, newest: int) -> tuple[Piece, ...]:
        """The pieces of which every rank that owns a part has it; a collective.

        Of a window, all of its pieces or none: a part of one restores nothing.

        Args:
            tier: In which they lie.
            timeline: In whose past they lie.
            newest: The last iteration that counts.

        Returns:
            The pieces; none if any rank cannot tell.
        """
        store = self._memory if tier is Tier.OWN_MEMORY else self._persistent
        if store is None:
            return ()
        own: Json = None
        try:
            own = rank_inventory("", self._identity.operators, (row for row in self._rows(store, tier) if not row.why))
        except StoreFailure as error:
            log.error("rank %d: %s", self._transport.rank, error)
        gathered = self._transport.gather(own)
        if None in gathered:
            return ()
        shares: dict[tuple[int, str, str], list[SnapshotEntry]] = {}
        listed = catalogue(gathered).within(timeline)
        for found in listed.found:
            if found.snapshot.iteration <= newest:
                shares.setdefault((found.snapshot.iteration, found.snapshot.kind, found.digest), []).append(found)
        pieces = []
        for (iteration, kind, digest), share in sorted(shares.items(), key=itemgetter(0)):
            plan = SnapshotPlan(iteration, {op: part for found in share for op, part in found.plan.parts.items()})
            holders = {found.snapshot.rank for found in share}
            owners = {rank for rank, owned in listed.required.items() if not owned.isdisjoint(plan.parts)}
            # Owners are known once all operators of the piece are. All ranks have the piece with the trainer's state.
            is_owned = plan.digest() == digest and not any(found.has_strategy for found in share)
            if len(share) == len(gathered) or (is_owned and holders >= owners):
                pieces.append(Piece(kind, plan, share[-1].span))
        return tuple(whole_windows(pieces))

    def _all_rows(self) -> list[InventoryRow]:
        """All of this rank's memory, whoever owns it, and what it owns in storage. Raises StoreFailure."""
        rows: list[InventoryRow] = []
        try:
            for memory in filter(None, (self._memory, self._standby)):
                identity = self._identity
                listed = listing(memory, Tier.OWN_MEMORY, identity.topology, identity.strategy, job=identity.job)
                rows += (row for row in listed if memory is self._standby or not self._is_spared(row.snapshot))
            if self._persistent is not None:
                rows += self._rows(self._persistent, Tier.PERSISTENT)
        except StoreFailure as error:
            raise StoreFailure(f"what earlier attempts left cannot be listed: {error}") from error
        return rows

    def _rows(self, store: Store, tier: Tier) -> list[InventoryRow]:
        """What this rank owns, of any job. Raises StoreFailure."""
        return listing(store, tier, self._identity.topology, self._identity.strategy, owner=self._transport.rank)

    def move_in(self, arrived: Sequence[HostBuffer], needed: Collection[int]) -> None:
        """Move snapshots that found no room while they were fetched into memory, in place of what nobody needs.

        Called when all ranks have restored.

        Args:
            arrived: The snapshots.
            needed: Iterations; snapshots of others are given up for it.
        """
        if not arrived:
            return
        with self._logged("a fetched snapshot is not kept in memory"):
            for snapshot in self._memory.snapshots().sealed:
                if snapshot.iteration not in needed and not self._is_spared(snapshot):
                    self._memory.free(snapshot)
            for reader in arrived:
                _land(reader, self._memory)

    def collect_garbage(self, kept: Collection[tuple[int, str]], owners: Collection[int]) -> None:
        """Free all in memory but some pieces; and what is torn.

        Nothing that is persistent is given up: a copy of another timeline is never mixed with this one's, and retention
        removes what this attempt has superseded.

        Args:
            kept: Iteration and kind of each piece that stays.
            owners: The ranks whose pieces stay.
        """
        for store in filter(None, (self._memory, self._persistent)):
            try:
                store.sweep()
            except StoreFailure as error:
                log.error("rank %d: cannot remove incomplete snapshots: %s", self._transport.rank, error)
        with self._logged("memory could not be freed"):
            listed = self._memory.snapshots()
            for torn in listed.torn:
                self._memory.free(torn.snapshot)
            for snapshot in filterfalse(self._is_spared, listed.sealed):
                if (snapshot.iteration, snapshot.kind) not in kept or snapshot.rank not in owners:
                    self._memory.free(snapshot)

    def collect_standby_garbage(
        self,
        kept: Collection[SnapshotId] = (),
        logged: range = range(0),
        arrived: Sequence[HostBuffer] = (),
        *,
        timeline: Lineage = (),
    ) -> None:
        """Free all in the standby store that is not wanted, and move in what arrived for this rank.

        Args:
            kept: Snapshots that stay.
            logged: Iterations whose logs stay.
            arrived: Snapshots that were fetched.
            timeline: In whose past all that stays has to lie.
        """
        store, failed = self._standby, "the standby store could not be tidied"
        if store is None:
            return
        with self._logged(failed):
            store.sweep()
        with self._logged(failed):
            listed = store.snapshots()
            for torn in listed.torn:
                store.free(torn.snapshot)
            for snapshot in listed.sealed:
                is_wanted = snapshot in kept or (snapshot.kind == LOG and snapshot.iteration in logged)
                if not (is_wanted and _is_of(store, snapshot, timeline)):
                    store.free(snapshot)
            for reader in arrived:
                _land(reader, store)

    def journal_log(self, iteration: int, scalars: Mapping[str, Json], timeline: Lineage) -> None:
        """Let this rank's log of an iteration say how that came out, if it was sealed before the rank knew it.

        Else nobody may know it any more once parked state is freed, and then nothing is replayed alone past it.

        Args:
            iteration: The iteration.
            scalars: What the log's manifest will say in addition.
            timeline: In whose past the log has to lie.
        """
        store, snapshot = self._standby, SnapshotId(iteration, self._transport.rank, LOG)
        if store is None or not _is_of(store, snapshot, timeline):
            return
        with self._logged(f"the {snapshot} cannot be completed"):
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
    def _logged(self, what: str) -> Iterator[None]:
        """What a store refuses costs protection, and is logged."""
        try:
            yield
        except (StoreFailure, UnreadableCheckpoint, UsageError) as error:
            log.error("rank %d: %s: %s", self._transport.rank, what, error)


def _land(reader: HostBuffer, store: MappedStore) -> None:
    """Move a snapshot that arrived in ordinary memory into a store. Raises StoreFailure, UsageError."""
    manifest = reader.manifest
    with store.reserve(manifest.snapshot, manifest.layout) as writer:
        for field in manifest.layout.fields:
            writer.put(field.key, reader.read(field.key))
        writer.seal(manifest.facts, manifest.checksums)


def _is_of(store: MappedStore, snapshot: SnapshotId, timeline: Lineage) -> bool:
    """Whether a snapshot is there and lies in the past of `timeline`."""
    try:
        with store.open(snapshot) as reader:
            led = msgspec.convert(reader.manifest.facts.scalars["timeline"], Lineage)
    except (UnreadableCheckpoint, KeyError, msgspec.ValidationError):
        return False
    return is_past(led, snapshot.iteration, timeline)


def whole_windows(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of windows of which an iteration is there for each one of the span; others are as good as lost."""
    there: dict[tuple[str, range], set[int]] = {}
    for piece in pieces:
        there.setdefault((piece.kind, piece.span), set()).add(piece.plan.iteration)
    return (piece for piece in pieces if piece.kind == CONSTANT or there[piece.kind, piece.span].issuperset(piece.span))


def by_window(pieces: Sequence[Piece]) -> tuple[tuple[SnapshotPlan, ...], ...]:
    """One plan per iteration from its pieces, those of one window together, in order."""
    merged: dict[tuple[int, int], dict[int, dict[OperatorId, Part]]] = {}
    for piece in pieces:
        window = merged.setdefault((piece.span.stop, piece.span.start), {})
        window.setdefault(piece.plan.iteration, {}).update(piece.plan.parts)
    return tuple(
        tuple(SnapshotPlan(iteration, parts) for iteration, parts in sorted(plans.items()))
        for _, plans in sorted(merged.items())
    )
