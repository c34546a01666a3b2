"""The order of events of a recovery: what was found, what is planned, fetched, restored and reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import MoECheckpointError, RecoveryImpossible, UnreadableCheckpoint
from ..policy.strategies import Job, Piece, Strategy
from ..policy.timelines import Timeline, past
from ..ports import Json, SnapshotId
from ..recover.fetch import needs, witnessed
from ..recover.inventory import Catalogue, Place
from ..recover.table import RecoveryTable
from ..replay.densify import Replay
from ..store.heap import HeapReader
from ..types import Lost, OperatorId, Part, RecoveryPlan, SnapshotPlan, Tier
from .keeper import Identity
from .restoring import Attempt, RecoveryPorts, Refused, absent, base_of
from .stock import Stock

__all__ = ["Outcome", "Recovery", "RecoveryPorts"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A recovery that was carried out: training goes on after `plan.target`, whose snapshot has this timeline.

    kept: pieces of snapshots in the memory of all ranks, of windows only whole ones. persisted: snapshots in storage,
    of all ranks, those of one window together. spare: pieces in the memory of some ranks, by iteration and kind, to be
    kept until a newer snapshot is protected.
    """

    plan: RecoveryPlan
    timeline: Timeline
    kept: tuple[Piece, ...]
    persisted: tuple[tuple[SnapshotPlan, ...], ...]
    spare: frozenset[tuple[int, str]]
    table: RecoveryTable = field(repr=False)


