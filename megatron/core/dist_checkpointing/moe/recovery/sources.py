"""What a plan takes of what was found: the snapshots that each rank needs, and what one rank knows for all.

A plan names copies by tier and node; here each becomes a `SnapshotRequest`: which entry of which rank, for which rank,
and which part of it, in the same order on all ranks.

Most ranks restore snapshots that have neither the state of the strategy at the target nor how iterations came out:
pieces of a window but the first, parked state of a rank that missed the step, nothing at all where a node was replaced.
So for each fact one snapshot is chosen, on all ranks alike, its finder reads the manifest, and all gather what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error
from ..policy.rollback import feeds, ranks_of
from ..ports import Json, Reader, SnapshotId, StoreFailure, Transport
from ..types import (
    GRADIENTS,
    LOG,
    Copy,
    Direction,
    Inventory,
    OperatorId,
    Part,
    RecoveryPlan,
    ReplaySegment,
    StepJournal,
    Tier,
    Topology,
)
from .inventory import Catalogue, CopyLocation, SnapshotEntry


@dataclass(frozen=True)
class SnapshotRequest:
    """One stored snapshot of which a rank wants something, and where it was found.

    Attributes:
        rank: Which wants it.
        found: The snapshot.
        parts: The operators that are wanted of it, by part.
        feeds: For a boundary log, the directions that it serves to the rank.
    """

    rank: int
    found: SnapshotEntry
    parts: tuple[tuple[Part, frozenset[OperatorId]], ...] = ()
    feeds: tuple[Direction, ...] = ()

    @property
    def travels(self) -> bool:
        """Whether another process has it in its memory and must send it."""
        return self.found.tier is not Tier.PERSISTENT and self.found.finder != self.rank


def needs(plan: RecoveryPlan, inventory: Inventory, catalogue: Catalogue) -> tuple[SnapshotRequest, ...]:
    """What each rank needs of state to carry out the plan, in the same order on all ranks.

    Args:
        plan: What is carried out.
        inventory: The copies that it was made from.
        catalogue: The finds behind these copies.
    """
    wanted: dict[tuple[int, CopyLocation], dict[Part, set[OperatorId]]] = {}
    at: dict[CopyLocation, SnapshotEntry] = {}
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
        SnapshotRequest(rank, at[place], tuple((part, frozenset(held)) for part, held in parts.items()))
        for (rank, place), parts in sorted(wanted.items(), key=itemgetter(0))
    )


def with_trainer_states(
    needed: Sequence[SnapshotRequest], plan: RecoveryPlan, catalogue: Catalogue, topology: Topology
) -> tuple[SnapshotRequest, ...]:
    """What is needed, and for each replayed iteration a snapshot with a journal of each rank that replays it.

    A rank whose operators were all anchored before has no records in later snapshots of a window, but random states.
    Where they would have to travel for that alone, and a log has the journal, the replay's own will do.

    Args:
        needed: What `needs` gave.
        plan: What is carried out.
        catalogue: What all ranks found.
        topology: Of the job.
    """
    known = {(need.rank, need.found.snapshot.iteration) for need in needed if need.found.has_journal}
    more = [
        SnapshotRequest(rank, found[0])
        for segment in plan.segments
        for iteration in segment.replayed
        for rank in ranks_of(segment, topology)
        if (rank, iteration) not in known and (found := catalogue.trainer_sources(rank, iteration))
    ]
    logs = (found for found in catalogue.found if found.snapshot.kind == LOG and found.has_journal and not found.why)
    logged = {log.snapshot.iteration for log in logs}
    return (*needed, *(need for need in more if not (need.travels and need.found.snapshot.iteration in logged)))


def logs_and_gradients(plan: RecoveryPlan, catalogue: Catalogue, topology: Topology) -> tuple[SnapshotRequest, ...]:
    """The logs that feed each segment, and gradients that were kept: what each rank needs besides state.

    Args:
        plan: What is carried out.
        catalogue: What all ranks found.
        topology: Of the job.
    """
    wanted: dict[tuple[int, CopyLocation], list[Direction]] = {}
    at: dict[CopyLocation, SnapshotEntry] = {}
    for segment in plan.segments:
        for iteration in segment.replayed:
            for rank, sender, way in feeds(segment, topology):
                found = catalogue.of_kind(LOG, sender, iteration, rank)[0]
                at[found.place] = found
                wanted.setdefault((rank, found.place), []).append(way)
    logs = [
        SnapshotRequest(rank, at[place], feeds=tuple(ways))
        for (rank, place), ways in sorted(wanted.items(), key=itemgetter(0))
    ]
    kept = [
        SnapshotRequest(rank, catalogue.of_kind(GRADIENTS, rank, plan.target, rank)[0]) for rank in plan.roll_forward
    ]
    return (*logs, *kept)


def comparable_iterations(segment: ReplaySegment, catalogue: Catalogue, topology: Topology) -> frozenset[int]:
    """Replayed iterations of which all logs that feed a segment say what their owners received of it.

    Args:
        segment: The stages that replay together, and the iterations.
        catalogue: What all ranks found.
        topology: Of the job.
    """
    senders = {sender for _, sender, _ in feeds(segment, topology)}
    logs = (found for found in catalogue.found if found.snapshot.kind == LOG and not found.why)
    known = {(log.snapshot.rank, log.snapshot.iteration) for log in logs if log.has_fingerprints}
    return frozenset(at for at in segment.replayed if all((sender, at) in known for sender in senders))


def _copies(inventory: Inventory, rank: int, iteration: int, tier: Tier, holder: int | None) -> Iterator[Copy]:
    seen = set()
    for copy in inventory.copies.get(rank, ()):
        here = (copy.plan.iteration, copy.tier, copy.holder) == (iteration, tier, holder)
        # Of two such copies of one plan on a node only one may be damaged.
        if here and copy.sealed and (id(copy.plan), copy.corrupt) not in seen:
            seen.add((id(copy.plan), copy.corrupt))
            yield copy


class RefusedCopies(MoECheckpointError):
    """A plan cannot be carried out because of these snapshots, with the reason for each."""

    def __init__(self, refused: Mapping[CopyLocation, str]) -> None:
        super().__init__("; ".join(refused.values()))
        self.refused = dict(refused)


class _RefusedRow(msgspec.Struct, array_like=True):
    finder: int
    snapshot: SnapshotId
    tier: Tier
    why: str


def gather_refused(transport: Transport, refused: Mapping[CopyLocation, str]) -> dict[CopyLocation, str]:
    """What any rank refuses, the same on all ranks; a collective.

    Args:
        transport: To all ranks.
        refused: Copies that this rank refuses, and why.

    Raises:
        PeerLost: A rank did not answer.
    """
    own = [_RefusedRow(finder, snapshot, tier, why) for (finder, snapshot, tier), why in refused.items()]
    gathered = msgspec.convert(transport.gather(msgspec.to_builtins(own)), list[list[_RefusedRow]])
    return {(row.finder, row.snapshot, row.tier): row.why for rows in gathered for row in rows}


@dataclass(frozen=True)
class StepOutcome:
    """How an iteration came out, and the trainer scalars of one rank after it."""

    journal: StepJournal
    trainer: Mapping[str, Json] = field(repr=False)


class _Known(msgspec.Struct):
    """What one rank tells all others; outcomes as iteration, journal, and trainer scalars."""

    strategy: Any = None
    outcomes: list[tuple[int, dict[str, Any], dict[str, Any]]] = []


@dataclass(frozen=True)
class GatheredMetadata:
    """The same on all ranks.

    Attributes:
        strategy: Its state at the target, None if no snapshot has it.
        strategy_from: The snapshot that it is from.
        outcomes: Of replayed iterations and of the target, as far as any snapshot has them.
    """

    strategy: Any = field(default=None, repr=False)
    strategy_from: CopyLocation | None = None
    outcomes: Mapping[int, StepOutcome] = field(default_factory=dict, repr=False)


def gather_metadata(
    plan: RecoveryPlan,
    catalogue: Catalogue,
    topology: Topology,
    transport: Transport,
    open_: Callable[[SnapshotEntry], Reader],
) -> GatheredMetadata:
    """Read it where it is and gather it; a collective over all ranks.

    Args:
        plan: Has the target, and the replayed iterations.
        catalogue: Of intact finds.
        topology: Of the job.
        transport: To all ranks.
        open_: Opens what this rank found.

    Raises:
        RefusedCopies: On all ranks alike: snapshots that should have it cannot be read.
        PeerLost: A rank did not answer.
    """
    last = topology.stage_ranks(topology.pp - 1)
    wanted = {plan.target} | {iteration for segment in plan.segments for iteration in segment.replayed}
    # Only the last stage knows the loss, by which its replay is checked.
    journals = [found for iteration in wanted for found in catalogue.journal_sources(iteration, last)[:1]]
    strategies = catalogue.strategy_sources(plan.target)[:1]
    own, refused = _Known(), dict[CopyLocation, str]()
    for found in dict.fromkeys((*strategies, *journals)):
        if found.finder == transport.rank:
            try:
                with open_(found) as reader:
                    _read(reader.manifest.facts.scalars, found, own, found in strategies, found in journals)
            except (UnreadableCheckpoint, StoreFailure, KeyError, TypeError) as error:
                refused[found.place] = format_error(error)
    if all_refused := gather_refused(transport, refused):
        raise RefusedCopies(all_refused)
    # As text: losses may be infinite or no number, which values that are gathered must not be.
    texts = transport.gather(json.dumps(msgspec.to_builtins(own)))
    known = [msgspec.convert(json.loads(str(text)), _Known) for text in texts]
    return GatheredMetadata(
        next((each.strategy for each in known if each.strategy is not None), None),
        next((found.place for found in strategies), None),
        {
            iteration: StepOutcome(StepJournal.from_data(journal), trainer)
            for each in known
            for iteration, journal, trainer in each.outcomes
        },
    )


def _read(scalars: Mapping[str, Any], found: SnapshotEntry, known: _Known, is_strategy: bool, is_journal: bool) -> None:
    """Raises KeyError, TypeError where the scalars lack something."""
    if is_strategy:
        known.strategy = scalars["strategy"]
    if is_journal:
        StepJournal.from_data(scalars["journal"])
        known.outcomes.append((found.snapshot.iteration, scalars["journal"], scalars["trainer"]))
