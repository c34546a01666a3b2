"""Checkpointing of one training process from start to end: real ports around the coordinator and the recovery.

A session has two halves. The first brings the job back: `look` and `carry_out` restore what an earlier attempt left
(`recovery`), and a `RestartSequence` runs iterations again, rolls forward or waits, until `rejoin` finds all ranks at
one iteration. From there on the second half protects training: a `Coordinator` makes, replicates and persists
snapshots, and a `Survivor` logs what goes over stage boundaries and parks this rank's state when a peer is lost.

What ranks do here together is done in one order on all of them, or it hangs: nearly every step of the constructor, and
each call of the first half, is a collective over the session's own transports, never over training's groups.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..config import MoECheckpointConfig
from ..errors import format_error
from ..local_recovery.communicator import BoundaryCommunicator
from ..megatron_state.adam_steps import AdamSteps, check_repeatable
from ..megatron_state.capacity import RouterCapacity, drops_tokens
from ..megatron_state.model_operators import model_operators
from ..megatron_state.popularity import TokenCounter
from ..policy.lineage import continued
from ..policy.parking import Cause
from ..ports import Execution, Layout
from ..recovery.diverged import DivergenceNotes
from ..recovery.recovery import Recovery, RecoveryOutcome, Waiting
from ..recovery.restoring import RecoveryPorts
from ..recovery.timeline import Milestone, RecoveryTimeline, Timestamps, forget, gather_timeline, left_in
from ..replay.densify import Replay
from ..replication.agreement import raise_on_all_ranks
from ..replication.replicator import Replicator
from ..snapshot.background import ThreadExecutor
from ..snapshot.buffers import gathered_sizes
from ..snapshot.coordinator import Coordinator, Ports, ProtectionReport
from ..snapshot.identity import Identity
from ..snapshot.stopwatch import CudaStopwatch
from ..snapshot.workers import Persister, ReplicationWorker
from ..strategies import GATE_UNIT, STRATEGIES, Job, Piece
from ..types import RecoveryPlan, StepJournal
from ..versions import check_versions, found_versions
from .clock import SystemClock
from .live_state import LiveState, Training
from .opening import Transports, introduced, parallel_layout, placed_topology
from .peer_links import PeerLinks
from .process_info import (
    PATIENCE_ADVICE,
    ProcessInfo,
    memory_folder,
    open_persistent,
    replicas_placed,
)
from .rank_memory import RankMemory
from .restart_sequence import RestartSequence
from .status import StatusBoard

log = logging.getLogger(__name__)

T = TypeVar("T")


class Session:
    """What a training loop calls, and when; `Unprotected` has the same members for jobs without a strategy.

    ============================ =====================================================================================
    constructor                  once all ranks are connected, model and optimizer are built
    `look`                       before training: a plan, `is_own` and `unusable` say more of it
    `carry_out`                  to restore what is planned; None: it failed, and live state is unusable
    `clear_counters`, `refresh`  before and after a dense checkpoint is loaded instead
    `discard`                    when training begins from there, or from scratch
    `repeats_steps`              then: are flags that shape iterations the same as before?
    `communicator`               for pipeline schedules, from here on
    `begin`                      before the first iteration, with the iteration after which training stands
    `is_replaying`               while it is true, iterations are run that end with `stepped`; nothing may be saved;
                                 `replays_alone`: and nothing computed with other pipeline stages
    `rejoin`                     then: whether there was a recovery; `episode`, `unreported` are facts of it
    `passes`                     each iteration: before its passes
    `reduced`                    when they are over, and gradients reduced
    `before_optimizer`           before the optimizer's step: the seconds that it waited
    `stepping`                   a block around that step and what belongs to it
    `whole`                      when the state after the iteration is complete
    `step_end`                   when checkpoints and evaluation are done: protect it (`stepped` in a replay)
    `report`, `reported`         to write the iteration's numbers down, and after that
    `job_id`                     of this job, in all its attempts
    `interrupt`, `links`         for the watcher of this process: connections are about to be given up
    `failure`                    on each rank where training ends with an error
    `abandon`                    after that, where this process stays and makes another session
    `shutdown`                   on all ranks, where it ends well
    ============================ =====================================================================================

    The calls up to `rejoin`, `step_end` and `shutdown` are collectives over all ranks; those that a replay makes, over
    the ranks that replay together.
    """

    protects = True

    def __init__(
        self, config: MoECheckpointConfig, training: Training, place: ProcessInfo, timestamps: Timestamps | None = None
    ) -> None:
        """Raises UsageError, on all ranks alike, for flags, models and folders that cannot work."""
        self._config, self._training, self._place = config, training, place
        self._timestamps, self._clock = timestamps or Timestamps(), SystemClock()
        self._rank = torch.distributed.get_rank()
        self._coordinator: Coordinator | None = None
        self._held = ExitStack()
        with ExitStack() as opening:
            opening.callback(self.abandon)
            self._open()
            opening.pop_all()

    def _open(self) -> None:
        config, training, place = self._config, self._training, self._place
        store = _get_default_store()
        endpoints, job_id = introduced(store, config, place)
        self._place = place = replace(place, job_id=job_id)
        transports = Transports.connected(store, config, endpoints)
        self._control, self._data, self._patient, self._links = transports
        for one in (self._control, self._data, self._patient):
            self._held.callback(one.close)
        self._held.callback(self._links.forget)
        self._together(self._check_versions)
        # Nodes of all ranks: where replicas go and which copies are near depends on them, and so does all below.
        self._topology = self._together(lambda: placed_topology(self._control, place))
        # Before anything is promised or allocated: a model of which some bytes belong to no operator is refused.
        self._state = self._together(lambda: LiveState(training, self._topology, config.shard, self._rank))
        self._held.callback(self._state.close)
        self._choose_strategy()
        self._follows = config.replicate == "gradients" and self._job.replicas > 0
        if self._follows:
            self._together(lambda: check_repeatable(training.optimizer, self._state.live.stepped))
        # What cannot be replayed is refused before it is needed, and before any memory is taken.
        execution = self._together(self._state.execution) if self._strategy.replays else None
        layout = parallel_layout(self._topology, config.shard)
        self._persistent = self._together(lambda: open_persistent(config, self._rank, layout, self._state.layout))
        self._open_memory()
        self._identity = Identity(place.job_id, layout, self._state.capturer.operators, config.strategy)
        # Rank 0 names the attempt. Sorts by time, and differs even between attempts that start in the same instant.
        self._attempt = str(self._control.gather(f"{time.time_ns():020d}-{secrets.token_hex(4)}")[0])
        self._prepare_recovery(execution)
        self._status: StatusBoard | None = None
        self._counter = None
        if self._strategy.counts_tokens:
            self._counter = TokenCounter(training.chunks, gate_unit=GATE_UNIT if self._strategy.counts_gates else None)
            self._held.callback(self._counter.close)
        self._boost = RouterCapacity(training.chunks, config.capacity_boost) if self._strategy.makes_up else None
        if self._boost is not None:
            self._held.callback(self._boost.close)
        self._episode: RecoveryTimeline | None = None
        self._timestamps.mark(Milestone.BUILT)

    def _check_versions(self) -> None:
        strategy = self._config.strategy
        for line in check_versions(found_versions(), strategy if STRATEGIES[strategy].replays else None):
            if self._rank == 0:
                log.warning("%s", line)

    def _choose_strategy(self) -> None:
        """The strategy, which plans from sizes of all ranks, and who keeps whose replicas."""
        config, training = self._config, self._training
        self._job = Job(
            config,
            model_operators(training.chunks),
            self._topology,
            training.tokens_per_iteration,
            training.iterations,
            training.topk,
            tied_embeddings=self._state.ties_embeddings,
            sizes=gathered_sizes(self._state.capturer, self._control),
            drops_tokens=bool(self._control.total([int(drops_tokens(training.chunks))])[0]),
        )
        self._strategy = self._together(lambda: STRATEGIES[config.strategy](self._job))
        placement = self._together(lambda: replicas_placed(config, self._topology))
        self._peers, self._owners = placement.peers[self._rank], placement.kept_by[self._rank]

    def _open_memory(self) -> None:
        config, place, state = self._config, self._place, self._state
        self._memory = RankMemory(
            config, place, self._job, self._strategy, state, self._training, self._control, self._owners, self._clock
        )
        self._held.callback(self._memory.close)
        self._memory.open()
        self._survivor = self._memory.survivor
        if self._survivor is not None:
            self._held.callback(self._survivor.end, keep_memory=True)

    def _prepare_recovery(self, execution: Execution | None) -> None:
        self._times_left = left_in(self._memory.store.directory)
        ports = RecoveryPorts(
            self._memory.store,
            self._persistent,
            self._patient,
            self._state.restorer,
            self._training.trainer,
            self._clock,
            execution=execution,
            make_room=self._memory.make_room,
            standby=self._survivor.store if self._survivor is not None else None,
            boundary=self._memory.stage_source,
            timestamps=self._timestamps,
            notes=DivergenceNotes(self._memory.store.directory),
        )
        self._recovery = Recovery(self._job, self._strategy, ports, self._identity, self._owners)
        self._held.callback(self._recovery.close)
        if execution is not None:
            self._held.callback(execution.thaw)
        self._restart = RestartSequence(self._recovery, self._identity, self._strategy, self._survivor, self._rank)

    def refresh(self) -> None:
        """Enumerate the training state anew, as is needed after a checkpoint was loaded in another way."""
        self._state.refresh()
        if self._survivor is not None:
            self._survivor.live = self._state.live

    def look(self) -> RecoveryPlan | None:
        """What an earlier attempt left and what can be made of it; None when that is nothing."""
        return self._recovery.look()

    def carry_out(self) -> RecoveryOutcome | Replay | Waiting | None:
        """Restore what `look` planned; None when all copies proved damaged: then the live state is unusable.

        A Replay where iterations have to be run again before the state is dense, on the ranks of the stages that do;
        Waiting on the others, if there are any.
        """
        result = self._recovery.carry_out()
        self._restart.assign(result)
        return result

    def discard(self) -> None:
        """Training goes on from another state than any in memory: all that is there is freed."""
        self._recovery.discard()  # also anew: what the strategy learned from a recovery that came to nothing
        self._strategy = STRATEGIES[self._config.strategy](self._job)
        self._memory.fit_strategy(self._strategy)

    def clear_counters(self) -> None:
        """After a `carry_out` that came to nothing: what routers count has no place in a checkpoint that is loaded."""
        self._state.clear_counters()

    def begin(self, iteration: int) -> None:
        """Protect training, which stands after `iteration`, or make ready for what comes before `rejoin`."""
        if not self._restart.prepare(iteration):
            self._protect(iteration)

    def stepped(self, step: StepJournal) -> None:
        """An iteration was replayed: progress, schedules and random states become those that were recorded of it.

        Raises ReplayDiverged when the iteration came out otherwise than recorded: leave then, so that the next start
        of the job takes another way back.
        """
        self._restart.replayed(step)

    def rejoin(self) -> bool:
        """Wait until all ranks stand at one iteration, and protect training from there on; whether it recovered."""
        if self._coordinator is None:
            outcome = self._restart.rejoin()
            if self._counter is not None:
                self._counter.take()  # these tokens were counted when the iterations ran first
            self._protect(outcome.plan.target)
        return self._restart.outcome is not None

    @property
    def is_replaying(self) -> bool:
        """Whether training runs iterations again to make its state dense: nothing may be saved meanwhile."""
        return self._restart.is_replaying

    @property
    def replays_alone(self) -> bool:
        """Whether it does so while other stages of the pipeline wait."""
        return self._restart.replay is not None and self._restart.replay.alone

    @property
    def repeats_steps(self) -> bool:
        """Whether the recovery runs iterations, or steps, again on any rank; the same on all."""
        return self._restart.repeats_steps

    @property
    def communicator(self) -> BoundaryCommunicator | None:
        """Through which the stages of the pipeline have to send; None: core's own."""
        return self._survivor.communicator if self._survivor is not None else None

    @property
    def is_own(self) -> bool:
        """Whether what `look` planned is a state that this very job left."""
        return self._recovery.is_own

    @property
    def unusable(self) -> str:
        """Why snapshots in storage cannot be used by this job; empty if there are none of that kind."""
        return self._recovery.unusable

    @property
    def diverged(self) -> tuple[str, ...]:
        """Replays of earlier attempts that came out otherwise than recorded, in words."""
        return tuple(map(str, self._recovery.diverged))

    @property
    def newest_iteration(self) -> int:
        """The newest iteration of which an earlier attempt left anything; -1 where none did."""
        return self._recovery.newest_iteration

    def _protect(self, iteration: int) -> None:
        self._patient.close()
        outcome = self._restart.outcome
        timeline = continued(outcome.timeline if outcome is not None else (), self._attempt, iteration)
        identity = replace(self._identity, timeline=timeline)
        self._coordinator = self._protection(identity)
        self._status = StatusBoard(self._memory.store.directory, _get_default_store(), self._status_facts())
        self._held.callback(self._status.close)
        if outcome is not None:
            self._coordinator.resume(outcome.restored)
        if self._boost is not None:
            self._boost.owe(self._strategy.owed)
        if self._survivor is not None:
            self._survivor.attend(identity, iteration)
            self._memory.fit_logs()
            if self._rank == 0:
                budget = self._survivor.parking_budget()
                log.info("%s", budget)
                if not budget.fits:
                    log.warning("that may not suffice for all ranks of a node at once: %s", PATIENCE_ADVICE)
        self._timestamps.mark(Milestone.REJOINED)
        if outcome is not None:
            times = self._timestamps, self._times_left
            episode = gather_timeline(self._control, *times, outcome.plan, self._topology)
            self._episode = episode.with_outcome(outcome.table)
            for line in self._episode.lines() if self._rank == 0 else ():
                log.info("%s", line)
        forget(self._memory.store.directory)

    def _protection(self, identity: Identity) -> Coordinator:
        """What copies, replicates, keeps and persists snapshots under this name."""
        memory, clock, owners, capturer = self._memory.store, self._clock, self._owners, self._state.capturer
        trainer, release, specs = self._training.trainer, self._state.release_segments, self._memory.specs
        ports = Ports(
            memory,
            capturer,
            trainer,
            self._control,
            ThreadExecutor,
            clock,
            owners,
            specs,
            release,
            self._memory.log_bytes,
            self._memory.room,
            self._memory.standby_bytes,
            self._config.strict,
            CudaStopwatch() if self._state.on_device else None,
            self._step_recorder(),
        )
        replicator = Replicator(self._data, self._peers, owners) if self._peers or owners else None
        worker = ReplicationWorker(
            memory, replicator, self._data, clock, identity, owners=owners, sends_steps=self._follows
        )

        def layout(piece: Piece, index: int) -> Layout:
            return capturer.layout(piece.plan, trainer=index == 0)

        persister = None
        if self._persistent is not None:
            persister = Persister(memory, self._persistent, self._rank, identity, layout, clock=clock)
        return Coordinator(self._job, self._strategy, ports, worker, persister)

    def _step_recorder(self) -> AdamSteps | None:
        """What records steps for peers that follow them."""
        if not self._follows:
            if self._config.replicate != "state" and self._rank == 0:
                log.warning("--moe-ckpt-replicate %s has no effect: no replicas are kept", self._config.replicate)
            return None
        steps = AdamSteps(self._training.optimizer, self._state.live.stepped)
        self._held.callback(steps.close)
        if self._rank == 0:
            log.info("gradients for peers take at most %.3f GB of this process", steps.most_bytes / 1e9)
        return steps

    def passes(self, iteration: int) -> None:
        """The passes of an iteration begin."""
        if self._survivor is not None:
            replay = self._restart.replay  # what it sends again is in this rank's logs already, but for lost ones
            self._survivor.passes(iteration, logged=replay is None or iteration in replay.unlogged)

    def reduced(self) -> None:
        """They are over, and gradients reduced."""
        if self._survivor is not None:
            self._survivor.reduced()

    def before_optimizer(self) -> float:
        """See `Coordinator.before_optimizer`; nothing is under way in a replay."""
        return self._coordinator.before_optimizer() if self._coordinator is not None else 0.0

    def stepping(self, iteration: int, loss: float | None, num_tokens: int | None) -> AbstractContextManager[None]:
        """A block for the optimizer's step and what belongs to it.

        loss: of the iteration, where it is known. num_tokens: as in `StepJournal`.
        """
        return self._survivor.stepping(iteration, loss, num_tokens) if self._survivor is not None else nullcontext()

    def whole(self, iteration: int, journal: StepJournal) -> None:
        """The state after `iteration` is complete."""
        if self._survivor is not None and not self.is_replaying:
            self._survivor.whole(iteration, journal)

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """See `Coordinator.step_end`."""
        assert self._coordinator is not None
        if self._survivor is not None:
            self._memory.fit_logs()  # before the next snapshot begins, so that no copy is under way
        counts = self._counter.take() if self._counter else None
        if self._boost is None:
            self._coordinator.step_end(iteration, counts, journal)
        else:
            self._coordinator.step_end(iteration, counts, journal, self._boost.take())
            self._boost.owe(self._strategy.owed)
        if self._survivor is not None:
            self._survivor.committed(iteration, journal, self._coordinator.oldest_base)

    def reported(self, iteration: int) -> None:
        """The numbers of an iteration were written down."""
        if self._survivor is not None:
            self._survivor.reported(iteration)

    @property
    def unreported(self) -> StepJournal | None:
        """How the iteration of the recovered state came out, where its numbers were not written down on this rank."""
        if self._survivor is None or self._restart.outcome is None:
            return None
        return self._survivor.unreported(self._restart.outcome.plan.target)

    @property
    def episode(self) -> RecoveryTimeline | None:
        """The timeline of the recovery that training goes on from."""
        return self._episode

    def report(self) -> ProtectionReport:
        """See `Coordinator.report`."""
        assert self._coordinator is not None
        report = self._coordinator.report()
        if self._status is not None:
            self._status.show(report)
        return report

    @property
    def job_id(self) -> str:
        """On which all ranks have agreed."""
        return self._place.job_id

    @property
    def links(self) -> PeerLinks | None:
        """Which close when a peer is lost."""
        return self._links

    def interrupt(self, *, force: bool) -> bool:
        """See `StepGuard.interrupt`; called by another thread. Where nothing is parked, no step needs protection."""
        return self._survivor is None or self._survivor.interrupt(force=force)

    def failure(self, cause: Cause) -> None:
        """Training ends here with an error: nothing new is begun, what is sealed stays, and what is whole is parked.

        Called when the connections to other ranks are closed."""
        if self._boost is not None:
            self._boost.close()
        self._timestamps.mark(Milestone.DETECTED)
        if self._status is not None:
            self._status.close()
        if self._coordinator is not None:
            self._coordinator.failure()
        if self._survivor is not None:
            problem = self._survivor.park(cause, self._strategy.to_data(), dict(self._timestamps.times()))
            if problem:
                log.info("rank %d: %s", self._rank, problem)
        self._timestamps.mark(Milestone.PARKED)
        self._timestamps.leave(self._memory.store.directory, self._attempt)

    def abandon(self) -> bool:
        """After `failure`, where this process stays: let go of all that another session in it takes up again.

        Live state and what is sealed in memory stay as they are. Whether all work beside training has come to an end;
        else this process must not go on.
        """
        has_ended = self._coordinator is None or self._coordinator.abandon()
        try:
            self._held.close()
        except Exception as error:  # connections are lost: whoever speaks through them fails
            log.debug("while a session was given up: %s", format_error(error))
        return has_ended

    def shutdown(self, *, keep_memory: bool) -> None:
        """See `Coordinator.shutdown`; gives the memory back to the node unless it is to be kept for another start."""
        assert self._coordinator is not None
        if self._status is not None:
            self._status.close()
        self._coordinator.shutdown()
        if self._boost is not None:
            self._boost.close()
        if self._survivor is not None:
            self._survivor.end(keep_memory=keep_memory)
        if keep_memory:
            self._memory.store.close()
        else:
            self._memory.store.remove()
            with suppress(OSError):  # other processes of the node may still be there
                (memory_folder(self._config) / self._place.node).rmdir()
        for transport in (self._control, self._data):
            transport.close()

    def _status_facts(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._topology.world_size,
            "node": self._place.node,
            "job": self._place.job_id,
            "strategy": self._config.strategy,
        }

    def _together(self, work: Callable[[], T]) -> T:
        return raise_on_all_ranks(self._control, work)
