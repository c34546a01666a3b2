"""What a rank takes of what was found for a plan: snapshots, what one rank knows for all, and what it kept itself.

A plan names copies by tier and node; here each becomes a `SnapshotRequest`: which entry of which rank, and what part of
it. Who has it is asked for it (`requested`), so that both sides know what travels, in the same order.

Most ranks restore snapshots that have neither the state of the strategy at the target nor how iterations came out:
pieces of a window but the first, parked state of a rank that missed the step, nothing at all where a node was replaced.
So for each fact one snapshot is chosen, on all ranks alike, its finder reads the manifest, and all learn what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, or_
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error
from ..policy.availability import OperatorOrder
from ..policy.lineage import Lineage
from ..policy.rollback import feeds
from ..ports import Json, Reader, SnapshotId, StoreFailure, Transport
from ..replication.agreement import exchanged, merged
from ..types import (
    GRADIENTS,
    LOG,
    PARKED,
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
from .exactness import ComparedIterations
from .findings import Digest, Summary
from .inventory import Catalogue, CopyLocation, SnapshotEntry, is_past, timeline_of


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
    """What the ranks of a plan's sources need of state to carry it out, by rank.

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
    needed: Sequence[SnapshotRequest],
    plan: RecoveryPlan,
    catalogue: Catalogue,
    topology: Topology,
    logged: Collection[int],
) -> tuple[SnapshotRequest, ...]:
    """What is needed, and for each replayed iteration a snapshot with a journal of each rank that replays it.

    A rank whose operators were all anchored before has no records in later snapshots of a window, but random states.
    Where they would have to travel for that alone, and a log has the journal, the replay's own will do.

    Args:
        needed: What `needs` gave.
        plan: What is carried out.
        catalogue: What was found of the ranks that it is for.
        topology: Of the job.
        logged: Iterations of which any log has the journal.
    """
    known = {(need.rank, need.found.snapshot.iteration) for need in needed if need.found.has_journal}
    more = [
        SnapshotRequest(rank, found[0])
        for segment in plan.segments
        for iteration in segment.replayed
        for rank in catalogue.required
        if topology.stage(rank) in segment.stages
        if (rank, iteration) not in known and (found := catalogue.trainer_sources(rank, iteration))
    ]
    return (*needed, *(need for need in more if not (need.travels and need.found.snapshot.iteration in logged)))


def logs_and_gradients(plan: RecoveryPlan, catalogue: Catalogue, topology: Topology) -> tuple[SnapshotRequest, ...]:
    """The logs that feed each segment, and gradients that were kept: what ranks need besides state.

    Args:
        plan: What is carried out.
        catalogue: What was found of the ranks that it is for, and logs of those beside them.
        topology: Of the job.
    """
    wanted: dict[tuple[int, CopyLocation], list[Direction]] = {}
    at: dict[CopyLocation, SnapshotEntry] = {}
    for segment in plan.segments:
        for rank in catalogue.required:
            for sender, way in feeds(segment, rank, topology) if segment.replayed else ():
                for iteration in segment.replayed:
                    found = catalogue.of_kind(LOG, sender, iteration, rank)[0]
                    at[found.place] = found
                    wanted.setdefault((rank, found.place), []).append(way)
    logs = [
        SnapshotRequest(rank, at[place], feeds=tuple(ways))
        for (rank, place), ways in sorted(wanted.items(), key=itemgetter(0))
    ]
    rolling = [rank for rank in catalogue.required if rank in plan.roll_forward]
    kept = [SnapshotRequest(rank, catalogue.of_kind(GRADIENTS, rank, plan.target, rank)[0]) for rank in rolling]
    return (*logs, *kept)


def comparable_iterations(segment: ReplaySegment, shared: Digest) -> frozenset[int]:
    """Replayed iterations of which all logs that feed a segment say what their owners received of it.

    Args:
        segment: The stages that replay together, and the iterations.
        shared: What all ranks found.
    """
    known = (shared.stages[stage].compared for stage in segment.logs_from)
    return frozenset(segment.replayed).intersection(*known)


