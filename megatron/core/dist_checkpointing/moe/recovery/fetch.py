"""Brings stored snapshots to the ranks that a recovery plan gives them to.

A plan names copies by tier and node; here each becomes a `Need`: which find of which rank, for which rank, and what of
it. All ranks make the same list of needs in the same order, so a transfer needs no request: whoever found a snapshot
that another rank needs sends its manifest and bytes, and that rank receives them, verifies every checksum, and refuses
what is damaged. What lies in storage, or in the rank's own memory, is opened in place and does not travel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from ..errors import MoECheckpointError, UnreadableCheckpoint
from ..policy.segments import feeds, ranks_of
from ..ports import MappedReader, PeerLost, Reader, SnapshotId, StoreFailure, Transport
from ..types import GRADIENTS, LOG, Copy, Direction, Inventory, OperatorId, Part, RecoveryPlan, Tier, Topology
from .inventory import Catalogue, CopyLocation, Found

_SIZES = struct.Struct("<qq")


@dataclass(frozen=True)
class Need:
    """One stored snapshot of which `rank` wants parts of operators, and where it was found.

    feeds: for a boundary log, the directions that it serves to the rank.
    """

    rank: int
    found: Found
    parts: tuple[tuple[Part, frozenset[OperatorId]], ...] = ()
    feeds: tuple[Direction, ...] = ()

    @property
    def travels(self) -> bool:
        """Whether another process has it in its memory and must send it."""
        return self.found.tier is not Tier.PERSISTENT and self.found.finder != self.rank


def needs(plan: RecoveryPlan, inventory: Inventory, catalogue: Catalogue) -> tuple[Need, ...]:
    """What each rank needs to carry out the plan, in the same order on all ranks."""
    wanted: dict[tuple[int, CopyLocation], dict[Part, set[OperatorId]]] = {}
    at: dict[CopyLocation, Found] = {}
    for source in plan.sources:
        for copy in _copies(inventory, source.rank, source.iteration, source.tier, source.holder):
            useful = source.operators & copy.plan.giving(source.part) - copy.corrupt
            for found in catalogue.sources_for(copy, useful):
                held = useful & found.plan.giving(source.part)
                if held:
                    at[found.place] = found
                    parts = wanted.setdefault((source.rank, found.place), {})
                    parts.setdefault(source.part, set()).update(held)
    return tuple(
        Need(rank, at[place], tuple((part, frozenset(held)) for part, held in parts.items()))
        for (rank, place), parts in sorted(wanted.items(), key=itemgetter(0))
    )


def with_trainer_states(
    needed: Sequence[Need], plan: RecoveryPlan, catalogue: Catalogue, topology: Topology
) -> tuple[Need, ...]:
    """What is needed, and for each replayed iteration a snapshot with a journal of each rank that replays it.

    A rank whose operators were all anchored before has no records in later snapshots of a window, but random states.
    Where they would have to travel for that alone, and a log has the journal, the replay's own will do.
    """
    known = {(need.rank, need.found.snapshot.iteration) for need in needed if need.found.has_journal}
    more = [
        Need(rank, found[0])
        for segment in plan.segments
        for iteration in segment.replayed
        for rank in ranks_of(segment, topology)
        if (rank, iteration) not in known and (found := catalogue.trainer_sources(rank, iteration))
    ]
    logs = (found for found in catalogue.found if found.snapshot.kind == LOG and found.has_journal and not found.why)
    logged = {log.snapshot.iteration for log in logs}
    return (*needed, *(need for need in more if not (need.travels and need.found.snapshot.iteration in logged)))


def logs_and_gradients(plan: RecoveryPlan, catalogue: Catalogue, topology: Topology) -> tuple[Need, ...]:
    """What is needed besides state: the logs that feed each segment, and gradients that were kept."""
    wanted: dict[tuple[int, CopyLocation], list[Direction]] = {}
    at: dict[CopyLocation, Found] = {}
    for segment in plan.segments:
        for iteration in segment.replayed:
            for rank, sender, way in feeds(segment, topology):
                found = catalogue.of_kind(LOG, sender, iteration, rank)[0]
                at[found.place] = found
                wanted.setdefault((rank, found.place), []).append(way)
    logs = [
        Need(rank, at[place], feeds=tuple(ways)) for (rank, place), ways in sorted(wanted.items(), key=itemgetter(0))
    ]
    kept = [Need(rank, catalogue.of_kind(GRADIENTS, rank, plan.target, rank)[0]) for rank in plan.roll_forward]
    return (*logs, *kept)


def _copies(inventory: Inventory, rank: int, iteration: int, tier: Tier, holder: int | None) -> Iterator[Copy]:
    seen = set()
    for copy in inventory.copies.get(rank, ()):
        here = (copy.plan.iteration, copy.tier, copy.holder) == (iteration, tier, holder)
        # Of two such copies of one plan on a node only one may be damaged.
        if here and copy.sealed and (id(copy.plan), copy.corrupt) not in seen:
            seen.add((id(copy.plan), copy.corrupt))
            yield copy


class Landing(Protocol):
    """Where a snapshot that travels arrives."""

    buffer: memoryview

    def seal(self) -> None:
        """Verify all bytes. Raises UnreadableCheckpoint, StoreFailure."""

    def abandon(self) -> None:
        """Give up."""

    def reader(self) -> Reader:
        """A reader of what was sealed."""


@dataclass(frozen=True)
class Carrier:
    """How snapshots travel: `open` a local one, `encode` its manifest, `land` one that arrives."""

    transport: Transport
    open: Callable[[SnapshotId], MappedReader]
    encode: Callable[[MappedReader], tuple[bytes, memoryview]]
    land: Callable[[int, bytes], Landing]

    def carry(self, needed: Sequence[Need]) -> tuple[dict[CopyLocation, Reader], dict[CopyLocation, str]]:
        """Send and receive all that travels, in the order of `needed`, which is the same on all ranks.

        Returns readers of what arrived here, verified, and the reasons for what did not. Raises PeerLost.
        """
        arrived: dict[CopyLocation, Reader] = {}
        refused: dict[CopyLocation, str] = {}
        for need in needed:
            if not need.travels:
                continue
            if need.found.finder == self.transport.rank:
                self._send(need)
            elif need.rank == self.transport.rank:
                try:
                    arrived[need.found.place] = self._receive(need)
                except (UnreadableCheckpoint, StoreFailure) as error:
                    refused[need.found.place] = str(error)
        return arrived, refused

    def _send(self, need: Need) -> None:
        try:
            reader = self.open(need.found.snapshot)
        except (UnreadableCheckpoint, StoreFailure):
            self.transport.send(need.rank, _SIZES.pack(-1, 0)).wait()
            return
        with reader:
            manifest, raw = self.encode(reader)
            messages = (_SIZES.pack(len(manifest), len(raw)), manifest, raw)
            for transfer in [self.transport.send(need.rank, message) for message in messages]:
                transfer.wait()

    def _receive(self, need: Need) -> Reader:
        source = need.found.finder
        sizes = bytearray(_SIZES.size)
        self.transport.receive(source, memoryview(sizes)).wait()
        manifest_bytes, raw_bytes = _SIZES.unpack(sizes)
        if manifest_bytes < 0:
            raise UnreadableCheckpoint(f"rank {source} could not open the {need.found.snapshot}")
        manifest = _memory(manifest_bytes, source)
        self.transport.receive(source, memoryview(manifest)).wait()
        landing, problem = self._landing(source, bytes(manifest), raw_bytes)
        try:
            self.transport.receive(source, landing.buffer if landing else memoryview(_memory(raw_bytes, source))).wait()
            if landing is None:
                raise UnreadableCheckpoint(problem)
            landing.seal()
        except MoECheckpointError:
            if landing is not None:
                landing.abandon()
            raise
        return landing.reader()

    def _landing(self, source: int, manifest: bytes, raw_bytes: int) -> tuple[Landing | None, str]:
        """A place for what comes; without one the bytes are still taken off the wire."""
        try:
            landing = self.land(source, manifest)
        except (UnreadableCheckpoint, StoreFailure) as error:
            return None, str(error)
        if len(landing.buffer) != raw_bytes:
            landing.abandon()
            return None, f"rank {source} sends {raw_bytes} bytes, but its manifest has {len(landing.buffer)}"
        return landing, ""


def _memory(nbytes: int, source: int) -> bytearray:
    """Raises PeerLost for a size that cannot be meant: whatever comes next on this connection is not understood."""
    try:
        return bytearray(nbytes)
    except (MemoryError, ValueError, OverflowError) as error:
        raise PeerLost(f"rank {source} announced {nbytes} bytes, which cannot be: the connection is bad") from error