class Recovery:
    """One attempt of a job to go on from what an earlier one left; all methods are collectives over all ranks.

    Sequence: `look`, then `carry_out` or `discard`; where `carry_out` gives a Replay, `finish` when that is done.
    """

    def __init__(
        self, job: Job, strategy: Strategy, ports: RecoveryPorts, identity: Identity, owners: Sequence[int]
    ) -> None:
        self._owners = frozenset(owners) | {ports.transport.rank}
        self._job, self._strategy, self._ports = job, strategy, ports
        self._identity, self._rank = identity, ports.transport.rank
        node = job.topology.node(self._rank)
        self._stock = Stock(ports.memory, ports.persistent, ports.transport, identity, node)
        self._catalogue = Catalogue((), {}, ())
        self._timeline: Timeline = ()
        self._plan: RecoveryPlan | None = None
        self._damaged: dict[Place, str] = {}
        self._late: list[HeapReader] = []
        self._attempt: Attempt | None = None  # what a replay still reads
        self._begun_s = 0.0

    def look(self) -> RecoveryPlan | None:
        """Take stock and plan; None when nothing was found, or nothing that suffices, which is then logged.

        Raises StoreFailure when a store cannot be listed, which a restart may mend.
        """
        self._catalogue = self._stock.take()
        self._plan = self._planned() if self._catalogue.found else None
        return self._plan

    @property
    def is_own(self) -> bool:
        """Whether the plan goes on from a state that this job itself left, and not from one of another job."""
        if self._plan is None:
            return False
        at = [one for one in self._catalogue.of(self._timeline).found if one.snapshot.iteration == self._plan.target]
        return any(one.job == self._identity.job for one in at if not one.why)

    @property
    def unusable(self) -> str:
        """Why sealed snapshots in storage cannot be used by this job; empty if there are none."""
        found = [one for one in self._catalogue.found if one.tier is Tier.PERSISTENT and one.why and not one.torn]
        return f"{found[0].snapshot}: {found[0].why}" if found else ""

    def carry_out(self) -> Outcome | Replay | None:
        """Restore the planned state, or what is left of it when copies prove damaged; None when nothing suffices.

        A Replay where iterations have to be run again before the state is dense: nothing is given up before `finish`.
        Live state is filled with NaN first, so after None it has to be built anew.
        """
        self._begun_s = self._ports.clock.now_s()
        while self._plan is not None:
            replay, refused = self._try(self._plan)
            all_refused = self._gathered_refusals(refused)
            if not all_refused:
                return replay or self.finish()
            self._close()
            for place, why in all_refused.items():
                log.warning(
                    "refused the %s that rank %d holds (%s): %s", place[1], place[0], place[2].name.lower(), why
                )
            if all_refused.keys() <= self._damaged.keys():
                raise UnreadableCheckpoint(next(iter(all_refused.values())))
            self._damaged |= all_refused
            self._plan = self._planned()
        return None

    def finish(self) -> Outcome:
        """The state is dense: keep in memory what all ranks have of it, and free the rest."""
        plan = self._plan
        assert plan is not None
        self._ports.restorer.complete()
        self._ports.transport.gather(None)  # nobody frees a copy that another rank still restores from
        self._close()
        self._ports.make_room()
        restored = frozenset(range(base_of(plan), plan.target + 1))
        used = {source.iteration for source in plan.sources} | restored
        self._stock.land_late(self._late, used)
        self._late = []
        kept = self._stock.common(Tier.OWN_MEMORY, self._timeline, plan.target)
        persisted = self._stock.common(Tier.PERSISTENT, self._timeline, plan.target)
        names, spare = frozenset((piece.plan.iteration, piece.kind) for piece in kept), frozenset[tuple[int, str]]()
        if not restored <= {iteration for iteration, _ in names}:
            # Some rank has it in storage only: then no rank gives up its own copy yet.
            spare = frozenset(
                (one.snapshot.iteration, one.snapshot.kind)
                for one in self._catalogue.of(self._timeline).found
                if one.snapshot.iteration in used and one.tier is not Tier.PERSISTENT
            )
        self._stock.tidy(names | spare, self._owners)
        duration_s = self._ports.clock.now_s() - self._begun_s
        spans = (one.span for one in self._catalogue.found if one.snapshot.iteration == plan.target and not one.why)
        table = RecoveryTable(
            plan, self._catalogue.nodes, self._damaged_told(), duration_s, self._strategy.plt, next(spans, range(0))
        )
        return Outcome(plan, past(self._timeline, plan.target), kept, _windows(persisted), spare - names, table)

    def discard(self) -> None:
        """Free all in memory: training begins from another state than any that is there."""
        self._stock.tidy((), ())

    def _planned(self) -> RecoveryPlan | None:
        """The plan for the newest timeline that anything can be made of; copies of different ones never mix."""
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

    def _try(self, plan: RecoveryPlan) -> tuple[Replay | None, dict[Place, str]]:
        """Fetch and restore; returns the replay that is needed then, and what was refused."""
        mine = self._catalogue.of(self._timeline)
        intact = mine.without(self._damaged)
        needed = witnessed(needs(plan, mine.inventory(self._damaged), intact), plan, intact)
        attempt = self._attempt = Attempt(self._ports, plan, needed)
        attempt.restore()
        self._late = attempt.late
        if attempt.refused:
            return None, attempt.refused
        try:
            self._plan = self._resumed(plan, attempt)
            config = self._job.config
            return attempt.replay(plan, len(self._job.operators), config.replay_tolerance), {}
        except Refused as error:
            return None, {error.place: str(error)}

    def _resumed(self, plan: RecoveryPlan, attempt: Attempt) -> RecoveryPlan:
        """Take up what the strategy remembered at the target, once all else is restored. Raises Refused."""
        base, remembered = base_of(plan), attempt.having("strategy", plan.target)
        frozen = [one.frozen[0] for one in plan.segments if one.frozen]
        lacking = self._ports.restorer.missing(frozen[0] if frozen else ())
        if attempt.having("trainer", base) is None:
            lacking = lacking or f"no snapshot of iteration {base} has this rank's random states"
        if remembered is None:
            lacking = lacking or f"no snapshot of iteration {plan.target} says what the strategy remembered"
        if remembered is None or lacking:
            raise Refused(absent(plan.target, self._rank), lacking)
        place, reader = remembered
        newest = max(plan.target, self._catalogue.newest_iteration)
        try:
            return self._strategy.resumed(plan, cast("Any", reader.manifest.facts.scalars["strategy"]), newest)
        except (MoECheckpointError, KeyError, TypeError, ValueError) as error:
            raise Refused(place, f"the strategy cannot go on from it: {type(error).__name__}: {error}") from error

    def _close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        self._attempt = None

    def _gathered_refusals(self, refused: Mapping[Place, str]) -> dict[Place, str]:
        told: Json = [
            [finder, one.iteration, one.rank, one.kind, tier.value, why] for (finder, one, tier), why in refused.items()
        ]
        rows = [row for rows in self._ports.transport.gather(told) for row in cast("list[Any]", rows)]
        return {(row[0], SnapshotId(row[1], row[2], row[3]), Tier(row[4])): row[5] for row in rows}

    def _damaged_told(self) -> tuple[str, ...]:
        """What was refused when it was listed, and what when it was read."""
        told = [(one.place, one.why) for one in self._catalogue.found if one.why and not one.torn]
        told += self._damaged.items()
        return tuple(f"{place[1]}, held by rank {place[0]}: {why}" for place, why in sorted(told))


def _windows(pieces: Sequence[Piece]) -> tuple[tuple[SnapshotPlan, ...], ...]:
    """One plan per iteration from its pieces, those of one window together, in order."""
    merged: dict[tuple[int, int], dict[int, dict[OperatorId, Part]]] = {}
    for piece in pieces:
        window = merged.setdefault((piece.span.stop, piece.span.start), {})
        window.setdefault(piece.plan.iteration, {}).update(piece.plan.parts)
    return tuple(
        tuple(SnapshotPlan(iteration, parts) for iteration, parts in sorted(plans.items()))
        for _, plans in sorted(merged.items())
    )
