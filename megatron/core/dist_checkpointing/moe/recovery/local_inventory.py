"""What lies in the stores of one rank: listed and gathered for a plan; given up or kept once that is carried out."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import filterfalse
from operator import attrgetter, or_
from typing import NamedTuple

import msgspec

from ..errors import UnreadableCheckpoint, UsageError
from ..policy.availability import OperatorOrder
from ..policy.lineage import Identity, Lineage
from ..ports import Json, MappedStore, OlderMemory, ReadableStore, SnapshotId, Store, StoreFailure, Transport
from ..replication.agreement import exchanged, merged
from ..storage.base import HostBuffer
from ..strategies import Job, Piece
from ..types import CONSTANT, LOG, OperatorId, Part, SnapshotPlan, Tier, Topology
from .exactness import Divergence
from .findings import Judge, Overview, overview, packed, unpacked
from .inventory import Catalogue, InventoryRow, JudgedRow, SentRows, catalogue, is_past, listing, operator_of

log = logging.getLogger(__name__)

_STRAY = "it lies where no process of this start looks: nodes had more processes"


@dataclass(frozen=True)
class Findings:
    """What one rank knows of what all have found.

    Attributes:
        judge: Says what may be used.
        own: What this rank itself found.
        catalogue: What all found of its own state.
    """

    judge: Judge
    own: tuple[JudgedRow, ...]
    catalogue: Catalogue


class CommonPieces(NamedTuple):
    """What all ranks have that own a part of it, and what this rank has that others lack.

    memory: Pieces that lie in memory; of windows only whole ones. persisted: The same in storage. torn: By iteration
    the kinds of pieces of this rank in storage that are not whole there; none where any rank cannot tell.
    """

    memory: tuple[Piece, ...]
    persisted: tuple[Piece, ...]
    torn: Mapping[int, frozenset[str]]


class LocalInventory:
    """The stores of one rank; `gather` and `common` are collectives over all ranks.

    Args:
        memory: Of snapshots.
        persistent: Storage, if the job has any.
        transport: To all ranks.
        identity: Of the job's snapshots.
        standby: Of parked state, boundary logs and kept gradients, if this job has such a store.
        older: What other layouts left in memory: that is neither listed nor freed here.
    """

    def __init__(
        self,
        memory: MappedStore,
        persistent: Store | None,
        transport: Transport,
        identity: Identity,
        *,
        standby: MappedStore | None = None,
        older: OlderMemory = OlderMemory(),  # noqa: B008  without state
    ) -> None:
        self._memory, self._persistent, self._transport = memory, persistent, transport
        self._identity, self._standby, self._older = identity, standby, older

    def gather(self, job: Job, notes: Iterable[Divergence] = ()) -> Findings:
        """What all ranks find, as far as this one has to know it; a collective.

        Args:
            job: Of all ranks.
            notes: Replays that diverged before.

        Raises:
            StoreFailure: On all ranks when one cannot list what it has. A store that cannot be read now is not an empty
                one: continuing as if it were would give up what lies in it.
        """
        rank, topology = self._transport.rank, job.topology
        rows, older, problem = list[InventoryRow](), list[Lineage](), None
        try:
            rows, older = self.rows(), [*self._older.timelines()]
        except StoreFailure as error:
            problem = rank, str(error)
        seen = msgspec.structs.replace(overview(rows, notes, older), problem=problem)
        judge = Judge(merged(self._transport, seen, Overview, or_), self._identity.job, job.config.takes_over)
        if (failed := judge.overview.problem) is not None:
            raise StoreFailure(f"rank {failed[0]}: {failed[1]}")
        own = tuple(map(judge.judged, rows))
        sent = {to: SentRows.of(held) for to, held in _addressed(own, topology).items()}
        nodes = topology.nodes or tuple(map(topology.node, range(topology.world_size)))
        required = {rank: frozenset(self._identity.operators)}
        return Findings(judge, own, catalogue(exchanged(self._transport, sent, SentRows), required, nodes))

    def common(self, timeline: Lineage, newest: int, order: OperatorOrder) -> CommonPieces:
        """The pieces of which every rank that owns a part has it; a collective.

        Of a window, all of its pieces or none: a part of one restores nothing.

        Args:
            timeline: In whose past they lie.
            newest: The last iteration that counts.
            order: The numbers of all operators.

        Raises:
            StoreFailure: On all ranks when one cannot list its memory.
        """
        found, failed = list[InventoryRow](), set[Tier]()
        for tier, store in ((Tier.OWN_MEMORY, self._memory), (Tier.PERSISTENT, self._persistent)):
            try:
                found += self._rows(store, tier) if store is not None else ()
            except StoreFailure as error:
                log.error("rank %d: %s", self._transport.rank, error)
                failed.add(tier)
        rows = [row for row in found if not row.why and row.snapshot.iteration <= newest]
        rows = [row for row in rows if is_past(row.timeline, row.snapshot.iteration, timeline)]
        pieces = shared_pieces(self._transport, rows, failed, self._identity.operators, order)
        memory, persisted = (tuple(whole_windows(pieces.get(tier, ()))) for tier in (Tier.OWN_MEMORY, Tier.PERSISTENT))
        torn = dict[int, frozenset[str]]()
        for row in rows if Tier.PERSISTENT in pieces else ():
            iteration, kind = row.snapshot.iteration, row.snapshot.kind
            if row.tier is Tier.PERSISTENT and kind != CONSTANT:
                torn[iteration] = torn.get(iteration, frozenset()) | {kind}
        whole = {piece.plan.iteration for piece in persisted}
        return CommonPieces(memory, persisted, {at: kinds for at, kinds in torn.items() if at not in whole})

    def rows(self) -> list[InventoryRow]:
        """All of this rank's memory, whoever owns it, and what it owns in storage. Raises StoreFailure."""
        rows: list[InventoryRow] = []
        try:
            for memory in filter(None, (self._memory, self._standby)):
                identity = self._identity
                listed = listing(memory, Tier.OWN_MEMORY, identity.topology, identity.strategy, job=identity.job)
                rows += (row for row in listed if memory is self._standby or not self._older.is_spared(row.snapshot))
            for stray in self._older.strays():
                rows += self._stray_rows(stray)
            if self._persistent is not None:
                rows += self._rows(self._persistent, Tier.PERSISTENT)
        except StoreFailure as error:
            raise StoreFailure(f"what earlier attempts left cannot be listed: {error}") from error
        return rows

    def _stray_rows(self, slot: ReadableStore) -> list[InventoryRow]:
        """The end of the oldest window of this layout, of which other processes most likely have their shares, too:
        ranks are spread over nodes otherwise than before, so nobody reads it, and it would be freed. Raises
        StoreFailure."""
        identity = self._identity
        listed = listing(slot, Tier.OWN_MEMORY, identity.topology, identity.strategy, job=identity.job)
        usable = [row for row in listed if not row.why and row.snapshot.kind not in (CONSTANT, LOG)]
        ends = [row for row in usable if row.window is None or row.window[1] == row.snapshot.iteration]
        oldest = sorted(ends, key=lambda row: row.snapshot.iteration)[:1]
        return [msgspec.structs.replace(row, why=_STRAY, is_foreign=True) for row in oldest]

    def _rows(self, store: Store, tier: Tier) -> list[InventoryRow]:
        """What this rank owns, of any job. Raises StoreFailure."""
        identity, rank = self._identity, self._transport.rank
        return listing(store, tier, identity.topology, identity.strategy, owner=rank, is_older=self._older.is_shown)

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
                if snapshot.iteration not in needed and not self._older.is_spared(snapshot):
                    self._memory.free(snapshot)
            for reader in arrived:
                _land(reader, self._memory)

    def collect_garbage(self, kept: Collection[tuple[int, str]], owners: Collection[int]) -> None:
        """Free all in memory but some pieces, and what is torn; not what a later version wrote.

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
            for torn in filterfalse(attrgetter("is_newer"), listed.torn):
                self._memory.free(torn.snapshot)
            for snapshot in filterfalse(self._older.is_spared, listed.sealed):
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
            for torn in filterfalse(attrgetter("is_newer"), listed.torn):
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


def _addressed(rows: Iterable[JudgedRow], topology: Topology) -> dict[int, list[JudgedRow]]:
    """For each rank the rows of its own state, and of logs that may feed it: of ranks in the stages beside its own."""
    sent: dict[int, list[JudgedRow]] = {}
    for row in rows:
        owner, ranks = row.snapshot.rank, topology.ranks_per_stage
        readers = {owner}
        if row.snapshot.kind == LOG:
            beside = {owner - ranks, owner + ranks}
            # With virtual stages the last stage is beside the first one.
            readers |= {one % topology.world_size for one in beside} if topology.vpp > 1 else beside
        for to in readers:
            if 0 <= to < topology.world_size:
                sent.setdefault(to, []).append(row)
    return sent


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


# Pieces of snapshots that all ranks have which own a part of them: structs whose `|` merges what groups of ranks have.


class _Key(NamedTuple):
    """Tier, iteration, kind, and the digest of the plan that all ranks followed."""

    tier: Tier
    iteration: int
    kind: str
    digest: str


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What ranks hold of a piece: how many they are, of which window it is, and by part the operators."""

    holders: int
    first: int
    last: int
    has_strategy: bool
    parts: dict[int, bytes]

    def __or__(self, other: _Share) -> _Share:
        theirs = {part: unpacked(bits) for part, bits in other.parts.items()}
        overruled = 0
        for bits in theirs.values():
            overruled |= bits
        for part, own in self.parts.items():
            theirs[part] = theirs.get(part, 0) | (unpacked(own) & ~overruled)
        parts = {part: packed(bits) for part, bits in theirs.items() if bits}
        has_strategy = self.has_strategy or other.has_strategy
        return _Share(self.holders + other.holders, other.first, other.last, has_strategy, parts)

    def plan(self, iteration: int, order: OperatorOrder) -> SnapshotPlan:
        """What they hold together.

        Args:
            iteration: Of the piece.
            order: The numbers of all operators.
        """
        parts: dict[OperatorId, Part] = {}
        for part, bits in self.parts.items():
            parts.update(dict.fromkeys(order.listed(unpacked(bits)), Part(part)))
        return SnapshotPlan(iteration, parts)


