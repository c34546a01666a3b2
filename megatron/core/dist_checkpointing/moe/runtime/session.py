"""Checkpointing of one training process from start to end: real ports around the coordinator and the recovery."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.distributed_c10d import _get_default_store

from ..capture.popularity import TokenCounter
from ..config import MoECheckpointConfig
from ..policy.parking import Cause
from ..policy.strategies import GATE_UNIT, STRATEGIES, Job
from ..policy.timelines import continued
from ..recover.episode import Episode, gather_episode
from ..recover.marks import Mark, Marks, forget, left_in
from ..replay.densify import Replay
from ..replay.stage import StageSource
from ..replicate.process_group import ProcessGroupTransport
from ..replicate.replicator import Replicator
from ..snapshot.identity import Identity
from ..snapshot.replication_worker import ReplicationWorker
from ..types import RecoveryPlan, StepJournal
from .clock import SystemClock
from .comeback import Comeback
from .communicator import BoundaryCommunicator
from .coordinator import Coordinator, Ports, ProtectionReport
from .lanes import ThreadLane
from .model_operators import model_operators
from .opening import layout_told, opened_memory, placed_topology, together
from .persister import Persister
from .places import Place, drop_memory, open_persistent, replicas_placed
from .recovery import Outcome, Recovery, RecoveryPorts, Waiting
from .rooms import account_of, fit_memory, gathered_sizes, segment_sizes
from .standby import Standby, StandbyRoom, park_sizes
from .training import LiveState, Training

log = logging.getLogger(__name__)

Value = TypeVar("Value")

RECOVERY_PATIENCE = 12
"""How many times `--moe-ckpt-timeout-s` a rank may take to read its state during a recovery."""


class Session:
    """In this order, each a collective over all ranks: the constructor, `look`, then `carry_out` or `discard`, `begin`;
    on the ranks where `is_replaying`, iterations that end with `stepped`; `rejoin`; then iterations that end with
    `step_end`; at last `shutdown`, or `failure` on each rank that fails.

    In every iteration: `passes`, `reduced`, `before_optimizer`, a block of `stepping`, `whole`, one of the two ends,
    `reported`. marks: when this process passed the points of its start.
    Raises UsageError, on all ranks alike, for flags, models and folders that cannot work.
    """

    def __init__(
        self, config: MoECheckpointConfig, training: Training, place: Place, marks: Marks | None = None
    ) -> None:
        self._config, self._training, self._place = config, training, place
        self._marks = marks or Marks()
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store = _get_default_store()  # of this attempt: addresses of earlier ones would mislead
        self._control, self._data = (
            ProcessGroupTransport(store, rank, world_size, f"moe-ckpt-{name}", config.timeout_s)
            for name in ("control", "data")
        )
        # Ranks wait here for others that read from slow storage; a dead one is noticed at once all the same.
        self._patient = ProcessGroupTransport(
            store, rank, world_size, "moe-ckpt-recovery", RECOVERY_PATIENCE * config.timeout_s
        )
        self._rank, self._clock = rank, SystemClock()
        self._standby: Standby | None = None
        self._topology = self._together(lambda: placed_topology(self._control, place))
        self._state = self._together(lambda: LiveState(training, self._topology, config.shard, rank))
        self._job = Job(
            config,
            model_operators(training.chunks),
            self._topology,
            training.tokens_per_iteration,
            training.iterations,
            training.topk,
            tied_embeddings=self._state.ties_embeddings,
            sizes=gathered_sizes(self._state.capturer, self._control),
        )
        self._strategy = self._together(lambda: STRATEGIES[config.strategy](self._job))
        placement = self._together(lambda: replicas_placed(config, self._topology))
        self._peers, self._owners = placement.peers[rank], placement.kept_by[rank]
        self._rooms = self._strategy.rooms()
        self._persistent = self._together(lambda: open_persistent(config, rank))
        # What cannot be replayed is refused before it is needed.
        self._execution = self._together(self._state.execution) if self._strategy.replays else None
        sizes = segment_sizes(self._rooms, self._state.capturer, self._control, self._owners)
        self._memory = opened_memory(config, place, sizes, self._control)
        self._standby = self._opened_standby()
        if rank == 0:
            log.info("%s", account_of(self._rooms, self._job, rank, len(self._owners), self._log_bytes()))
        told = layout_told(self._topology, config.shard)
        self._identity = Identity(place.job_id, told, self._state.capturer.operators, config.strategy)
        # Sorts by time, and differs even between attempts that start in the same instant.
        self._attempt = str(self._control.gather(f"{time.time_ns():020d}-{secrets.token_hex(4)}")[0])
        self._comeback: Comeback | None = None
        self._coordinator: Coordinator | None = None
        self._counter = None
        if self._strategy.counts_tokens:
            self._counter = TokenCounter(training.chunks, gate_unit=GATE_UNIT if self._strategy.counts_gates else None)
        self._episode: Episode | None = None
        self._left = left_in(self._memory.directory)
        self._marks.mark(Mark.BUILT)

    def refresh(self) -> None:
        """Enumerate the training state anew, as is needed after a checkpoint was loaded in another way."""
        self._state.refresh()
        if self._standby is not None:
            self._standby.live = self._state.live

    def look(self) -> RecoveryPlan | None:
        """What an earlier attempt left and what can be made of it; None when that is nothing."""
        ports = RecoveryPorts(
            self._memory,
            self._persistent,
            self._patient,
            self._state.restorer,
            self._training.trainer,
            self._clock,
            execution=self._execution,
            make_room=self._make_room,
            standby=self._standby.store if self._standby is not None else None,
            boundary=lambda logs: StageSource(logs, torch.cuda.current_device()),
            marks=self._marks,
        )
        recovery = Recovery(self._job, self._strategy, ports, self._identity, self._owners)
        self._comeback = Comeback(recovery, self._identity, self._strategy, self._standby, self._rank)
        return self._comeback.look()

    def carry_out(self) -> Outcome | Replay | Waiting | None:
        """Restore what `look` planned; None when all copies proved damaged: then the live state is unusable.

        A Replay where iterations have to be run again before the state is dense, on the ranks of the stages that do;
        Waiting on the others, if there are any.
        """
        assert self._comeback is not None
        return self._comeback.carry_out()

    def discard(self) -> None:
        """Training goes on from another state than any in memory: all that is there is freed."""
        assert self._comeback is not None
        self._comeback.discard()
        self._strategy = STRATEGIES[self._config.strategy](self._job)  # a vain recovery may have taught it something

    def clear_counters(self) -> None:
        """After a `carry_out` that came to nothing: what routers count has no place in a checkpoint that is loaded."""
        self._state.clear_counters()

    def begin(self, iteration: int) -> None:
        """Protect training from here on; it stands after `iteration`. Where iterations have to be run again first, or
        others do that, make ready for it; `rejoin` does the rest."""
        if self._comeback is None or not self._comeback.begin(iteration):
            self._protect(iteration)

    def stepped(self, step: StepJournal) -> None:
        """In place of `step_end` after an iteration that was replayed.

        Training's progress, schedules and random states are those of the recorded iteration afterwards. Raises
        MoECheckpointError when the iteration came out otherwise than recorded.
        """
        assert self._comeback is not None
        self._comeback.stepped(step)

    def rejoin(self) -> bool:
        """Wait until all stages stand where the others do, and protect training from there on; whether there was
        anything to recover from."""
        if self._coordinator is None:
            assert self._comeback is not None
            outcome = self._comeback.rejoin()
            if self._counter is not None:
                self._counter.take()  # these tokens were counted when the iterations ran first
            self._protect(outcome.plan.target)
        return self._outcome is not None

    @property
    def is_replaying(self) -> bool:
        """Whether training runs iterations again to make its state dense: nothing may be saved meanwhile."""
        return self._comeback is not None and self._comeback.is_replaying

    @property
    def replays_alone(self) -> bool:
        """Whether it does so while other stages of the pipeline wait."""
        return self._comeback is not None and self._comeback.replays_alone

    @property
    def repeats_steps(self) -> bool:
        """Whether the recovery runs iterations, or steps, again on any rank; the same on all."""
        return self._comeback is not None and self._comeback.repeats_steps

    @property
    def communicator(self) -> BoundaryCommunicator | None:
        """Through which the stages of the pipeline have to send; None: as ever."""
        return self._standby.communicator if self._standby is not None else None

    @property
    def is_own(self) -> bool:
        """Whether what `look` planned is a state that this very job left."""
        return self._comeback is not None and self._comeback.is_own

    @property
    def unusable(self) -> str:
        """Why snapshots in storage cannot be used by this job; empty if there are none of that kind."""
        return self._comeback.unusable if self._comeback else ""

    @property
    def _outcome(self) -> Outcome | None:
        return self._comeback.outcome if self._comeback is not None else None

    def _protect(self, iteration: int) -> None:
        self._patient.close()
        before = self._outcome.timeline if self._outcome is not None else ()
        identity = replace(self._identity, timeline=continued(before, self._attempt, iteration))
        self._coordinator = self._protection(identity)
        if self._outcome is not None:
            self._coordinator.resume(self._outcome.restored)
        if self._standby is not None:
            self._standby.attend(identity, iteration)
            self._standby.fit(self._strategy.lookback)
        self._marks.mark(Mark.REJOINED)
        if self._outcome is not None:
            earlier, plan = self._left, self._outcome.plan
            self._episode = gather_episode(self._control, self._marks, earlier, plan, self._topology)
            for line in self._episode.lines() if self._rank == 0 else ():
                log.info("%s", line)
        forget(self._memory.directory)

    def _protection(self, identity: Identity) -> Coordinator:
        """What copies, replicates, keeps and persists snapshots under this name."""
        memory, clock, owners, capturer = self._memory, self._clock, self._owners, self._state.capturer
        ports = Ports(
            memory,
            capturer,
            self._training.trainer,
            self._control,
            ThreadLane,
            clock,
            owners,
            self._rooms,
            self._state.release_segments,
            self._log_bytes,
        )
        replicator = Replicator(self._data, self._peers, owners) if self._peers or owners else None
        worker = ReplicationWorker(memory, replicator, self._data, clock, identity, owners=owners)
        persister = None
        if self._persistent is not None:
            persister = Persister(
                memory,
                self._persistent,
                self._rank,
                identity,
                lambda piece, index: capturer.layout(piece.plan, trainer=index == 0),
                clock=clock,
            )
        return Coordinator(self._job, self._strategy, ports, worker, persister)

    def passes(self, iteration: int) -> None:
        """The passes of an iteration begin."""
        if self._standby is not None:
            self._standby.passes(iteration, logged=self._comeback is None or self._comeback.logs(iteration))

    def reduced(self) -> None:
        """They are over, and gradients reduced."""
        if self._standby is not None:
            self._standby.reduced()

    def before_optimizer(self) -> float:
        """See `Coordinator.before_optimizer`; nothing is under way in a replay."""
        return self._coordinator.before_optimizer() if self._coordinator is not None else 0.0

    def stepping(self, iteration: int, loss: float | None, num_tokens: int | None) -> AbstractContextManager[None]:
        """A block for the optimizer's step and what belongs to it.

        loss: of the iteration, where it is known. num_tokens: as in `StepJournal`.
        """
        return self._standby.stepping(iteration, loss, num_tokens) if self._standby is not None else nullcontext()

    def whole(self, iteration: int, journal: StepJournal) -> None:
        """The state after `iteration` is complete."""
        if self._standby is not None and not self.is_replaying:
            self._standby.whole(iteration, journal)

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """See `Coordinator.step_end`."""
        assert self._coordinator is not None
        self._coordinator.step_end(iteration, self._counter.take() if self._counter else None, journal)
        if self._standby is not None:
            self._standby.committed(iteration, journal, self._coordinator.oldest_base)
            self._standby.fit(self._strategy.lookback)

    def reported(self, iteration: int) -> None:
        """The numbers of an iteration were written down."""
        if self._standby is not None:
            self._standby.reported(iteration)

    @property
    def unreported(self) -> StepJournal | None:
        """How the iteration of the recovered state came out, where its numbers were not written down on this rank."""
        if self._standby is None or self._outcome is None:
            return None
        return self._standby.unreported(self._rank, self._outcome.plan.target)

    @property
    def episode(self) -> Episode | None:
        """The timeline of the recovery that training goes on from."""
        return self._episode

    def report(self) -> ProtectionReport:
        """See `Coordinator.report`."""
        assert self._coordinator is not None
        return self._coordinator.report()

    def failure(self, cause: Cause) -> None:
        """Training has failed on this rank or heard that a peer did: nothing new is begun, what is sealed stays, and
        what is whole is parked. Called when the connections to other ranks are closed."""
        self._marks.mark(Mark.DETECTED)
        if self._coordinator is not None:
            self._coordinator.failure()
        if self._standby is not None:
            told = self._standby.park(cause, self._strategy.to_data(), dict(self._marks.times()))
            if told:
                log.info("rank %d: %s", self._rank, told)
        self._marks.mark(Mark.PARKED)
        self._marks.leave(self._memory.directory, self._attempt)

    def shutdown(self, *, keep_memory: bool) -> None:
        """See `Coordinator.shutdown`; gives the memory back to the node unless it is to be kept for another start."""
        assert self._coordinator is not None
        self._coordinator.shutdown()
        if self._standby is not None:
            self._standby.end(keep_memory=keep_memory)
        if keep_memory:
            self._memory.close()
        else:
            self._memory.remove()
            with suppress(OSError):
                self._memory.directory.parents[1].rmdir()  # the node's; others of its processes may still be there
        for transport in (self._control, self._data):
            transport.close()

    def _opened_standby(self) -> Standby | None:
        """What makes local recovery possible; None where it cannot be: without pipeline stages, or without replays."""
        config, passes = self._config, self._training.passes
        if not self._strategy.replays or self._topology.pp == 1 or config.recovery == "global" or passes is None:
            self._together(lambda: drop_memory(config, self._place, "standby"))
            return None
        plan = passes.log_plan(self._topology, self._rank, self._strategy.lookback)
        mine = [*park_sizes(self._state.live, self._clock), plan.layout(passes.microbatches).nbytes]
        *parked, logged = (-least for least in self._control.least([-nbytes for nbytes in mine]))
        room = StandbyRoom(tuple(parked), logged)
        beside = (self._memory,)
        store = opened_memory(config, self._place, room.sizes(plan), self._control, area="standby", beside=beside)
        return Standby(store, room, self._state.live, plan, passes, self._clock, config.timeout_s)

    def _log_bytes(self) -> int:
        return self._standby.log_bytes if self._standby is not None else 0

    def _make_room(self) -> None:
        """Fit the memory to what the strategy needs once it knows what it knew before a fault; a collective."""
        rooms = self._strategy.rooms()
        if rooms != self._rooms:
            sizes = segment_sizes(rooms, self._state.capturer, self._control, self._owners)
            done, why = fit_memory(self._memory, sizes, self._control, self._state.release_segments)
            self._rooms = rooms if done else self._rooms
            if why:
                log.error("rank %d: %s", self._rank, why)

    def _together(self, action: Callable[[], Value]) -> Value:
        return together(self._control, action)