class _Request(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A snapshot that a rank wants to be sent; in the order in which all ranks send and receive."""

    phase: int
    rank: int
    number: int
    owner: int
    iteration: int
    kind: str


@dataclass(frozen=True)
class Travels:
    """A snapshot that goes from one rank's memory to another: here it is sent, or received as `need`."""

    to: int
    snapshot: SnapshotId
    need: SnapshotRequest | None = None


def requested(phases: Sequence[Sequence[SnapshotRequest]], transport: Transport) -> list[Travels]:
    """All that travels from or to this rank, in an order that is the same wherever two of them meet; a collective.

    Args:
        phases: What this rank needs; all of an earlier phase travels before all of a later one.
        transport: To all ranks.

    Raises:
        PeerLost: A rank did not answer.
    """
    asked: dict[int, list[_Request]] = {}
    steps: list[tuple[_Request, Travels]] = []
    for phase, needed in enumerate(phases):
        for number, need in enumerate(needed):
            if need.travels:
                snapshot = need.found.snapshot
                request = _Request(phase, need.rank, number, snapshot.rank, snapshot.iteration, snapshot.kind)
                asked.setdefault(need.found.finder, []).append(request)
                steps.append((request, Travels(need.rank, snapshot, need)))
    for rank, requests in exchanged(transport, asked, list[_Request]):
        steps += ((one, Travels(rank, SnapshotId(one.iteration, one.owner, one.kind))) for one in requests)
    return [travels for _, travels in sorted(steps, key=itemgetter(0))]


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


_Refused = tuple[int, int, int, str, int, str]
"""The finder of a copy that a rank refuses, iteration, owner and kind of the snapshot, the tier, and why."""


def gather_refused(transport: Transport, refused: Mapping[CopyLocation, str]) -> dict[CopyLocation, str]:
    """What any rank refuses, the same on all ranks; a collective.

    Args:
        transport: To all ranks.
        refused: Copies that this rank refuses, and why.

    Raises:
        PeerLost: A rank did not answer.
    """
    return _from_rows(merged(transport, _rows(refused), list[_Refused], lambda one, other: [*one, *other]))


def _rows(refused: Mapping[CopyLocation, str]) -> list[_Refused]:
    return [(finder, at.iteration, at.rank, at.kind, tier.value, why) for (finder, at, tier), why in refused.items()]


def _from_rows(rows: Iterable[_Refused]) -> dict[CopyLocation, str]:
    return {
        (finder, SnapshotId(iteration, owner, kind), Tier(tier)): why
        for finder, iteration, owner, kind, tier, why in rows
    }


@dataclass(frozen=True)
class StepOutcome:
    """How an iteration came out, and the trainer scalars of one rank after it."""

    journal: StepJournal
    trainer: Mapping[str, Json] = field(repr=False)


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """What ranks tell all others; the state of the strategy, and by iteration journal and trainer scalars, as JSON:
    it has integers of any size, and losses that are no number."""

    refused: list[_Refused]
    strategy: str
    outcomes: list[tuple[int, str]]
    summary: Summary

    def __or__(self, other: _Known) -> _Known:
        strategy, outcomes = self.strategy or other.strategy, [*self.outcomes, *other.outcomes]
        return _Known([*self.refused, *other.refused], strategy, outcomes, self.summary | other.summary)


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
    shared: Digest,
    order: OperatorOrder,
    transport: Transport,
    open_: Callable[[SnapshotId, Tier], Reader],
    timeline: Lineage,
) -> tuple[RecoveryPlan, GatheredMetadata]:
    """Read it where it is and tell it; a collective over all ranks.

    Args:
        plan: Has the target, the replayed iterations, and what this rank takes.
        shared: Who tells what.
        order: The numbers of all operators.
        transport: To all ranks.
        open_: Opens what this rank found.
        timeline: In whose past all of it lies.

    Returns:
        The plan with what all ranks take, and what was read.

    Raises:
        RefusedCopies: On all ranks alike: snapshots that should have it cannot be read.
        PeerLost: A rank did not answer.
    """
    wanted = {plan.target} | {iteration for segment in plan.segments for iteration in segment.replayed}
    journals = [place for iteration in wanted if (place := shared.journal(iteration)) is not None]
    strategy_from = shared.strategy(plan.target)
    strategy, outcomes = "", list[tuple[int, str]]()
    refused: dict[CopyLocation, str] = {}
    for place in dict.fromkeys((strategy_from, *journals)):
        if place is None or place[0] != transport.rank:
            continue
        _, snapshot, tier = place
        try:
            with open_(snapshot, tier) as reader:
                scalars: Mapping[str, Any] = reader.manifest.facts.scalars
                if not is_past(timeline_of(reader.manifest), snapshot.iteration, timeline):
                    raise UnreadableCheckpoint(
                        f"the {snapshot} was replaced by that of another attempt since it was listed"
                    )
                if place == strategy_from:
                    strategy = json.dumps(scalars["strategy"])
                if place in journals:
                    StepJournal.from_data(scalars["journal"])
                    outcomes.append((snapshot.iteration, json.dumps([scalars["journal"], scalars["trainer"]])))
        except (UnreadableCheckpoint, StoreFailure, KeyError, TypeError) as error:
            refused[place] = format_error(error)
    own = _Known(_rows(refused), strategy, outcomes, Summary.of(plan, order))
    known = merged(transport, own, _Known, or_)
    if known.refused:
        raise RefusedCopies(_from_rows(known.refused))
    read = {iteration: json.loads(text) for iteration, text in known.outcomes}
    metadata = GatheredMetadata(
        json.loads(known.strategy) if known.strategy else None,
        strategy_from,
        {at: StepOutcome(StepJournal.from_data(journal), trainer) for at, (journal, trainer) in read.items()},
    )
    return known.summary.added_to(plan, order), metadata


