"""Protection of one training process from start to end: real ports around the recovery and the coordinator.

It brings the job back first (`restart`), until all ranks stand at one iteration. From there on its `coordinator` makes,
replicates and persists snapshots, and its `survivor` logs what goes over stage boundaries and parks this rank's state
when a peer is lost.

What ranks do here together is done in one order on all of them, or it hangs: nearly every step of the constructor, and
each call up to `rejoin`, is a collective over transports of its own, never over training's groups; a problem of one
rank is raised on all of them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..boot_clock import SystemClock
from ..config import MoECheckpointConfig
from ..errors import StoreFailure, UsageError, format_error
from ..extensions import Additions, Extension, asked_for, wait_for_agent
from ..local_recovery.survivor import Survivor
from ..megatron_state.module_tree import drops_tokens, model_operators, number_layers
from ..megatron_state.popularity import TokenCounter
from ..policy.lineage import Identity, attempt_name, continued, number_of
from ..policy.parking import Cause
from ..ports import Execution, Layout
from ..recovery.exactness import DivergenceNotes
from ..recovery.recovery import Recovery
from ..recovery.restoring import RecoveryPorts
from ..recovery.sources import KeptState, keep, take
from ..recovery.timeline import Milestone, Timestamps, forget, gather_timeline, left_in
from ..replication.agreement import merged, of_first, raise_on_all_ranks
from ..replication.replicator import Replicator
from ..resharding.store import NoStorage
from ..resharding.survivors import PreviousLayout
from ..snapshot.coordinator import Coordinator, Ports, ProtectionReport
from ..snapshot.iteration_message import CudaStopwatch
from ..snapshot.memory_limit import gathered_sizes, gathered_unchanging
from ..snapshot.persister import Persister
from ..snapshot.workers import ReplicationWorker, ThreadExecutor
from ..strategies import GATE_UNIT, STRATEGIES, Job, Piece, Strategy
from ..types import StepJournal
from ..versions import check_versions, found_versions
from .live_state import LiveState, RankMemory, Training
from .opening import RECOVERY_PATIENCE, JobPlaces, Leases, Transports, introduced, own_connection, parallel_layout
from .process_info import (
    PATIENCE_ADVICE,
    ProcessInfo,
    memory_folder,
    open_persistent,
    replicas_placed,
    resharding,
    slot_of,
    take_over_renamed,
)
from .restart import Restart
from .session import Request, Session
from .status import StatusBoard

log = logging.getLogger(__name__)


class ProtectedSession(Session):
    """Opened by the constructor, which raises UsageError on all ranks alike for flags, models and folders that cannot
    work.

    Args:
        config: The settings.
        training: What is trained.
        place: Where this process runs.
        timestamps: What this process passed so far.

    Attributes:
        restart: Brings training back.
        job, strategy: What is planned from, and what plans.
        topology, state, memory: The layout of the job; live state, and memory for snapshots, of this rank.
        control, data, patient: Transports: of agreements, of replicas, and of a recovery, which may wait for long.
        peers, owners: The ranks that keep replicas of this one, and those whose replicas it keeps.
        survivor: What logs and parks for local recovery; None where a recovery cannot be local.
        held: What is let go at the end, in the order against that of opening.
    """

    protects = True

    def __init__(
        self, config: MoECheckpointConfig, training: Training, place: ProcessInfo, timestamps: Timestamps | None = None
    ) -> None:
        self.config, self.training, self.place = config, training, place
        self._timestamps, self._clock = timestamps or Timestamps(), SystemClock()
        self._rank, self._began, self._passed = torch.distributed.get_rank(), False, -1
        self.held = ExitStack()
        self.survivor: Survivor | None = None
        self._counter: TokenCounter | None = None
        self._extensions: tuple[Extension, ...] = tuple(kind(self) for kind in asked_for(config))
        # Where one of these raises, what was opened so far is closed; the last line keeps it open.
        with ExitStack() as opening:
            opening.callback(self._close)
            self._connect()
            execution = self._choose_strategy()
            self._open_memory()
            self._prepare_restart(execution)
            self._count_tokens()
            opening.pop_all()
        self._timestamps.mark(Milestone.BUILT)

    # Opening.

    def _connect(self) -> None:
        config, store = self.config, _get_default_store()
        self._address, job_id, run, places = introduced(store, config, self.place)
        self.place = place = replace(self.place, job_id=job_id)
        self.job_id = job_id
        self._store = own_connection(store, config.timeout_s)
        self.control, self.data, self.patient, self.links = Transports.connected(self._store, config, self._address)
        for one in (self.control, self.data, self.patient):
            self.held.callback(one.close)
        self.held.callback(self.links.forget)
        # Over the transport with the longest patience: rank 0 may have to watch a lease for a while.
        leases = self.leases = self._reaching(lambda: Leases(config, self.training.save, place, run))
        self.held.callback(lambda: leases.leave() if self._began else leases.give_back())
        acquired = self._reaching(leases.acquire)
        if config.persist_dir is not None:
            self._reaching(partial(leases.find, of_first(self.control, acquired, str)))
        self._together(self._check_versions)
        # Nodes of all ranks: where replicas go and which copies are near depends on them, and so does all below.
        of_job = of_first(self.control, JobPlaces.of(places), JobPlaces)
        self._together(lambda: take_over_renamed(config, place, of_job.nodes()))
        self.topology = self._together(of_job.topology)
        self._together(lambda: number_layers(self.training.chunks))
        share = next((one.share for one in self._extensions if one.share is not None), None)
        # Before anything is promised or allocated: a model of which some bytes belong to no operator is refused.
        self.state = self._together(lambda: LiveState(self.training, self.topology, self._rank, share))
        self.held.callback(lambda: self.state.close(keeps_memory=self._began))

    def _check_versions(self) -> None:
        strategy = self.config.strategy
        for line in check_versions(found_versions(), strategy if STRATEGIES[strategy].replays else None):
            if self._rank == 0:
                log.warning("%s", line)

    def _choose_strategy(self) -> Execution | None:
        """The strategy, which plans from sizes of all ranks, and who keeps whose replicas; what replays, if it does.

        What cannot be repeated or replayed is refused before it is needed, and before any memory is taken.
        """
        config, training = self.config, self.training
        model, capturer, chosen = model_operators(training.chunks), self.state.capturer, STRATEGIES[config.strategy]
        # Some of these arguments are collectives: they are evaluated in this order on all ranks.
        self.job = Job(
            config,
            model,
            self.topology,
            training.tokens_per_iteration,
            training.iterations,
            training.topk,
            tied_embeddings=self.state.copies_embeddings,
            sizes=gathered_sizes(capturer, self.control, of_all=chosen.plans_by_sizes),
            drops_tokens=bool(self.control.total([int(drops_tokens(training.chunks))])[0]),
            unchanging=gathered_unchanging(self.state.unchanging, capturer.operators, model, self.control),
        )
        self.strategy: Strategy = self._together(lambda: chosen(self.job))
        placement = self._together(lambda: replicas_placed(config, self.topology))
        self.peers, self.owners = placement.peers[self._rank], placement.kept_by[self._rank]
        for extension in self._extensions:
            extension.chosen()
        return self._together(self.state.execution) if self.strategy.replays else None

    def _open_memory(self) -> None:
        config, state = self.config, self.state
        layout = parallel_layout(self.topology, config.shard, state.buckets(self.control))
        self._persistent = self._reaching(lambda: open_persistent(config, self._rank, layout, state.layout))
        # Behind the longer patience: an agent may take longer than ranks wait for each other in training.
        raise_on_all_ranks(self.patient, lambda: wait_for_agent(slot_of(config, self.place), config.persist_agent_s))
        places = config, self.place, self.job, self.strategy, state, self.training
        self.memory = RankMemory(*places, self.control, self.owners, self._clock)
        self.held.callback(lambda: self.memory.close(began=self._began))
        self.memory.open(layout)
        self.survivor = self.memory.survivor
        if self.survivor is not None:
            self.parks, self.communicator = True, self.survivor.communicator
            self.held.callback(self.survivor.end, keep_memory=True)
        for extension in self._extensions:
            extension.opened()
        self._identity = Identity(self.job_id, layout, state.capturer.operators, config.strategy)
        self._times_left = left_in(self.memory.store.directory)
        # All ranks give the attempt one name. It comes behind the attempts whose faults are not over; when it is known
        # what earlier ones left, `_protect` puts it behind these, too.
        number = 1 + max((number_of(left["attempt"]) for left in self._times_left), default=0)
        own = number, secrets.token_hex(4)
        number, self._token = merged(self.control, own, tuple[int, str], lambda one, two: (max(one[0], two[0]), one[1]))
        self._attempt = attempt_name(number, self._token)

    def _prepare_restart(self, execution: Execution | None) -> None:
        facts, config = self._identity.topology, self.config
        older = PreviousLayout(
            self.job_id, self.place.node, self.memory.store, self._persistent,
            partial(resharding, config, NoStorage(), partial(self.state.layout, facts), facts, self._rank),
            # As of all that a recovery asks of other ranks: between two questions others may read slow storage.
            facts, self.patient, self._address, RECOVERY_PATIENCE * config.timeout_s,
        )  # fmt: skip
        self.held.callback(older.close)
        ports = RecoveryPorts(
            memory=self.memory.store,
            persistent=older.storage,
            transport=self.patient,
            restorer=self.state.restorer,
            trainer=self.training.trainer,
            clock=self._clock,
            execution=execution,
            make_room=self.memory.make_room,
            standby=self.survivor.store if self.survivor is not None else None,
            boundary=self.memory.stage_source,
            timestamps=self._timestamps,
            notes=DivergenceNotes(self.memory.store.directory),
            kept=take(self.training.optimizer),
            older=older,
            dtypes=self.state.dtypes,
        )
        recovery = Recovery(self.job, self.strategy, ports, self._identity, self.owners)
        self.held.callback(recovery.close)
        if execution is not None:
            self.held.callback(execution.thaw)
        self.restart = Restart(
            recovery,
            older,
            config=self.config,
            state=self.state,
            identity=self._identity,
            strategy=self.strategy,
            survivor=self.survivor,
            control=self.control,
            renew_strategy=self._renew_strategy,
        )

    def _renew_strategy(self) -> None:
        """Begin again with one that has learned nothing from a recovery that came to nothing."""
        self.strategy = STRATEGIES[self.config.strategy](self.job)
        self.memory.fit_strategy(self.strategy)

    def _count_tokens(self) -> None:
        if self.strategy.counts_tokens:
            gate_unit = GATE_UNIT if self.strategy.counts_gates else None
            self._counter = TokenCounter(self.training.chunks, gate_unit=gate_unit)
            self.held.callback(self._counter.close)

    def _reaching[T](self, work: Callable[[], T]) -> T:
        """Together, with the longest patience: what storage cannot be reached for now another start may find."""
        return raise_on_all_ranks(self.patient, work, (StoreFailure, UsageError))

    def _together[T](self, work: Callable[[], T]) -> T:
        return raise_on_all_ranks(self.control, work)

    # Before training.

    def restore(self, trainer: Any, request: Request) -> None:
        """As `Session.restore`."""
        self.restart.restore(trainer, request)

    @property
    def lost_tokens(self) -> tuple[int, ...] | None:  # type: ignore[override]
        report = self.strategy.report()
        return None if report is None else report.lost_tokens

    def lost_before(self, iteration: int, lost_tokens: Sequence[int] | None) -> None:
        """As `Session.lost_before`."""
        known = self.lost_tokens
        if known is None or iteration < 1:
            return
        if lost_tokens is not None and len(lost_tokens) == len(known):
            self.strategy.lost_before(iteration, lost_tokens)
        elif self._rank == 0:
            log.warning("lost tokens are counted from iteration %d on: the checkpoint has no earlier count", iteration)

    def begin(self, iteration: int) -> None:
        if not self.restart.prepare(iteration):
            self._protect(iteration)

    def stepped(self, step: StepJournal) -> None:
        self.restart.replayed(step)

    def interrupts_replay(self, calls: bool) -> bool:
        """As `Session.interrupts_replay`."""
        return self.restart.is_interrupted(calls)

    def needs(self, rank: int) -> bool:
        replay = self.restart.replay
        return replay is None or not replay.alone or rank in replay.members

    def rejoin(self) -> bool:
        if self.coordinator is None:
            outcome = self.restart.rejoin()
            if self._counter is not None:
                self._counter.take()  # these tokens were counted when the iterations ran first
            self._protect(outcome.plan.target)
        return self.restart.outcome is not None

    @property
    def is_replaying(self) -> bool:  # type: ignore[override]
        return self.restart.is_replaying

    @property
    def replays_alone(self) -> bool:  # type: ignore[override]
        return self.restart.replay is not None and self.restart.replay.alone

    @property
    def repeats_steps(self) -> bool:  # type: ignore[override]
        return self.restart.repeats_steps

    def _protect(self, iteration: int) -> None:
        """Protect training, which stands after `iteration` on all ranks."""
        outcome = self.restart.outcome
        self.patient.close()  # only a recovery needs its threads and sockets
        self._attempt = attempt_name(max(number_of(self._attempt), self.restart.recovery.next_attempt), self._token)
        timeline = continued(outcome.timeline if outcome is not None else (), self._attempt, iteration)
        identity = replace(self._identity, timeline=timeline)
        # `_began`: from here on memory and leases are left to the next attempt, and not given back, if this one fails.
        self.coordinator, self._began = self._make_coordinator(identity), True
        self._status = StatusBoard(self.memory.store.directory, self._store, self._facts())
        self.held.callback(self._status.close)
        if outcome is not None:
            self.coordinator.resume(outcome.restored)
        if self.survivor is not None:
            self.survivor.set_lineage(identity, iteration)
            self.memory.fit_logs()
        self.memory.free_unused_standby()
        self._timestamps.mark(Milestone.REJOINED)
        stayed = 0
        if outcome is not None:
            times = self._timestamps, self._times_left
            episode = gather_timeline(self.control, *times, outcome.plan, self.topology)
            self.episode, stayed = episode.with_outcome(outcome.table), episode.stayed
            for line in self.episode.lines() if self._rank == 0 else ():
                log.info("%s", line)
        # It is measured, while all wait for rank 0: not again where ranks have kept their processes.
        if self.survivor is not None and not stayed:
            self._report_parking_budget(self.survivor)
        # Only now: the timeline was made of what lies there, and a fault before this line still needs it.
        forget(self.memory.store.directory)

    def _make_coordinator(self, identity: Identity) -> Coordinator:
        """What copies, replicates, keeps and persists snapshots under this name."""
        memory, state, added = self.memory, self.state, Additions()
        for extension in self._extensions:
            extension.protects(added)
        ports = Ports(
            memory=memory.store,
            capturer=state.capturer,
            trainer=self.training.trainer,
            control=self.control,
            executor=ThreadExecutor,
            clock=self._clock,
            owners=self.owners,
            buffer_specs=memory.specs,
            log_bytes=memory.log_bytes,
            room=memory.room,
            standby_bytes=memory.standby_bytes,
            strict=self.config.strict,
            stopwatch=CudaStopwatch() if state.on_device else None,
            added=added,
            before_snapshot=self._before_snapshot,
            counts=self._counter.take if self._counter is not None else None,
            after_snapshot=self._after_snapshot,
        )
        replicates = self.peers or self.owners
        replicator = Replicator(self.data, self.peers, self.owners, added.sends) if replicates else None
        worker = ReplicationWorker(
            memory.store,
            replicator,
            self.data,
            self._clock,
            identity,
            patience_s=self.config.timeout_s / 2,  # owners wait for the answer as long as timeout_s
            owners=self.owners,
            steps=added.sender,
        )
        return Coordinator(self.job, self.strategy, ports, worker, self._persister(identity, added))

    def _persister(self, identity: Identity, added: Additions) -> Persister | None:
        capturer = self.state.capturer
        if self._persistent is None:
            return None

        def layout(piece: Piece, index: int) -> Layout:
            return capturer.layout(piece.plan, trainer=index == 0)

        places, varying = (self.memory.store, self._persistent, self._rank), self.state.varying
        return Persister(*places, identity, layout, clock=self._clock, varying=varying, announce=added.announce)

    def _report_parking_budget(self, survivor: Survivor) -> None:
        if self._rank == 0:
            budget = survivor.parking_budget()
            log.info("%s", budget)
            if not budget.fits:
                log.warning("emergency save may exceed its limit if a whole node saves at once: %s", PATIENCE_ADVICE)

    def _facts(self) -> Mapping[str, Any]:
        """Who this is, for whoever asks for the status of the job."""
        return {
            "rank": self._rank,
            "world_size": self.topology.world_size,
            "node": self.place.node,
            "job": self.job_id,
            "strategy": self.config.strategy,
        }

    # In each iteration.

    def passes(self, iteration: int) -> None:
        if self._counter is not None and iteration == self._passed:  # core validates a result by a rerun
            self._counter.begin()
        self._passed = iteration
        for extension in self._extensions:
            extension.passes()
        if self.survivor is not None:
            replay = self.restart.replay  # what it sends again is in this rank's logs already, but for lost ones
            self.survivor.passes(iteration, logged=replay is None or iteration in replay.unlogged)

    def reduced(self) -> None:
        for extension in self._extensions:
            extension.reduced()
        if self.survivor is not None:
            self.survivor.reduced()

    def before_optimizer(self) -> float:
        return self.coordinator.before_optimizer() if self.coordinator is not None else 0.0

    def stepping(self, iteration: int, passed: StepJournal) -> AbstractContextManager[None]:
        """As `Session.stepping`."""
        return self.survivor.stepping(iteration, passed) if self.survivor is not None else nullcontext()

    def on_state_consistent(self, iteration: int, journal: StepJournal) -> None:
        """As `Session.on_state_consistent`."""
        if self.survivor is not None and not self.is_replaying:
            self.survivor.on_state_consistent(iteration, journal)

    def _before_snapshot(self) -> None:
        """No copy is under way."""
        assert self.coordinator is not None
        self.restart.older.protected(self.coordinator.newest_protected)
        if self.survivor is not None:
            self.memory.fit_logs()

    def _after_snapshot(self, iteration: int, journal: StepJournal) -> None:
        """Copies of the state after `iteration` have begun."""
        assert self.coordinator is not None
        for extension in self._extensions:
            extension.copying()
        if self.survivor is not None:
            self.survivor.on_commit(iteration, journal, self.coordinator.oldest_base)

    def report(self) -> ProtectionReport:
        assert self.coordinator is not None
        report = self.coordinator.report()
        for extension in self._extensions:
            report = extension.reported(report)
        self._status.show(report)
        return report

    def reported(self, iteration: int) -> None:
        if self.survivor is not None:
            self.survivor.reported(iteration)

    @property
    def unreported(self) -> StepJournal | None:  # type: ignore[override]
        if self.survivor is None or self.restart.outcome is None:
            return None
        return self.survivor.unreported(self.restart.outcome.plan.target)

    # At the end.

    def interrupt(self, *, force: bool) -> bool:
        """See `StepGuard.interrupt`. Where nothing is parked, no step needs protection."""
        return self.survivor is None or self.survivor.interrupt(force=force)

    def await_update(self) -> None:
        if self.survivor is not None:
            self.survivor.await_update()

    def failure(self, cause: Cause) -> None:
        self._timestamps.mark(Milestone.DETECTED)
        for extension in self._extensions:
            extension.failed()
        # Before anything is parked: that uses the same copy engine, which takes one round of copies at a time.
        if self.coordinator is not None:
            self._status.close()
            self.coordinator.failure()
        if self.survivor is not None:
            problem = self.survivor.park(cause, self.strategy.to_data(), dict(self._timestamps.times()))
            if problem:
                log.info("rank %d: %s", self._rank, problem)
        self._timestamps.mark(Milestone.PARKED)
        self._timestamps.leave(self.memory.store.directory, self._attempt)

    def abandon(self) -> bool:
        has_ended = self.coordinator is None or self.coordinator.abandon()
        self._close()
        if self.restart.kept is not None:
            keep(self.training.optimizer, KeptState(replay=self.restart.kept))
        elif self.survivor is not None and self.survivor.kept is not None:
            keep(self.training.optimizer, self.survivor.kept)
        return has_ended

    def _close(self) -> None:
        """Release everything; what is sealed in memory stays."""
        try:
            self.held.close()
        except Exception as error:  # connections may be lost: whoever speaks through them fails
            log.debug("closing an interrupted session: %s", format_error(error))

    def shutdown(self, *, keep_memory: bool) -> None:
        assert self.coordinator is not None
        store = self.memory.store
        self._status.close()
        self.coordinator.shutdown()
        for extension in self._extensions:
            extension.stop()
        if self.survivor is not None:
            self.survivor.end(keep_memory=keep_memory)
        if keep_memory:
            store.close()
        else:
            self.restart.older.discard()
            store.remove()
            with suppress(OSError):  # other processes of the node may still be there
                (memory_folder(self.config) / self.place.node).rmdir()
        # Last: until here other ranks may have something to say.
        for transport in (self.control, self.data):
            transport.close()
