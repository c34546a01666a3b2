"""What a recovery leaves a rank to do, what it has brought in the end, and why copies were refused on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import MoECheckpointError, UnreadableCheckpoint, format_error
from ..policy.lineage import Lineage
from ..policy.tracking import RestoredState
from ..ports import Json, Reader, SnapshotId, StoreFailure, Transport
from ..strategies import Piece
from ..types import RecoveryPlan, SnapshotPlan, StepJournal, Tier, Topology
from .inventory import Catalogue, CopyLocation, Found
from .table import RecoveryTable


@dataclass(frozen=True)
class RecoveryOutcome:
    """A recovery that was carried out: training goes on after `plan.target`, whose snapshot has this timeline.

    Attributes:
        kept: Pieces of snapshots in the memory of all ranks, of windows only whole ones.
        persisted: Snapshots in storage, of all ranks, those of one window together.
        spare: Pieces in the memory of some ranks, by iteration and kind, to be kept until a newer snapshot is
            protected.
    """

    plan: RecoveryPlan
    timeline: Lineage
    kept: tuple[Piece, ...]
    persisted: tuple[tuple[SnapshotPlan, ...], ...]
    spare: frozenset[tuple[int, str]]
    table: RecoveryTable = field(repr=False)

    @property
    def restored(self) -> RestoredState:
        """What protection goes on from."""
        return RestoredState(self.plan.target, self.kept, self.persisted, self.spare)


@dataclass(frozen=True)
class RollForward:
    """What a rank needs to make the step of `iteration` from its parked state of the one before.

    Attributes:
        journal: How the step came out elsewhere.
        gradients: The rank's reduced gradients, verified; open until `Recovery.finish`.
        trainer: The trainer scalars of a rank that made the step.
    """

    iteration: int
    journal: StepJournal
    gradients: Reader = field(repr=False)
    trainer: Mapping[str, Json] = field(repr=False)


@dataclass(frozen=True)
class Waiting:
    """This rank runs no iteration again, and others come to the target on their own: then all call `Recovery.finish`.

    roll: what this rank needs to make one step first, if it is one of those that do; else its state is restored.
    """

    roll: RollForward | None = None


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
    """What any rank refuses, the same on all ranks; a collective. Raises PeerLost."""
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
    plan: RecoveryPlan, catalogue: Catalogue, topology: Topology, transport: Transport, open_: Callable[[Found], Reader]
) -> GatheredMetadata:
    """Read it where it is and gather it; a collective over all ranks.

    Args:
        catalogue: Of intact finds.
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


def _read(scalars: Mapping[str, Any], found: Found, known: _Known, is_strategy: bool, is_journal: bool) -> None:
    """Raises KeyError, TypeError where the scalars lack something."""
    if is_strategy:
        known.strategy = scalars["strategy"]
    if is_journal:
        StepJournal.from_data(scalars["journal"])
        known.outcomes.append((found.snapshot.iteration, scalars["journal"], scalars["trainer"]))
