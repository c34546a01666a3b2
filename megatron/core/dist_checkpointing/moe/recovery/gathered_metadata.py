"""What one rank knows for all: the state of the strategy at the target, and how iterations came out.

Most ranks restore snapshots that have neither: pieces of a window but the first, parked state of a rank that missed the
step, nothing at all where a node was replaced. So for each fact one snapshot is chosen, on all ranks alike, its finder
reads the manifest, and all gather what was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import UnreadableCheckpoint, format_error
from ..ports import Json, Reader, StoreFailure, Transport
from ..types import RecoveryPlan, StepJournal, Topology
from .inventory import Catalogue, CopyLocation, Found
from .outcome import RefusedCopies, gather_refused


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
