"""The order of events of checkpointing: what training calls, and what happens then.

step_end(t)          plan(t); copies begin; the ranks' messages go out
forward, backward    copies run, messages arrive
before_optimizer()   copies have ended (waiting here is the stall); news; the snapshot of t goes to the keeper
beside training      keeper: seal, replicate, free        persister: write to storage, retain
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..policy.lifecycle import Protection
from ..ports import (
    Capturer,
    Clock,
    Json,
    Lane,
    Layout,
    MappedStore,
    MappedWriter,
    PeerLost,
    SnapshotId,
    StoreFailure,
    TrainerState,
    Transport,
)
from ..strategies import Costs, Job, Pace, Room, Strategy
from ..strategies.account import MemoryAccount
from ..types import SnapshotPlan, StepJournal
from .custody import Custody
from .keeper import Keeper, Work
from .messages import Message, Messages
from .outcomes import RecoveryOutcome
from .persister import Persister
from .rooms import account_of, fit_memory, segment_sizes

log = logging.getLogger(__name__)

CLOSING_PAUSE_S = 0.5
"""How long the ranks wait at the end of training before they ask each other again what is still under way."""

TokenCounts = Mapping[int, Sequence[int]]
CountRows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ports:
    """What the coordinator works with; `memory` keeps snapshots, `control` carries the messages.

    owners: ranks whose replicas this one keeps. rooms: for which `memory` was opened; None: what the strategy asks for.
    before_resize: called before segments of `memory` may go. log_bytes: what boundary logs take beside it.
    """

    memory: MappedStore
    capturer: Capturer
    trainer: TrainerState
    control: Transport
    lane: Callable[[str], Lane]
    clock: Clock
    owners: Sequence[int] = ()
    rooms: tuple[Room, ...] | None = None
    before_resize: Callable[[], None] = lambda: None
    log_bytes: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Report:
    """What checkpointing did since the last report; for metrics.

    tokens: by iteration, the tokens that all ranks routed, per MoE layer and expert, as far as they became known.
    memory: what checkpoints take on this rank.
    """

    stall_s: float
    snapshot_bytes: int
    replicated_bytes: int
    protection: Protection
    persistent: Protection | None
    tokens: tuple[tuple[int, CountRows], ...] = ()
    memory: MemoryAccount | None = None


@dataclass
class _Tally:
    """Since the last report, and of the last iteration."""

    stall_s: float = 0.0
    snapshot_bytes: int = 0
    tokens: tuple[tuple[int, CountRows], ...] = ()
    last_stall_s: float = 0.0
    iteration_s: float = 0.0
    passes_s: float = 0.0


class Coordinator:
    """Keeps one rank protected; all ranks make the same calls. Every method may raise MoECheckpointError:

    CheckpointFailure with `--moe-ckpt-strict`, or a sentence that says that the ranks do not agree, which is a defect.
    """

    def __init__(self, job: Job, strategy: Strategy, ports: Ports, keeper: Keeper, persister: Persister | None) -> None:
        self._job, self._strategy, self._ports = job, strategy, ports
        self._control_lane = ports.lane("control")
        self._messages = Messages(ports.control, self._control_lane, ports.clock)
        self._custody = Custody(job, strategy, keeper, persister, ports.lane)
        self._rooms = strategy.rooms() if ports.rooms is None else ports.rooms
        self._account = account_of(self._rooms, job, ports.control.rank, len(ports.owners), ports.log_bytes())
        self._copying: tuple[Work, dict[str, Json]] | None = None
        self._in_contact, self._copies_late = True, False
        self._tally, self._step_ended_s = _Tally(), ports.clock.now_s()
        self._passes_began_s = self._step_ended_s
        self._iteration = 0

    def resume(self, outcome: RecoveryOutcome) -> None:
        """Go on after a recovery; what lost its replicas with a node is replicated again, beside training."""
        self._iteration = outcome.plan.target
        self._custody.resume(outcome.kept, outcome.persisted, outcome.spare, self._ports.control.rank)

    def step_end(self, iteration: int, counts: TokenCounts | None = None, journal: StepJournal | None = None) -> None:
        """After the optimizer's step (and evaluation) of `iteration`.

        counts: this rank's routed tokens by layer. journal: the outcome of the step, which a replay needs.
        """
        begun_s, tally = self._ports.clock.now_s(), self._tally
        tally.iteration_s = begun_s - self._step_ended_s - tally.last_stall_s
        self._step_ended_s, self._iteration = begun_s, iteration
        self._custody.check()
        pace = Pace(tally.passes_s, self._ports.capturer.bandwidth_bytes_per_s) if self._strategy.needs_pace else None
        plan, no_room = self._planned(iteration)
        if plan is not None:
            scalars: dict[str, Json] = {"trainer": self._ports.trainer.scalars()}
            if journal is not None:
                scalars["journal"] = journal.to_data()
            self._copying = self._begin(plan, no_room), scalars
        if self._in_contact:
            self._tell(plan, counts, tally.iteration_s / 2, pace)
        self._passes_began_s = self._ports.clock.now_s()
        tally.last_stall_s = self._passes_began_s - begun_s
        tally.stall_s += tally.last_stall_s

    def before_optimizer(self) -> float:
        """Before the next optimizer step may change the state; returns the seconds that it waited, the stall."""
        begun_s = self._ports.clock.now_s()
        self._tally.passes_s = begun_s - self._passes_began_s
        copied = self._end_copy()
        self._hear()
        if copied is not None and not self._in_contact:
            copied[0].abandon()  # what the strategy has to remember of it is not known
        elif copied is not None:
            work, scalars = copied
            work.scalars = {**scalars, "strategy": self._strategy.to_data()}
            self._custody.copied(work)
        stall_s = self._ports.clock.now_s() - begun_s
        self._tally.last_stall_s += stall_s
        self._tally.stall_s += stall_s
        return stall_s

    @property
    def oldest_base(self) -> int | None:
        """The iteration from whose state the earliest replay may start; None while no window is kept."""
        return self._custody.oldest_base

    def failure(self) -> None:
        """Training has failed on this rank or heard that a peer did: nothing new is begun, what is sealed stays."""
        self._in_contact = False
        self._end_copy()
        self._close(wait=False)

    def shutdown(self) -> None:
        """The end of training: what is under way is brought to its end, on all ranks together."""
        try:
            self.before_optimizer()
            for _ in range(round(self._job.config.timeout_s / CLOSING_PAUSE_S)):
                if not self._in_contact or not self._custody.rounds.open:
                    break
                self._tell(None, None, CLOSING_PAUSE_S)
                self._hear()
            self._custody.drain()
        finally:
            self._close(wait=False)

    def report(self) -> Report:
        """What was done since the last call."""
        tally, custody = self._tally, self._custody
        self._tally = replace(tally, stall_s=0.0, snapshot_bytes=0, tokens=())
        replicated_bytes, custody.replicated_bytes = custody.replicated_bytes, 0
        safety = custody.protection, custody.durable
        return Report(tally.stall_s, tally.snapshot_bytes, replicated_bytes, *safety, tally.tokens, self._account)

    def _planned(self, iteration: int) -> tuple[SnapshotPlan | None, str]:
        """What to snapshot, if anything, and why memory has no room for it, if so."""
        if not self._in_contact:
            return None, ""
        if not self._custody.may_begin(iteration):
            if self._strategy.due(iteration):
                self._custody.behind(iteration)
            return None, ""
        plan = self._strategy.plan(iteration)
        rooms = self._strategy.rooms()
        if rooms is self._rooms or rooms == self._rooms:
            self._rooms = rooms  # the same object from here on, so that nobody has to compare operators again
            return plan, ""
        if plan is None:
            return None, ""
        try:
            return plan, self._make_room(rooms)
        except PeerLost as error:
            self._in_contact = False
            self._custody.lost_contact(iteration, error)
            return None, ""

    def _make_room(self, rooms: tuple[Room, ...]) -> str:
        """Give memory the segments that the strategy now asks for; why this rank has none, tried again next time.

        A collective over all ranks, while no message is under way. Raises PeerLost.
        """
        ports = self._ports
        sizes = segment_sizes(rooms, ports.capturer, ports.control, ports.owners)
        done, why = fit_memory(ports.memory, sizes, ports.control, ports.before_resize)
        if not done:
            self._strategy.no_room()
        else:
            self._rooms = rooms
            account = account_of(rooms, self._job, ports.control.rank, len(ports.owners), ports.log_bytes())
            if account != self._account and ports.control.rank == 0:
                log.info("%s", account)
            self._account = account
        return why

    def _begin(self, plan: SnapshotPlan, no_room: str) -> Work:
        """Reserve memory and begin to copy; without room this rank takes part in the round all the same."""
        pieces = self._strategy.pieces(plan)
        layouts = [self._ports.capturer.layout(piece.plan, trainer=at == 0) for at, piece in enumerate(pieces)]
        work = Work(plan, pieces, None)
        self._custody.open(work)
        if no_room:
            work.failures.append(no_room)
        else:
            work.writers = self._reserved(work, layouts)
        if work.writers is not None:
            self._ports.capturer.begin(list(zip(layouts, work.writers, strict=True)))
            self._tally.snapshot_bytes += sum(layout.nbytes for layout in layouts)
        return work

    def _reserved(self, work: Work, layouts: Sequence[Layout]) -> tuple[MappedWriter, ...] | None:
        writers: list[MappedWriter] = []
        try:
            if self._copies_late:
                self._ports.capturer.end(0.0)
                self._copies_late = False
            for piece, layout in zip(work.pieces, layouts, strict=True):
                name = SnapshotId(work.plan.iteration, self._ports.control.rank, piece.kind)
                self._ports.memory.free(name)  # of an attempt that training left behind, if any
                writers.append(self._ports.memory.reserve(name, layout))
        except (MoECheckpointError, TimeoutError) as error:
            work.failures.append(str(error))
            for writer in writers:
                writer.abandon()
            return None
        return tuple(writers)

    def _end_copy(self) -> tuple[Work, dict[str, Json]] | None:
        copied, self._copying = self._copying, None
        if copied is not None and copied[0].writers is not None:
            try:
                self._ports.capturer.end(self._job.config.timeout_s)
            except (TimeoutError, StoreFailure) as error:
                # The memory is not used again as long as a late copy refers to it.
                self._copies_late = isinstance(error, TimeoutError)
                copied[0].failures.append(str(error))
                copied[0].abandon()
        return copied

    def _tell(
        self, plan: SnapshotPlan | None, counts: TokenCounts | None, patience_s: float, pace: Pace | None = None
    ) -> None:
        """Send what this rank knows, once open rounds have ended or some time has passed."""
        tally, custody = self._tally, self._custody
        summed: list[int] = []
        if counts is not None and self._strategy.counts_tokens:
            none = (0,) * self._job.num_experts
            summed = [count for layer in self._job.moe_layers for count in counts.get(layer, none)]
        costs = Costs(tally.iteration_s, tally.last_stall_s, custody.last_round_s)
        message = Message(self._iteration, plan, costs, custody.statuses, summed, pace)
        self._messages.send(message, custody.awaited(), self._ports.clock.now_s() + patience_s)

    def _hear(self) -> None:
        """Take in what all ranks told in the last messages."""
        try:
            news = self._messages.receive(self._job.config.timeout_s)
        except (PeerLost, TimeoutError) as error:
            self._in_contact = False
            self._custody.lost_contact(self._iteration, error)
            return
        if news is None:
            return
        if news.counts:
            experts = self._job.num_experts
            rows = tuple(news.counts[at : at + experts] for at in range(0, len(news.counts), experts))
            self._strategy.counted(news.iteration, rows)
            self._tally.tokens += ((news.iteration, rows),)
        if self._custody.hear(news.statuses, self._iteration):
            self._strategy.measured(news.costs)
        if self._strategy.needs_pace:
            self._strategy.paced(news.pace)

    def _close(self, *, wait: bool) -> None:
        self._custody.close(wait=wait)
        self._control_lane.shutdown(wait, cancel_futures=True)