# The state that a process kept through the loss of others: parked, and still in its tensors as it was parked.
#
# Whoever recovers from that very snapshot has nothing to copy back. Or the state is that between two iterations of a
# replay, which continues from there where the next plan has the same replay (MoEvement App. A). It is noted where a
# process stays in its slot, and taken by the next session in it, which is the first that may change the state.


@dataclass(frozen=True)
class KeptReplay:
    """A replay that a fault of other stages has interrupted between two iterations, on all its ranks at the same one.

    Args:
        segment: What is run again, by which stages, and what is frozen meanwhile.
        timeline: Of the snapshots that it was begun from.
        iteration: The last one that was run again, and the state after it loaded.
        scalars: What the trainer has beside operators.
        tensors: Its random states.
        compared: As of `Replay`.
    """

    segment: ReplaySegment
    timeline: Lineage
    iteration: int
    scalars: Mapping[str, Json]
    tensors: Mapping[str, bytes]
    compared: ComparedIterations


@dataclass
class KeptState:
    """Which snapshot live tensors equal; none once something else was restored.

    Args:
        iteration: After which they are the state; None: of nothing that is known.
        timeline: What the manifest of the parked snapshot says of the attempts before it.
        replay: How far a replay has brought them, in place of a snapshot.
    """

    iteration: int | None = None
    timeline: Json = None
    replay: KeptReplay | None = None

    def is_that_of(self, readers: Iterable[Reader]) -> bool:
        """Whether all of these snapshots of this rank, and there are some, are the one that live tensors equal."""
        manifests = [reader.manifest for reader in readers]
        return bool(manifests) and all(
            (one.snapshot.kind, one.snapshot.iteration) == (PARKED, self.iteration)
            and one.facts.scalars.get("timeline") == self.timeline
            for one in manifests
        )

    def forget(self) -> None:
        """Something else is about to be written to them."""
        self.iteration = self.timeline = self.replay = None


_KEPT: WeakKeyDictionary[Any, KeptState] = WeakKeyDictionary()


def keep(optimizer: Any, state: KeptState) -> None:
    """Until the next session takes up this optimizer and its model, nobody changes them.

    Args:
        optimizer: Of the live state.
        state: What it is, with the model.
    """
    _KEPT[optimizer] = state


def take(optimizer: Any) -> KeptState:
    """What was kept, which may be nothing; once."""
    return _KEPT.pop(optimizer, KeptState())
