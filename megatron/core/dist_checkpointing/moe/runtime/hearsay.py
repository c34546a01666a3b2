"""What a rank does not have itself and is told: what the strategy remembered, and how iterations came out elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import UnreadableCheckpoint
from ..ports import Json, Reader, StoreFailure, Transport
from ..recover.inventory import Catalogue, Found, Place
from ..types import RecoveryPlan, StepJournal, Topology


@dataclass(frozen=True)
class Outcomes:
    """How an iteration came out, and the trainer scalars of one rank after it."""

    journal: StepJournal
    trainer: Mapping[str, Json] = field(repr=False)


@dataclass(frozen=True)
class Heard:
    """The same on all ranks.

    strategy: what it remembered at the target, as the lowest rank has it, in `memory`; None if nobody does. outcomes:
    of replayed iterations and of the target, as far as anybody knows. refused: snapshots that
    were to tell it and cannot be read.
    """

    strategy: Any = field(default=None, repr=False)
    memory: Place | None = None
    outcomes: Mapping[int, Outcomes] = field(default_factory=dict, repr=False)
    refused: Mapping[Place, str] = field(default_factory=dict)


def hear(
    plan: RecoveryPlan,
    catalogue: Catalogue,
    topology: Topology,
    transport: Transport,
    open_: Callable[[Found], Reader],
) -> Heard:
    """Ask those who have it; a collective over all ranks. catalogue: of intact finds. Raises PeerLost."""
    last = topology.stage_ranks(topology.pp - 1)
    wanted = {plan.target} | {iteration for segment in plan.segments for iteration in segment.replayed}
    # Only the last stage knows the loss, by which its replay is checked.
    tellers = {iteration: found[0] for iteration in wanted if (found := catalogue.tellers(iteration, last))}
    memories = catalogue.memories(plan.target)[:1]
    mine = [one for one in (*memories, *tellers.values()) if one.finder == transport.rank]
    told, refused = _testimony(mine, {one.place for one in memories}, {one.place for one in tellers.values()}, open_)
    everybody = [
        cast("dict[str, Any]", one) for one in transport.gather({"told": json.dumps(told), "refused": refused})
    ]
    rows = [json.loads(one["told"]) for one in everybody]
    at = {(one.finder, str(one.snapshot), one.tier.value): one.place for one in (*memories, *tellers.values())}
    return Heard(
        next((row["strategy"] for row in rows if row["strategy"] is not None), None),
        next((one.place for one in memories), None),
        {
            iteration: Outcomes(StepJournal.from_data(journal), trainer)
            for row in rows
            for iteration, journal, trainer in row["outcomes"]
        },
        {at[finder, name, tier]: why for one in everybody for finder, name, tier, why in one["refused"]},
    )


def _testimony(
    finds: Collection[Found], memories: Collection[Place], tellers: Collection[Place], open_: Callable[[Found], Reader]
) -> tuple[dict[str, Any], list[Json]]:
    """What this rank has to say, and what it cannot read."""
    told: dict[str, Any] = {"strategy": None, "outcomes": []}
    refused: list[Json] = []
    for place, one in {one.place: one for one in finds}.items():
        try:
            with open_(one) as reader:
                scalars = reader.manifest.facts.scalars
            if place in memories:
                told["strategy"] = scalars["strategy"]
            if place in tellers:
                journal = cast("Mapping[str, Any]", scalars["journal"])
                StepJournal.from_data(journal)
                told["outcomes"].append([one.snapshot.iteration, journal, scalars["trainer"]])
        except (UnreadableCheckpoint, StoreFailure, KeyError, TypeError) as error:
            refused.append([one.finder, str(one.snapshot), one.tier.value, f"{type(error).__name__}: {error}"])
    return told, refused