class _Shares(msgspec.Struct, frozen=True, array_like=True):
    """What ranks hold of all pieces, and tiers of which some rank cannot tell."""

    shares: list[tuple[_Key, _Share]]
    failed: frozenset[Tier]

    def __or__(self, other: _Shares) -> _Shares:
        shares = dict(self.shares)
        for key, share in other.shares:
            shares[key] = shares[key] | share if key in shares else share
        return _Shares(list(shares.items()), self.failed | other.failed)


def shared_pieces(
    transport: Transport,
    rows: Iterable[InventoryRow],
    failed: Collection[Tier],
    operators: Collection[OperatorId],
    order: OperatorOrder,
) -> dict[Tier, list[Piece]]:
    """By tier the pieces that lie on all ranks, or on all that own a part of them, by iteration; a collective.

    Without a tier of which any rank cannot tell.

    Args:
        transport: To all ranks.
        rows: Pieces that this rank has.
        failed: Tiers of which it cannot tell.
        operators: Its own.
        order: The numbers of all operators.
    """
    own: dict[_Key, _Share] = {}
    for row in rows:
        parts: dict[int, list[OperatorId]] = {}
        for held in row.operators:
            parts.setdefault(held.part, []).append(operator_of(held[:3]))
        first, last = row.window or (row.snapshot.iteration, row.snapshot.iteration)
        bits = {part: packed(order.bits(listed)) for part, listed in parts.items()}
        key = _Key(row.tier, row.snapshot.iteration, row.snapshot.kind, row.digest)
        own[key] = _Share(1, first, last, row.has_strategy, bits)
    all_ = merged(transport, _Shares(list(own.items()), frozenset(failed)), _Shares, or_)
    if Tier.OWN_MEMORY in all_.failed:
        raise StoreFailure("a rank, whose log says why, cannot list its memory: all copies in memory would be freed")
    shares = {key: share for key, share in sorted(all_.shares) if key.tier not in all_.failed}
    # Owners are known once all operators of a piece are. All ranks have the piece with the trainer's state.
    mine, partial = order.bits(operators), []
    for key, share in shares.items():
        if share.holders < transport.world_size and key not in own:
            partial += [key] if any(unpacked(bits) & mine for bits in share.parts.values()) else []
    lacking = merged(transport, frozenset(partial), frozenset[_Key], or_)
    found = {tier: list[Piece]() for tier in (Tier.OWN_MEMORY, Tier.PERSISTENT) if tier not in all_.failed}
    for key, share in shares.items():
        is_everywhere = share.holders == transport.world_size
        if not is_everywhere and (share.has_strategy or key in lacking):
            continue
        plan = share.plan(key.iteration, order)
        # Only where owners are missing can operators be: of thousands a digest takes longer than all else here.
        if is_everywhere or plan.digest() == key.digest:
            piece = Piece(key.kind, plan, range(share.first, share.last + 1))
            found[key.tier].append(piece)
    return found
