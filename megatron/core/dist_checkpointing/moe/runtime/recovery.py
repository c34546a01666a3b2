"""The order of events of a recovery: what was found, what is planned, fetched, restored and reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..errors import MoECheckpointError, RecoveryImpossible, UnreadableCheckpoint
from ..policy.segments import base_for, ranks_of, restored, segment_of, sends_all
from ..policy.strategies import Job, Piece, Strategy
from ..policy.timelines import Timeline, past
from ..policy.widening import widened
from ..ports import Json, PeerLost, SnapshotId
from ..recover.fetch import beside, needs, witnessed
from ..recover.inventory import Catalogue, Place
from ..recover.marks import Mark
from ..recover.table import RecoveryTable
from ..replay.densify import Replay
from ..snapshot.identity import Identity
from ..store.heap import HeapReader
from ..types import GRADIENTS, PARKED, Lost, OperatorId, Part, RecoveryPlan, SnapshotPlan, Tier
from .hearsay import Heard, hear
from .outcomes import Outcome, RollForward, Waiting
from .restoring import Attempt, RecoveryPorts, Refused, absent
from .stock import Stock

__all__ = ["Outcome", "Recovery", "RecoveryPorts", "RollForward", "Waiting"]

log = logging.getLogger(__name__)


class Recovery:
    """One attempt of a job to go on from what an earlier one left; all methods are collectives over all ranks.

    Sequence: `look`, then `carry_out` or `discard`; where `carry_out` gives a Replay or Waiting, `finish` when that is
    done.
    """

    def __init__(
        self, job: Job, strategy: Strategy, ports: RecoveryPorts, identity: Identity, owners: Sequence[int]
    ) -> None:
        self._owners = frozenset(owners) | {ports.transport.rank}
        self._job, self._strategy, self._ports = job, strategy, ports
        self._identity, self._rank = identity, ports.transport.rank
        self._stock = Stock(ports.memory, ports.persistent, ports.transport, identity, standby=ports.standby)
        self._catalogue = Catalogue((), {}, ())
        self._timeline: Timeline = ()
        self._plan: RecoveryPlan | None = None
        self._is_local = job.config.recovery != "global"
        self._wider = ""
        self._damaged: dict[Place, str] = {}
        self._late: list[HeapReader] = []
        self._attempt: Attempt | None = None  # what a replay still reads
        self._heard = Heard()
        self._begun_s = 0.0

    def look(self) -> RecoveryPlan | None:
        """Take stock and plan; None when nothing was found, or nothing that suffices, which is then logged.

        Raises StoreFailure when a store cannot be listed, which a restart may mend.
        """
        self._catalogue = self._stock.take(self._job.topology.node(self._rank))
        self._ports.marks.mark(Mark.INVENTORY)
        self._plan = self._planned() if self._catalogue.found else None
        return self._plan

    @property
    def plan(self) -> RecoveryPlan | None:
        """What is being carried out."""
        return self._plan

    @property
    def timeline(self) -> Timeline:
        """Of the state at the target, and of what is stored of it or of earlier iterations before training goes on."""
        return past(self._timeline, self._plan.target) if self._plan is not None else ()

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

    def carry_out(self) -> Outcome | Replay | Waiting | None:
        """Restore the planned state, or what is left of it when copies prove damaged; None when nothing suffices.

        A Replay where this rank has to run iterations again before its state is dense, Waiting where only others come
        to the target by themselves: nothing is given up before `finish`.
        Live state is filled with NaN first, so after None it has to be built anew.
        """
        self._begun_s = self._ports.clock.now_s()
        while self._plan is not None:
            done, refused = self._try(self._plan)
            all_refused = self._gathered_refusals(refused)
            if not all_refused:
                self._ports.marks.mark(Mark.FETCHED)
                return done or self.finish()
            self._close()
            for place, why in all_refused.items():
                log.warning(
                    "refused the %s that rank %d holds (%s): %s", place[1], place[0], place[2].name.lower(), why
                )
            if all_refused.keys() <= self._damaged.keys():
                if not self._is_local or self._ports.standby is None:
                    raise UnreadableCheckpoint(next(iter(all_refused.values())))
                self._is_local = False  # what is missing there may not be needed when all roll back
            self._damaged |= all_refused
            self._plan = self._planned()
        return None

    def let_go(self) -> None:
        """Nothing more is read from what this rank held open for the plan: its state is that of the target."""
        self._close()

    def finish(self) -> Outcome:
        """All ranks stand at the target: keep in memory what all ranks have of it, and free the rest.

        Waits for those that still replay. Raises PeerLost.
        """
        plan, ports = self._plan, self._ports
        assert plan is not None
        self._await_all(plan)  # making weights whole is a collective: those that replay come to it later
        ports.restorer.complete()
        ports.transport.gather(None)  # nobody frees a copy that another rank still restores from
        self._close()
        ports.make_room()
        rebuilt = frozenset(iteration for segment in plan.segments for iteration in restored(segment))
        used = {source.iteration for source in plan.sources} | rebuilt
        parked = [one for one in self._late if one.manifest.snapshot.kind == PARKED]
        self._stock.land_late([one for one in self._late if one not in parked], used)
        self._late = []
        kept = self._stock.common(Tier.OWN_MEMORY, self._timeline, plan.target)
        persisted = self._stock.common(Tier.PERSISTENT, self._timeline, plan.target)
        names, spare = frozenset((piece.plan.iteration, piece.kind) for piece in kept), frozenset[tuple[int, str]]()
        if not rebuilt <= {iteration for iteration, _ in names}:
            # Some rank has it in storage only: then no rank gives up its own copy yet.
            spare = frozenset(
                (one.snapshot.iteration, one.snapshot.kind)
                for one in self._catalogue.of(self._timeline).found
                if one.snapshot.iteration in used and one.is_state and one.tier is not Tier.PERSISTENT
            )
        self._stock.tidy(names | spare, self._owners)
        self._tidy_standby(plan, min((iteration for iteration, _ in names | spare), default=plan.target), parked)
        return Outcome(plan, self.timeline, kept, _windows(persisted), spare - names, self._table(plan))

    def _await_all(self, plan: RecoveryPlan) -> None:
        try:
            self._ports.transport.gather(None)
        except PeerLost as error:
            replayed = (one for one in plan.segments if one.replayed)
            late = {rank for one in replayed for rank in ranks_of(one, self._job.topology)} | set(plan.roll_forward)
            who = f"ranks {sorted(late)}, which come there on their own," if late else "all ranks"
            raise PeerLost(f"rank {self._rank} waited for {who} at iteration {plan.target}: {error}") from error

    def discard(self) -> None:
        """Free all in memory: training begins from another state than any that is there."""
        self._stock.tidy((), ())
        self._stock.tidy_standby()

    def _planned(self) -> RecoveryPlan | None:
        """The plan for the newest timeline that anything can be made of; copies of different ones never mix."""
        problem: RecoveryImpossible | None = None
        for timeline in self._catalogue.timelines:
            inventory = self._seen(timeline).inventory(self._damaged)
            try:
                plan = self._strategy.recover(inventory, Lost(), self._job.topology)
            except RecoveryImpossible as error:
                problem = problem or error
                continue
            self._timeline = timeline
            self._tell_scope(plan, widened(plan, inventory, self._job.topology, tied=self._job.tied_embeddings))
            self._ports.marks.mark(Mark.PLANNED)
            return plan
        for one in self._catalogue.found if self._rank == 0 else ():
            log.info("found the %s at rank %d (%s) %s", one.snapshot, one.finder, one.tier.name.lower(), one.why)
        log.warning(
            "what was found in memory and storage does not suffice to recover: %s",
            problem or "no copy is intact, or of this job and layout",
        )
        return None

    def _seen(self, timeline: Timeline) -> Catalogue:
        """What may be used, if training goes on in this timeline."""
        found = self._catalogue.of(timeline)
        return found if self._is_local else found.without_standby()

    def _tell_scope(self, plan: RecoveryPlan, why: str) -> None:
        """Say on the first rank why more stages roll back than have lost their state."""
        if not self._is_local or self._ports.standby is None:
            return
        self._wider = why
        if why and self._rank == 0:
            level = logging.WARNING if self._job.config.recovery == "local" else logging.INFO
            log.log(level, "iteration %d is not recovered locally: %s", plan.target, why)

    def _try(self, plan: RecoveryPlan) -> tuple[Replay | Waiting | None, dict[Place, str]]:
        """Fetch and restore; returns what is still to be done then, and what was refused."""
        topology, mine = self._job.topology, self._seen(self._timeline)
        intact = mine.without(self._damaged)
        heard = self._heard = hear(plan, intact, topology, self._ports.transport, self._ports.open)
        if heard.refused:
            return None, dict(heard.refused)
        sources = needs(plan, mine.inventory(self._damaged), intact)
        needed = (*witnessed(sources, plan, intact, topology), *beside(plan, intact, topology))
        attempt = self._attempt = Attempt(self._ports, plan, needed, topology)
        attempt.restore()
        self._late = attempt.late
        if attempt.refused:
            return None, attempt.refused
        try:
            self._plan = self._resumed(plan, attempt, heard)
            return self._left_to_do(plan, attempt, heard), {}
        except Refused as error:
            return None, {error.place: str(error)}

    def _resumed(self, plan: RecoveryPlan, attempt: Attempt, heard: Heard) -> RecoveryPlan:
        """Take up what the strategy remembered at the target, once all else is restored. Raises Refused."""
        lacking = attempt.missing()
        if heard.strategy is None:
            lacking = lacking or f"no snapshot of iteration {plan.target} says what the strategy remembered"
        if heard.memory is None or lacking:
            raise Refused(absent(plan.target, self._rank), lacking)
        newest = max(plan.target, self._catalogue.newest_iteration)
        try:
            return self._strategy.resumed(plan, heard.strategy, newest)
        except (MoECheckpointError, KeyError, TypeError, ValueError) as error:
            why = f"the strategy cannot go on from it: {type(error).__name__}: {error}"
            raise Refused(heard.memory, why) from error

    def _left_to_do(self, plan: RecoveryPlan, attempt: Attempt, heard: Heard) -> Replay | Waiting | None:
        """What brings this rank to the target, or whom it waits for; None where all stand there. Raises Refused."""
        topology, segment = self._job.topology, segment_of(plan, self._rank, self._job.topology)
        if segment is not None and segment.replayed:
            intact = self._seen(self._timeline).without(self._damaged)
            members = ranks_of(segment, topology)
            sent = [iteration for iteration in segment.replayed if sends_all(segment, iteration, topology)]
            unlogged = {rank: frozenset(sent) - intact.logged(rank) for rank in members}
            return attempt.replay(segment, self._job, intact.required, unlogged, heard)
        replaying = tuple(sorted(rank for one in plan.segments if one.replayed for rank in ranks_of(one, topology)))
        if not replaying and not plan.roll_forward:
            return None
        return Waiting(replaying, plan.roll_forward, self._roll(plan, attempt, heard))

    def _roll(self, plan: RecoveryPlan, attempt: Attempt, heard: Heard) -> RollForward | None:
        if self._rank not in plan.roll_forward:
            return None
        told, gradients = heard.outcomes.get(plan.target), attempt.gradients
        if told is None or gradients is None:
            raise Refused(absent(plan.target, self._rank), f"nobody says how the step of {plan.target} came out")
        return RollForward(plan.target, told.journal, gradients, told.trainer)

    def _tidy_standby(self, plan: RecoveryPlan, oldest: int, parked: Sequence[HeapReader]) -> None:
        """Keep what a fault needs before the next iteration is committed: logs since the oldest state in memory, and
        what this rank has parked."""
        base = base_for(plan, self._rank, self._job.topology)
        kept = {SnapshotId(iteration, self._rank, PARKED) for iteration in (base, plan.target)}
        kept.add(SnapshotId(plan.target, self._rank, GRADIENTS))
        self._stock.tidy_standby(kept, range(oldest + 1, plan.target + 1), parked, timeline=self._timeline)
        if told := self._heard.outcomes.get(plan.target):
            scalars: dict[str, Json] = {"journal": told.journal.to_data(), "trainer": dict(told.trainer)}
            self._stock.journal_log(plan.target, scalars, self._timeline)

    def _table(self, plan: RecoveryPlan) -> RecoveryTable:
        duration_s = self._ports.clock.now_s() - self._begun_s
        seen = self._catalogue.of(self._timeline).found
        return RecoveryTable(
            plan,
            self._catalogue.nodes,
            self._damaged_told(),
            duration_s,
            self._strategy.plt,
            {one.snapshot.iteration: one.span for one in seen if one.is_state and not one.why},
            self._wider,
            self._job.topology.pp,
        )

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
