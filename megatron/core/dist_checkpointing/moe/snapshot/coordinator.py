"""The order of events of checkpointing: what training calls, and what happens then.

step_end(t)          plan(t); copies begin; the message of this rank goes out
forward, backward    copies run, the messages of all ranks arrive
before_optimizer()   copies have ended (waiting here is the stall); the tracker takes in what all ranks have agreed on
beside training      replication worker: seal, replicate, free        persister: write to storage, free there
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high

from ..errors import MoECheckpointError
from ..extensions import Additions
from ..policy.lifecycle import Protection, ProtectionState
from ..policy.tracking import RestoredState
from ..ports import (
    Capturer,
    Clock,
    Executor,
    Json,
    Layout,
    MappedStore,
    MappedWriter,
    Pace,
    PeerLost,
    RecordedStep,
    SnapshotId,
    Stopwatch,
    StoreFailure,
    TrainerState,
    Transport,
)
from ..strategies import BufferSpec, Costs, Job, LossReport, Piece, Strategy, Throughput
from ..strategies.memory_report import CopyRate, MemoryReport
from ..types import SnapshotPlan, StepJournal, WaitReport
from .copy_engines import Throttle
from .iteration_message import HostStopwatch, IterationMessage, MessageExchange, PassTimes
from .memory_limit import BufferAllocator, MemoryBound, memory_report_of
from .persister import Persister
from .tracker import SnapshotTracker
from .workers import BackgroundWork, ReplicationWorker, SnapshotTask

log = logging.getLogger(__name__)

CLOSING_PAUSE_S = 0.5
"""How long the ranks wait at the end of training before they ask each other again what is still under way."""
_REMEMBERED = 16
"""Iterations that say how long the next one takes."""

TokenCounts = Mapping[int, Sequence[int]]
CountsUnderWay = Callable[[], TokenCounts]
CountRows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Ports:
    """What the coordinator works with.

    Args:
        memory: keeps snapshots.
        control: carries the messages.
        executor: makes a thread of this name that does one thing after the other.
        owners: ranks whose replicas this one keeps.
        buffer_specs: for which `memory` was opened; None: what the strategy asks for.
        log_bytes: what boundary logs take beside it.
        room: how much each rank may take in all.
        standby_bytes: what logs of so many iterations, and parked state, take beside `memory`.
        stopwatch: tells for how long training waits; None: `clock` does.
        strict: whether less protection than was asked for ends training.
        added: what extensions bring.
        before_snapshot: called when a step has ended, while no copy is under way.
        counts: takes what gives the routed tokens of the iteration that ends, by layer and from any thread.
        after_snapshot: called when the copies of an iteration have begun, with its journal.
    """

    memory: MappedStore
    capturer: Capturer
    trainer: TrainerState
    control: Transport
    executor: Callable[[str], Executor]
    clock: Clock
    owners: Sequence[int] = ()
    buffer_specs: tuple[BufferSpec, ...] | None = None
    log_bytes: Callable[[], int] = lambda: 0
    room: Callable[[], MemoryBound] = MemoryBound
    standby_bytes: Callable[[int], int] = lambda logged: 0
    strict: bool = False
    stopwatch: Stopwatch | None = None
    added: Additions = field(default_factory=Additions)
    before_snapshot: Callable[[], None] = lambda: None
    counts: Callable[[], CountsUnderWay] | None = None
    after_snapshot: Callable[[int, StepJournal], None] = lambda iteration, journal: None

    @property
    def taker(self) -> BufferAllocator:
        """With what memory is taken."""
        places = self.memory, self.capturer, self.control, self.owners
        return BufferAllocator(*places, self.room, self.standby_bytes, self.strict)


@dataclass(frozen=True)
class ProtectionReport:
    """What checkpointing did since the last report, and how safe training is; for metrics.

    Args:
        protection: by replicas in memory.
        persistent: by copies in storage; None where there is no storage.
        tokens: by iteration, the tokens that all ranks routed, per MoE layer and expert, as far as they became known.
        memory: what checkpoints take on this rank.
        passes_s: of the last iteration whose passes have come to an end, without what it waited.
        slowed_s: by how much copies beside them made the last such passes longer; None where that is not known.
        protected_iteration, persisted_iteration: the newest that has all its replicas, and the newest in storage, as
            far as this attempt of the job knows.
        persisted_bytes: written to storage by this rank.
        reason: why a tier has less protection than was asked for; empty where none has.
        order_changes: how often this attempt changed the order in which operators are snapshotted.
        iteration: the newest whose step has ended.
        losses: what all faults so far have cost; None where the strategy loses nothing.
        spared_bytes: of the replicas that peers got, what they made from what they hold or from gradients.
        waits: of each pipeline stage, one iteration late; none where nobody looks at them.
    """

    stall_s: float
    snapshot_bytes: int
    replicated_bytes: int
    protection: Protection
    persistent: Protection | None
    tokens: tuple[tuple[int, CountRows], ...] = ()
    memory: MemoryReport | None = None
    passes_s: float = 0.0
    slowed_s: float | None = None
    protected_iteration: int | None = None
    persisted_iteration: int | None = None
    persisted_bytes: int = 0
    reason: str = ""
    order_changes: int = 0
    iteration: int = 0
    losses: LossReport | None = None
    waits: tuple[WaitReport, ...] = ()
    spared_bytes: int = 0


@dataclass
class _Tally:
    """Since the last report, and of the last iteration."""

    stall_s: float = 0.0
    snapshot_bytes: int = 0
    tokens: tuple[tuple[int, CountRows], ...] = ()
    last_stall_s: float = 0.0
    copy_stall_s: float = 0.0
    iteration_s: float = 0.0


class Coordinator:
    """Keeps one rank protected; all ranks make the same calls. Every method may raise MoECheckpointError:

    CheckpointFailure with `--moe-ckpt-strict`, or a sentence that says that the ranks do not agree, which is a defect.
    """

    def __init__(
        self, job: Job, strategy: Strategy, ports: Ports, worker: ReplicationWorker, persister: Persister | None
    ) -> None:
        self._job, self._strategy, self._ports = job, strategy, ports
        self._worker, self._persister = worker, persister
        self._background = BackgroundWork(ports.executor, timeout_s=job.config.timeout_s, strict=job.config.strict)
        self._messages = MessageExchange(ports.control, self._background.control, ports.clock)
        self._tracker = SnapshotTracker(job, strategy, worker, persister, self._background)
        self._buffer_specs = strategy.buffer_specs() if ports.buffer_specs is None else ports.buffer_specs
        self._memory_report = self._reported_memory()
        self._copying: SnapshotTask | None = None
        self._journal = StepJournal()
        self._in_contact, self._copies_late = True, False
        self._tally, self._step_ended_s = _Tally(), ports.clock.now_s()
        self._iterations_s = deque[float](maxlen=_REMEMBERED)
        self._stopwatch = ports.stopwatch or HostStopwatch(ports.clock)
        self._pass_times = PassTimes()
        self._copy_rate = CopyRate.parse(job.config.copy_rate)
        self._iteration = 0

    def resume(self, state: RestoredState) -> None:
        """Continue after a recovery; what lost its replicas with a node is replicated again, beside training."""
        self._iteration = state.target
        self._tracker.resume(state)

    def step_end(self, iteration: int, journal: StepJournal) -> None:
        """After the optimizer's step (and evaluation) of an iteration.

        Args:
            iteration: Whose state is complete.
            journal: The outcome of the step, which a replay needs.
        """
        ports, tally = self._ports, self._tally
        # First, while no copy is under way: this may unmap memory.
        ports.before_snapshot()
        added = ports.added
        # Closes the counts of this iteration. They may still be on the device: the thread that sends reads them.
        counts, beyond = ports.counts and ports.counts(), added.beyond and added.beyond()
        begun_s = ports.clock.now_s()
        self._pass_times.look()
        self._stopwatch.pause()
        # Without the time that training waited for copies, which the message tells by itself.
        tally.iteration_s = begun_s - self._step_ended_s - tally.last_stall_s
        self._step_ended_s, self._iteration = begun_s, iteration
        # Failures of background work are raised here: the step has ended, so live state is whole.
        self._background.check()
        pace = (
            Throughput(self._pass_times.newest_s, ports.capturer.bandwidth_bytes_per_s, self._tracker.peer_bytes_per_s)
            if self._strategy.needs_throughput
            else None
        )
        step = added.steps.take(journal) if added.steps is not None else None
        plan = self._planned(iteration)
        if plan is not None:
            task, copies = self._opened(plan, {"trainer": ports.trainer.scalars()}, step)
            self._journal = journal
            # Noted before the copies begin: where `begin` raises, `failure` still finds the task and gives it up.
            self._copying = task
            if task.writers is not None:
                nbytes = sum(layout.nbytes for layout, _ in copies)
                ports.capturer.begin(copies, self._pace(nbytes))
                tally.snapshot_bytes += nbytes
        # After `_opened`, which has opened the round on every rank, also on one without room: the message has one
        # status per open round, and the collective needs as many on all ranks.
        if self._in_contact:
            beyond = beyond if self._strategy.deferred_tokens else None
            # Training waits for the message before its next step, which no evaluation or save puts off as it did this
            # one: most of the newest iterations had neither.
            self._iterations_s.append(tally.iteration_s)
            usual_s = median_high(self._iterations_s)
            patience_s = min(tally.iteration_s, usual_s, self._job.config.timeout_s / 2) / 2
            self._send_message(plan, counts, patience_s, pace, beyond, skipped=journal.skipped)
            if (ahead := self._strategy.ahead()) is not None:
                self._background.control.submit(ahead)  # behind the message
        tally.last_stall_s = self._stopwatch.resume()
        tally.stall_s += tally.last_stall_s
        ports.after_snapshot(iteration, journal)

    def begins(self, iteration: int) -> bool:
        """Whether `step_end` of an iteration will begin a snapshot."""
        return self._in_contact and self._strategy.due(iteration) and self._tracker.may_begin(iteration)

    def before_optimizer(self) -> float:
        """Before the next optimizer step may change the state; returns the seconds for which training stood still."""
        lap = self._stopwatch.pause()
        # Copies first: the messages of all ranks arrive on another thread meanwhile.
        copied = self._end_copy()
        self._pass_times.launched(lap, copied=copied is not None)
        self._receive_messages()
        if copied is not None and not self._in_contact:
            copied.abandon()  # what the strategy has to remember of it is not known
        elif copied is not None:
            # Only now: the news of all ranks have changed what the strategy remembers, alike on all of them; and what
            # the journal says has come from the device, which has come to the end of the copies.
            journal, strategy = self._journal.to_data(), self._strategy.remembered()
            copied.remembered = lambda: {"journal": journal, "strategy": strategy()}
            self._tracker.copied(copied)
        stall_s = self._stopwatch.resume()
        self._tally.last_stall_s += stall_s
        self._tally.stall_s += stall_s
        if copied is not None:
            # Kept until the next copy: the round of this one may end some iterations later.
            self._tally.copy_stall_s = self._tally.last_stall_s
        return stall_s

    @property
    def newest_protected(self) -> int | None:
        """The newest iteration with all its replicas, as far as this attempt of the job knows."""
        return self._tracker.newest_protected

    @property
    def oldest_base(self) -> int | None:
        """The iteration from whose state the earliest replay may start; None while no window is kept."""
        return self._tracker.oldest_base

    def failure(self) -> None:
        """Training has failed on this rank or heard that a peer did: nothing new is begun, what is sealed stays."""
        self._in_contact = False
        copied = self._end_copy()
        if copied is not None:
            copied.abandon()
        self._worker.stop()
        # Not waited for: a thread may be waiting for the lost peer, and this rank has to park in time.
        self._background.close(wait=False)

    def abandon(self) -> bool:
        """After `failure`, in a process that stays: wait for what is under way; whether it came to an end."""
        if self._persister is not None:
            self._persister.stop()
        self._background.close(wait=True)
        return self._background.has_ended

    def shutdown(self) -> None:
        """The end of training: what is under way is brought to its end, on all ranks together."""
        try:
            self.before_optimizer()
            # Each turn has a collective. Open rounds are the same on all ranks, so all of them leave at the same turn.
            for _ in range(round(self._job.config.timeout_s / CLOSING_PAUSE_S)):
                if not self._in_contact or not self._tracker.rounds.open:
                    break
                self._send_message(None, None, CLOSING_PAUSE_S)
                self._receive_messages()
            self._background.drain()
        finally:
            if self._persister is not None:  # whoever finishes the rest writes the same folders
                self._persister.stop()
            self._background.close(wait=False)

    def report(self) -> ProtectionReport:
        """What was done since the last call."""
        report = ProtectionReport(
            stall_s=self._tally.stall_s,
            snapshot_bytes=self._tally.snapshot_bytes,
            replicated_bytes=self._tracker.take_replicated_bytes(),
            spared_bytes=self._tracker.take_spared_bytes(),
            protection=self._tracker.protection,
            persistent=self._tracker.durable,
            tokens=self._tally.tokens,
            memory=self._memory_report,
            passes_s=self._pass_times.newest_s,
            slowed_s=self._pass_times.slowed_s,
            protected_iteration=self._tracker.newest_protected,
            persisted_iteration=self._tracker.newest_persisted,
            persisted_bytes=self._tracker.take_persisted_bytes(),
            reason="; ".join(self._tracker.reasons.values()),
            order_changes=self._strategy.order_changes,
            iteration=self._iteration,
            losses=self._strategy.report(),
        )
        self._tally = replace(self._tally, stall_s=0.0, snapshot_bytes=0, tokens=())
        return report

    def _planned(self, iteration: int) -> SnapshotPlan | None:
        """What to snapshot, if anything."""
        if not self._in_contact:
            return None
        if not self._tracker.may_begin(iteration):
            if self._strategy.due(iteration):
                self._tracker.behind(iteration)
            return None
        plan = self._strategy.plan(iteration)
        specs = self._strategy.buffer_specs()
        if specs is self._buffer_specs or specs == self._buffer_specs:
            self._buffer_specs = specs  # the same object from here on: comparing operators again would take time
            return plan
        if plan is None:
            return None
        # All ranks come to this collective or none does: strategies plan from what all ranks know.
        try:
            return self._strategy.plan(iteration) if self._make_room() else plan
        except PeerLost as error:
            self._in_contact = False
            self._tracker.lost_contact(iteration, error)
            return None

    def _make_room(self) -> bool:
        """Give memory the segments that the strategy now asks for; whether it had to ask for less than it planned for.

        A collective over all ranks, while no message is under way. Raises PeerLost.
        """
        ports = self._ports
        self._buffer_specs, gave_up = ports.taker.fit(self._strategy, self._buffer_specs)
        report = self._reported_memory()
        if report != self._memory_report and ports.control.rank == 0:
            log.info("%s", report)
        self._memory_report = report
        return gave_up

    def _reported_memory(self) -> MemoryReport | None:
        ports = self._ports
        return memory_report_of(self._buffer_specs, self._job, ports.control.rank, len(ports.owners), ports.log_bytes())

    def _opened(
        self, plan: SnapshotPlan, scalars: Mapping[str, Json], step: RecordedStep | None
    ) -> tuple[SnapshotTask, list[tuple[Layout, MappedWriter]]]:
        """Reserve memory, and say what to copy where; without room this rank takes part in the round all the same."""
        pieces = self._strategy.pieces(plan)
        capturer = self._ports.capturer
        held = [
            (piece, capturer.layout(piece.plan, trainer=at == 0, among=plan))
            for at, piece in enumerate(pieces)
            if at == 0 or not piece.plan.parts.keys().isdisjoint(capturer.operators)  # looks at this rank's only
        ]
        task = SnapshotTask(plan, pieces, None, scalars, step=step)
        self._tracker.open(task)
        task.writers = self._reserved(task, held)
        return task, [(layout, writer) for (_, layout), writer in zip(held, task.writers or (), strict=False)]

    def _pace(self, nbytes: int) -> Pace:
        """When the chunks of a copy of so many bytes may begin."""
        passes_s = self._pass_times.shortest_s
        return self._ports.added.pace(nbytes, passes_s) or Throttle(self._copy_rate.of(nbytes, passes_s))

    def _reserved(self, task: SnapshotTask, held: Sequence[tuple[Piece, Layout]]) -> tuple[MappedWriter, ...] | None:
        writers: list[MappedWriter] = []
        try:
            # A copy that missed its deadline may still write to memory that was given up since: nothing is reserved
            # before it has ended. Without patience, as training waits here.
            if self._copies_late:
                self._ports.capturer.end(0.0)
                self._copies_late = False
            for piece, layout in held:
                name = SnapshotId(task.plan.iteration, self._ports.control.rank, piece.kind)
                self._ports.memory.free(name)  # of an attempt that training left behind, if any
                writers.append(self._ports.memory.reserve(name, layout))
        except (MoECheckpointError, TimeoutError) as error:
            task.failures.append(str(error))
            for writer in writers:
                writer.abandon()
            return None
        return tuple(writers)

    def _end_copy(self) -> SnapshotTask | None:
        copied, self._copying = self._copying, None
        if copied is not None and copied.writers is not None:
            try:
                self._ports.capturer.end(self._job.config.timeout_s)
            except (TimeoutError, StoreFailure) as error:
                # The memory is not used again as long as a late copy refers to it.
                self._copies_late = isinstance(error, TimeoutError)
                copied.failures.append(str(error))
                copied.abandon()
        return copied

    def _send_message(
        self,
        plan: SnapshotPlan | None,
        counts: CountsUnderWay | None,
        patience_s: float,
        pace: Throughput | None = None,
        beyond: CountsUnderWay | None = None,
        *,
        skipped: bool = False,
    ) -> None:
        """Send what this rank knows, once open rounds have ended or some time has passed."""
        tally, tracker = self._tally, self._tracker

        # Called by the thread that sends, since the counts may still be on the device.
        def counted() -> list[int]:
            if counts is None or not self._strategy.counts_tokens:
                return []
            none = (0,) * self._job.num_experts
            tables = [counts(), beyond()] if beyond is not None else [counts()]
            rows = [count for table in tables for layer in self._job.moe_layers for count in table.get(layer, none)]
            return [int(skipped), *rows]

        slowed_s = max(0.0, self._pass_times.slowed_s or 0.0)
        costs = Costs(tally.iteration_s, tally.copy_stall_s, tracker.last_round_s, tracker.last_persist_s, slowed_s)
        numbers = self._ports.added.numbers
        extra = numbers.take() if numbers is not None else ()
        message = IterationMessage(self._iteration, plan, costs, tracker.statuses, counted, pace, extra)
        self._messages.send(message, tracker.awaited(), self._ports.clock.now_s() + patience_s)

    def _receive_messages(self) -> None:
        """Take in what the last messages of all ranks come to."""
        try:
            news = self._messages.receive(self._job.config.timeout_s)
        except (PeerLost, TimeoutError) as error:
            self._in_contact = False
            self._tracker.lost_contact(self._iteration, error)
            return
        if news is None:
            return
        if self._ports.added.numbers is not None:
            self._ports.added.numbers.summed(news.numbers)
        if news.counts:
            (skipped, *counts), layers, experts = news.counts, len(self._job.moe_layers), self._job.num_experts
            rows = tuple(tuple(counts[at : at + experts]) for at in range(0, len(counts), experts))
            self._tally.tokens += ((news.iteration, rows[:layers]),)
            if skipped and self._strategy.selects:
                # Experts learned nothing: a fault cannot lose it, and nothing that they owe is made up for.
                rows = ((0,) * experts,) * len(rows)
            self._strategy.on_token_counts(news.iteration, rows[:layers])
            if rows[layers:]:
                self._strategy.on_deferred_tokens(news.iteration, rows[layers:])
        before = self._tracker.protection.state
        if self._tracker.update(news.statuses, self._iteration):
            self._strategy.on_costs(news.costs)
            if (choice := self._strategy.take_choice()) and self._ports.control.rank == 0:
                log.info("%s", choice)
        now = self._tracker.protection
        if now.state is ProtectionState.PROTECTED is not before and self._ports.control.rank == 0:
            copies = self._job.replicas
            log.info(
                "protected since iteration %d: in memory, %d replica%s", now.since_iteration, copies, "s"[copies == 1 :]
            )
        if self._strategy.needs_throughput:
            self._strategy.throughput_measured(news.pace)
        for note in self._strategy.take_notes():
            if self._ports.control.rank == 0:
                log.warning("%s", note)
