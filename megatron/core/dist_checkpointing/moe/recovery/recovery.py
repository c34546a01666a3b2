"""From what an earlier attempt of a job left to a plan, and from the plan to restored state, on one rank.

All ranks run the same steps, each a collective, so that all decide the same from the same facts:

1. `look`: each rank lists its slot of the node's memory, its standby store, and its share of storage. Rows go to the
   ranks whose state they are of; what these can rebuild becomes one digest for all, and each makes the same plan of it
   (`strategy.recover`, pure), and knows of it what itself takes from where. Attempts of the job left copies of
   different pasts ("timelines"); the newest past that suffices is taken, and copies of two are never mixed.
2. `carry_out`: some rank reads what only it knows and tells all (`gather_metadata`); snapshots that others need
   travel to them, verified by checksum (`fetching.SnapshotFetcher`); the live state is filled with NaN, then restored.
3. A copy may prove damaged on any rank. All gather what they refused, and plan again without it, up to the end of what
   was found. If nothing new was refused the same plan would come again: then a local recovery is given up for a global
   one, whose plan needs other copies; if it is global already, that is an error.
4. A rank of a stage that rolled back gets a Replay, the other ranks of such a plan are Waiting, perhaps after a single
   step with gradients that they had kept. Where all state is dense already, there is nothing left to do.
5. `finish` waits for all. Only then is anything freed: another rank might still read it, and until all stand at the
   target a second fault has to find what the first one found. In memory stays what all ranks have of the target and
   before it; where some rank has the target in storage only, the others' copies are spared until a new one is safe.

A replay that comes out otherwise than recorded ends the attempt with a note (`diverged`): the next one passes by what
the replay was made from, first by the boundary logs, then by the window, until a state is exact or a checkpoint is
loaded. A rank that fails in here ends its process: the peers notice a lost connection, all restart, and look again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_

from ..errors import MoECheckpointError, RecoveryImpossible, UnreadableCheckpoint, format_error
from ..policy.availability import Survey
from ..policy.lineage import Identity, Lineage, past, shortened
from ..policy.rollback import base_for, ranks_of, restored, segment_of, sends_all
from ..policy.tracking import RestoredState, leaving_room
from ..ports import Json, PeerLost, Reader, Restorer, SnapshotId
from ..replay.densify import Replay
from ..replay.execution import Subset
from ..replication.agreement import merged
from ..storage.base import HostBuffer
from ..strategies import Job, Strategy
from ..types import CONSTANT, GRADIENTS, PARKED, STANDBY, Lost, RecoveryPlan, StepJournal, Tier
from .exactness import ComparedIterations, Divergence, EndedRecovery, RecoveryTable, compared_in, exactness
from .findings import Digest, Judge, Overview, digest
from .inventory import Catalogue, CopyLocation
from .local_inventory import Findings, LocalInventory, by_window
from .restoring import RecoveryPorts, RestoreTask, absent
from .sources import (
    GatheredMetadata,
    KeptReplay,
    RefusedCopies,
    comparable_iterations,
    gather_metadata,
    gather_refused,
    logs_and_gradients,
    needs,
    with_trainer_states,
)
from .timeline import Milestone

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryOutcome:
    """A recovery that was carried out: training continues after `plan.target`, whose snapshot has this timeline but for
    attempts of which nothing is left."""

    plan: RecoveryPlan
    timeline: Lineage
    restored: RestoredState
    table: RecoveryTable = field(repr=False)


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


class Recovery:
    """One attempt of a job to continue from what an earlier one left; all methods are collectives over all ranks.

    Sequence: `look`, then `carry_out` or `discard`; where `carry_out` gives a Replay or Waiting, `finish` when that is
    done.
    """

    def __init__(
        self, job: Job, strategy: Strategy, ports: RecoveryPorts, identity: Identity, owners: Sequence[int]
    ) -> None:
        self._owners = frozenset(owners) | {ports.transport.rank}
        self._job, self._strategy, self._ports = job, strategy, ports
        self._identity, self._rank = identity, ports.transport.rank
        self._local = LocalInventory(
            ports.memory,
            ports.persistent,
            ports.transport,
            identity,
            standby=ports.standby,
            older=ports.older,
        )
        self._found = Findings(Judge(Overview(), identity.job, job.config.takes_over), (), Catalogue((), {}, ()))
        self._digest: Digest | None = None
        self._unusable = ""
        self._timeline: Lineage = ()
        self._plan: RecoveryPlan | None = None
        self._is_local = job.config.recovery != "global" and ports.standby is not None
        self._wider = ""
        self._damaged: dict[CopyLocation, str] = {}
        self._attempt: RestoreTask | None = None  # what a replay still reads
        self._late: list[HostBuffer] = []  # fetched state that has no room in memory before `finish`
        self._metadata = GatheredMetadata()
        self._begun_s = 0.0

    def restore_through(self, restorer: Restorer) -> None:
        """Live state was enumerated again: restore into what it is now."""
        self._ports = replace(self._ports, restorer=restorer)

    def look(self) -> RecoveryPlan | None:
        """Take stock and plan; None when nothing was found, or nothing that suffices, which is then logged.

        Raises StoreFailure when a store cannot be listed, which a restart may mend.
        """
        allowed = self._job.config.replay_tolerance
        notes = [note for note in self._ports.notes.read() if allowed <= note.tolerance]
        self._found = self._local.gather(self._job, notes)
        self._ports.timestamps.mark(Milestone.INVENTORY)
        for note in self.diverged if self._rank == 0 else ():
            log.warning("%s; falling back to another state", note)
        self._plan = self._planned() if self.newest_iteration >= 0 else None
        return self._plan

    @property
    def plan(self) -> RecoveryPlan | None:
        """What is being carried out."""
        return self._plan

    @property
    def timeline(self) -> Lineage:
        """Of the state at the target, and of what is stored of it or of earlier iterations before training
        continues."""
        return past(self._timeline, self._plan.target) if self._plan is not None else ()

    @property
    def is_own(self) -> bool:
        """Whether the plan continues from a state that this job itself left, and not from one of another job."""
        return self._plan is not None and self.is_of({self._found.judge.job})

    def is_of(self, jobs: Collection[str]) -> bool:
        """Whether the plan continues from a state that one of these jobs left.

        Args:
            jobs: Their ids.
        """
        return self._plan is not None and self._found.judge.is_of(jobs, self._plan.target, self._timeline)

    @property
    def unusable(self) -> str:
        """Where nothing can be planned, why sealed snapshots in storage cannot be used by this job; else empty."""
        return self._unusable

    @property
    def of_others(self) -> tuple[int, str]:
        """The newest iteration that another job stored, and that was not asked for, and that job; else -1."""
        return self._found.judge.newest_stranger

    @property
    def foreign(self) -> tuple[int, str]:
        """The newest iteration in memory that only a setting or a version makes unusable, and why; -1 for none."""
        return self._found.judge.overview.foreign

    @property
    def diverged(self) -> tuple[Divergence, ...]:
        """Replays of earlier attempts that came out otherwise."""
        return self._found.judge.diverged

    @property
    def newest_iteration(self) -> int:
        """The newest iteration of which anything was found; -1 if nothing was."""
        return self._found.judge.overview.newest

    @property
    def next_attempt(self) -> int:
        """A number larger than that of any attempt that left something here."""
        return 1 + self._found.judge.overview.attempt

    def note_divergence(self, iteration: int, why: str) -> None:
        """Note a replay that came out otherwise: the next start of the job takes another way. All that is stored stays.

        Args:
            iteration: The first one that came out otherwise, on this rank or on one that replays with it.
            why: What differs, with both values.
        """
        plan, topology = self._plan, self._job.topology
        assert plan is not None
        segment = segment_of(plan, self._rank, topology)
        assert segment is not None
        used, alone = restored(segment), len(segment.stages) < topology.pp
        self._ports.notes.add(
            Divergence(
                iteration=iteration,
                target=plan.target,
                stages=tuple(sorted(segment.stages)),
                alone=alone,
                first=used[0],
                last=used[-1],
                timeline=self._timeline,
                why=why,
                tolerance=self._job.config.replay_tolerance,
            )
        )

    def carry_out(self) -> RecoveryOutcome | Replay | Waiting | None:
        """Restore the planned state, or what is left of it when copies prove damaged; None when nothing suffices.

        A Replay where this rank has to run iterations again before its state is dense, Waiting where only others come
        to the target by themselves: nothing is given up before `finish`.
        Live state is filled with NaN first, so after None it has to be built again.
        """
        self._begun_s = self._ports.clock.now_s()
        while self._plan is not None:
            refused: dict[CopyLocation, str] = {}
            left_to_do = None
            try:
                left_to_do = self._restored(self._plan)
            except RefusedCopies as error:
                refused = error.refused
            refused = gather_refused(self._ports.transport, refused)
            if not refused:
                self._ports.timestamps.mark(Milestone.FETCHED)
                return left_to_do or self.finish()
            self.close()
            for (finder, snapshot, tier), why in refused.items():
                log.warning("refused: %s on rank %d (%s): %s", snapshot, finder, tier.name.lower(), why)
            if refused.keys() <= self._damaged.keys():
                if not self._is_local:
                    raise UnreadableCheckpoint(next(iter(refused.values())))
                self._is_local = False  # what is missing there may not be needed when all roll back
            self._damaged |= refused
            self._plan = self._planned()
        return None

    def is_exact(self, replay: Replay) -> bool:
        """Whether what this rank ran again came out as recorded, as far as one rank knows: in a replay over several
        stages the others may have compared it."""
        plan, topology = self._plan, self._job.topology
        segment = segment_of(plan, self._rank, topology) if plan is not None else None
        if segment is None or self._job.config.replay_tolerance:
            return False
        return len(segment.stages) > 1 or compared_in(segment, replay.compared, topology).issuperset(segment.replayed)

    def close(self) -> None:
        """Nothing more is read from what this rank held open for the plan: its state is that of the target."""
        if self._attempt is not None:
            self._attempt.close()
        self._attempt = None

    def finish(self, replay: Replay | None = None) -> RecoveryOutcome:
        """All ranks stand at the target: keep in memory what all ranks have of it, and free the rest.

        Waits for those that still replay. replay: what this rank ran again, if anything. Raises PeerLost.
        """
        plan, ports, local = self._plan, self._ports, self._local
        assert plan is not None
        # Making weights whole is a collective: those that replay come to it later.
        ended = self._await_all(plan, replay.compared if replay is not None else {})
        ports.restorer.complete()
        ports.transport.least([0])  # nobody frees a copy that another rank still restores from
        self.close()
        ports.older.restored(plan.target)
        ports.make_room()
        rebuilt = frozenset(iteration for segment in plan.segments for iteration in restored(segment))
        used = {source.iteration for source in plan.taken} | rebuilt
        parked = [reader for reader in self._late if reader.manifest.snapshot.kind == PARKED]
        local.move_in([reader for reader in self._late if reader not in parked], used)
        self._late = []
        common = local.common(self._timeline, plan.target, self._job.order)
        kept = leaving_room(common.memory, self._strategy.places)
        persisted = by_window(common.persisted)
        self._strategy.on_stored([stored for plans in persisted for stored in plans])
        names, spare = frozenset((piece.plan.iteration, piece.kind) for piece in kept), frozenset[tuple[int, str]]()
        from_storage = any(source.tier is Tier.PERSISTENT for source in plan.taken)
        if from_storage or not rebuilt <= {iteration for iteration, _ in names}:
            # Some rank has it, or a piece of it, in storage only: then no rank gives up its own copy yet.
            spare = frozenset(one for one in ended.memory if one[0] in used)
        local.collect_garbage(names | spare, self._owners)
        self._keep_standby(plan, _oldest(names | spare, plan.target), parked)
        state = RestoredState(plan.target, kept, persisted, spare - names, from_storage, common.torn)
        timeline = shortened(self.timeline, self._found.judge.left_of(self._timeline))
        return RecoveryOutcome(plan, timeline, state, self._table(plan, ended))

    def _await_all(self, plan: RecoveryPlan, compared: ComparedIterations) -> EndedRecovery:
        """Wait for all ranks; what they compared in their replays, and found, together."""
        topology, segment = self._job.topology, segment_of(plan, self._rank, self._job.topology)
        verified = compared_in(segment, compared, topology) if segment is not None else frozenset[int]()
        stage = topology.stage(self._rank)
        ended = EndedRecovery.of(self._rank, stage, verified, self._found.own, self._timeline)
        try:
            return merged(self._ports.transport, ended, EndedRecovery, or_)
        except PeerLost as error:
            late = self._replaying(plan) | set(plan.roll_forward)
            who = f"ranks {sorted(late)}, which come there on their own," if late else "all ranks"
            raise PeerLost(f"rank {self._rank} waited for {who} at iteration {plan.target}: {error}") from error

    def _replaying(self, plan: RecoveryPlan) -> set[int]:
        segments = (segment for segment in plan.segments if segment.replayed)
        return {rank for segment in segments for rank in ranks_of(segment, self._job.topology)}

    def discard(self) -> None:
        """Free all in memory: training begins from another state than any that is there."""
        self._local.collect_garbage((), ())
        self._local.collect_standby_garbage()

    def _planned(self) -> RecoveryPlan | None:
        """The plan for the newest timeline that anything can be made of; copies of different ones never mix."""
        problem: RecoveryImpossible | None = None
        for timeline in self._found.judge.timelines:
            usable = self._usable(timeline)
            try:
                plan = self._strategy.recover(
                    usable.inventory(self._damaged),
                    Lost(),
                    self._job.topology,
                    partial(self._everywhere, timeline, usable),
                )
            except RecoveryImpossible as error:
                problem = problem or error
                continue
            if self._is_local and (note := self._found.judge.diverged_alone(plan.target, timeline)):
                # The same stages would diverge again: all stages together are compared by the loss of each iteration.
                self._is_local, self._wider = False, str(note)
                return self._planned()
            self._timeline = timeline
            if self._is_local:
                self._wider = plan.wider
                self._log_scope(plan)
            self._ports.timestamps.mark(Milestone.PLANNED)
            return plan
        unusable = ""
        for row in self._found.own:
            log.info("found: %s on rank %d (%s) %s", row.snapshot, self._rank, row.tier.name.lower(), row.why)
            if row.tier is Tier.PERSISTENT and row.why and not (row.torn or row.is_intact):
                unusable = unusable or f"{row.snapshot}: {row.why}"
        self._unusable = merged(self._ports.transport, unusable, str, lambda one, other: one or other)
        log.warning(
            "no recoverable state in memory or storage: %s",
            problem or "no copy is intact, or of this job and layout",
        )
        return None

    def _everywhere(self, timeline: Lineage, usable: Catalogue, survey: Survey) -> Survey:
        """From what this rank can rebuild to what all ranks can; a collective."""
        topology, rank = self._job.topology, self._rank
        finds = (row for row in self._found.own if row.may_be_of(timeline))
        if not self._is_local:
            finds = (row for row in finds if row.snapshot.kind not in STANDBY)
        # Only the last stage knows the loss, by which its replay is checked.
        last = topology.stage_ranks(topology.pp - 1)
        own = digest(rank, survey, usable, finds, self._damaged, last)
        self._digest = merged(self._ports.transport, own, Digest, or_)
        return self._digest.survey

    def _usable(self, timeline: Lineage) -> Catalogue:
        """What may be used, if training continues in this timeline."""
        found = self._found.catalogue.within(timeline)
        return found if self._is_local else found.without_standby()

    def _log_scope(self, plan: RecoveryPlan) -> None:
        """Say on the first rank why more stages roll back than have lost their state."""
        if self._wider and self._rank == 0:
            level = logging.WARNING if self._job.config.recovery == "local" else logging.INFO
            log.log(level, "global rollback to iteration %d: %s", plan.target, self._wider)

    def _restored(self, plan: RecoveryPlan) -> Replay | Waiting | None:
        """Fetch and restore; returns what is still to be done then. Raises RefusedCopies."""
        topology, usable = self._job.topology, self._usable(self._timeline)
        intact, ports, shared = usable.without(self._damaged), self._ports, self._digest
        assert shared is not None
        plan, metadata = gather_metadata(plan, shared, self._job.order, ports.transport, ports.open, self._timeline)
        self._metadata = metadata
        sources = needs(plan, usable.inventory(self._damaged), intact)
        states = with_trainer_states(sources, plan, intact, topology, shared.logged)
        phases = states, logs_and_gradients(plan, intact, topology)
        attempt = self._attempt = RestoreTask(ports, plan, phases, topology, self._interrupted(plan))
        attempt.restore()
        self._late = attempt.late
        self._plan = self._resumed(plan, attempt, metadata)
        return self._left_to_do(plan, attempt, metadata)

    def _interrupted(self, plan: RecoveryPlan) -> KeptReplay | None:
        """The replay of this plan that all its ranks are in the middle of, at the same iteration; else it begins again.

        A collective over these ranks. Where other stages take part in it now the segment is another one.
        """
        topology, segment = self._job.topology, segment_of(plan, self._rank, self._job.topology)
        if segment is None or not segment.replayed or len(segment.stages) == topology.pp:
            return None
        kept = self._ports.kept.replay
        if kept is not None and (kept.segment, kept.timeline) != (segment, self._timeline):
            kept = None
        members = Subset(self._ports.transport, ranks_of(segment, topology), "say how far a replay has come")
        own = {kept.iteration if kept is not None else None}
        if len(merged(members, own, set[int | None], or_)) > 1 or kept is None:
            return None
        if self._rank == min(members.members):
            log.info("replay: continued after iteration %d; no earlier one is run again", kept.iteration)
        return kept

    def interrupted(self, replay: Replay) -> KeptReplay:
        """What this rank keeps of a replay that ends between two iterations.

        Args:
            replay: Of the plan that was carried out.
        """
        assert self._plan is not None
        segment = segment_of(self._plan, self._rank, self._job.topology)
        assert segment is not None
        trainer = self._ports.trainer
        tensors = {name: bytes(data) for name, data in trainer.tensors().items()}
        return KeptReplay(
            segment, self._timeline, replay.iteration - 1, trainer.scalars(), tensors, dict(replay.compared)
        )

    def _resumed(self, plan: RecoveryPlan, attempt: RestoreTask, metadata: GatheredMetadata) -> RecoveryPlan:
        """Take up what the strategy knew at the target, once all else is restored. Raises RefusedCopies."""
        lacking = attempt.missing()
        if metadata.strategy is None:
            lacking = lacking or f"no snapshot of iteration {plan.target} has the state of the strategy"
        if metadata.strategy_from is None or lacking:
            raise RefusedCopies({absent(plan.target, self._rank): lacking})
        newest = max(plan.target, self.newest_iteration)
        try:
            return self._strategy.resumed(plan, metadata.strategy, newest)
        except (MoECheckpointError, KeyError, TypeError, ValueError) as error:
            why = f"the strategy cannot continue from it: {format_error(error)}"
            raise RefusedCopies({metadata.strategy_from: why}) from error

    def _left_to_do(
        self, plan: RecoveryPlan, attempt: RestoreTask, metadata: GatheredMetadata
    ) -> Replay | Waiting | None:
        """What brings this rank to the target, or that it waits for others; None where all stand there.

        Raises RefusedCopies.
        """
        topology, segment = self._job.topology, segment_of(plan, self._rank, self._job.topology)
        if segment is not None and segment.replayed:
            shared, order = self._digest, self._job.order
            assert shared is not None
            stages = [shared.stages[stage] for stage in segment.stages]
            sent = frozenset(at for at in segment.replayed if sends_all(segment, at, topology))
            own = self._usable(self._timeline).without(self._damaged).logged(self._rank)
            unlogged = sent - own, sent - sent.intersection(*(stage.own_logs for stage in stages))
            operators = order.named(reduce(or_, (stage.state.required for stage in stages)))
            comparable = comparable_iterations(segment, shared)
            return attempt.replay(segment, self._job, operators, unlogged, comparable, metadata)
        if self._rank in plan.roll_forward:
            step, gradients = metadata.outcomes.get(plan.target), attempt.gradients
            if step is None or gradients is None:
                why = f"no snapshot says how the step of {plan.target} came out"
                raise RefusedCopies({absent(plan.target, self._rank): why})
            return Waiting(RollForward(plan.target, step.journal, gradients, step.trainer))
        return Waiting() if plan.roll_forward or self._replaying(plan) else None

    def _keep_standby(self, plan: RecoveryPlan, oldest: int, parked: Sequence[HostBuffer]) -> None:
        """Keep what a fault needs before the next iteration is committed: logs since the oldest state in memory, and
        what this rank has parked."""
        base = base_for(plan, self._rank, self._job.topology)
        kept = {SnapshotId(iteration, self._rank, PARKED) for iteration in (base, plan.target)}
        kept.add(SnapshotId(plan.target, self._rank, GRADIENTS))
        logged = range(oldest + 1, plan.target + 1)
        self._local.collect_standby_garbage(kept, logged, parked, timeline=self._timeline)
        if step := self._metadata.outcomes.get(plan.target):
            scalars: dict[str, Json] = {"journal": step.journal.to_data(), "trainer": dict(step.trainer)}
            self._local.journal_log(plan.target, scalars, self._timeline)

    def _table(self, plan: RecoveryPlan, ended: EndedRecovery) -> RecoveryTable:
        return RecoveryTable(
            plan,
            self._found.catalogue.nodes,
            ended.lines(self._damaged),
            self._ports.clock.now_s() - self._begun_s,
            self._strategy.report(),
            {at: range(first, last + 1) for at, (first, last) in ended.windows.items()},
            self._wider,
            self._job.topology.pp,
            exactness(plan, self._job.topology, self._job.config.replay_tolerance, ended.compared),
            tuple(map(str, self.diverged)),
            range(plan.target + 1, self.newest_iteration + 1),
        )


def _oldest(names: Collection[tuple[int, str]], target: int) -> int:
    """The oldest iteration of these pieces from which anything may be run again."""
    return min((iteration for iteration, kind in names if kind != CONSTANT), default=target)
