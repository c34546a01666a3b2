"""The order of events of checkpointing: what training calls, what is waited for, what the ranks tell each other.

step_end(t)          plan(t); copies begin; the ranks' reports go out
forward, backward    copies run, reports arrive
before_optimizer()   copies have ended (waiting here is the stall); news; the snapshot of t goes to the keeper
beside training      keeper: seal, replicate, free        persister: write to storage, retain
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..policy.copies import Level
from ..policy.keeping import Kept, keep_persistent, keep_pieces
from ..policy.lifecycle import Protection, ProtectionEvent, ProtectionState
from ..policy.rounds import Round, Rounds, Status
from ..policy.strategies import Costs, Job, Piece, Strategy
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
    Store,
    StoreFailure,
    Task,
    TrainerState,
    Transport,
)
from ..types import SnapshotPlan
from .keeper import Keeper, Work
from .persister import Persister, PersistWork

log = logging.getLogger(__name__)

TokenCounts = Mapping[int, Sequence[int]]
MICROSECONDS = 1e6


class CheckpointFailure(MoECheckpointError):
    """Protection was lost and `--moe-ckpt-strict` says that training must not go on without it."""


@dataclass(frozen=True)
class Ports:
    """What the coordinator works with; `memory` and `persistent` keep snapshots, `control` carries the reports."""

    memory: MappedStore
    persistent: Store | None
    capturer: Capturer
    trainer: TrainerState
    control: Transport
    lane: Callable[[str], Lane]
    clock: Clock


@dataclass(frozen=True)
class Report:
    """What checkpointing did since the last report; for metrics.

    tokens: by iteration, the tokens that all ranks routed, per MoE layer and expert, as far as they became known.
    """

    stall_s: float
    snapshot_bytes: int
    replicated_bytes: int
    protection: Protection
    persistent: Protection | None
    tokens: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


@dataclass
class _Tally:
    stall_s: float = 0.0
    snapshot_bytes: int = 0
    replicated_bytes: int = 0
    last_stall_s: float = 0.0
    last_round_s: float = 0.0
    iteration_s: float = 0.0
    tokens: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


Heard = tuple[tuple[int, ...], tuple[int, ...]]


class Coordinator:
    """Keeps one rank protected; all ranks make the same calls. Every method may raise MoECheckpointError:

    CheckpointFailure with `strict`, or a sentence that says that the ranks do not agree, which is a defect.
    """

    def __init__(self, job: Job, strategy: Strategy, ports: Ports, keeper: Keeper, persister: Persister | None) -> None:
        self._job, self._strategy, self._ports = job, strategy, ports
        self._keeper, self._persister = keeper, persister
        self._lanes = {name: ports.lane(name) for name in ("control", "keeper", "persister")}
        self._rounds = Rounds()
        self._works: dict[tuple[Level, int], Work | PersistWork] = {}
        self._copying: tuple[Work, dict[str, Json]] | None = None
        self._sent: tuple[int, Task[Heard]] | None = None
        self._kept: tuple[Kept, ...] = ()
        self._persisted: tuple[SnapshotPlan, ...] = ()
        self._tasks: list[Task[None]] = []
        self._rounds_tasks: dict[tuple[Level, int], Task[None]] = {}
        self._renew, self._connected = False, True
        self._restored: int | None = None
        self._protection, self._durable = Protection(), Protection()
        self._tally, self._step_ended_s = _Tally(), ports.clock.now_s()
        self._iteration = 0

    def resume(self, iteration: int, kept: Sequence[Piece], persisted: Sequence[SnapshotPlan]) -> None:
        """Go on after a recovery to `iteration`: these pieces are in the memory of all ranks, these plans in storage.

        What lost its replicas with a node is replicated again, beside training.
        """
        self._iteration, self._persisted = iteration, tuple(persisted)
        self._kept = tuple(Kept(piece) for piece in kept)
        if persisted:
            self._durable = Protection(ProtectionState.DEGRADED, iteration)
        if not kept:
            return
        parts = {operator: part for piece in kept for operator, part in piece.plan.parts.items()}
        work = Work(SnapshotPlan(iteration, parts), tuple(kept), None)
        self._open(Level.SNAPSHOT, work.plan, work)
        self._restored = iteration
        rank = self._ports.control.rank
        mine = [SnapshotId(piece.plan.iteration, rank, piece.kind) for piece in kept]
        self._rounds_tasks[Level.SNAPSHOT, iteration] = self._submit(
            "keeper", lambda: self._keeper.protect_again(work, mine)
        )

    def step_end(self, iteration: int, counts: TokenCounts | None = None) -> None:
        """After the optimizer's step (and evaluation) of `iteration`; `counts`: this rank's routed tokens by layer."""
        now_s, self._iteration = self._ports.clock.now_s(), iteration
        self._tally.iteration_s = now_s - self._step_ended_s - self._tally.last_stall_s
        self._step_ended_s, begun_s = now_s, now_s
        self._check_tasks()
        plan = None
        if self._connected and self._rounds.may_begin:
            plan = self._strategy.plan(iteration)
        if plan is not None:
            self._begin(plan)
        if self._connected:
            self._report(iteration, plan, counts)
        self._tally.last_stall_s = self._ports.clock.now_s() - begun_s
        self._tally.stall_s += self._tally.last_stall_s

    def before_optimizer(self) -> float:
        """Before the next optimizer step may change the state; returns the seconds that it waited, the stall."""
        begun_s = self._ports.clock.now_s()
        copied = self._end_copy()
        self._hear()
        if copied is not None:
            work, scalars = copied
            work.scalars = {"trainer": scalars, "strategy": self._strategy.to_data()}
            work.renew, self._renew = self._renew, False
            self._rounds_tasks[Level.SNAPSHOT, work.plan.iteration] = self._submit(
                "keeper", lambda: self._keeper.protect(work)
            )
        stall_s = self._ports.clock.now_s() - begun_s
        self._tally.last_stall_s += stall_s
        self._tally.stall_s += stall_s
        return stall_s

    def failure(self) -> None:
        """Training has failed on this rank or heard that a peer did: nothing new is begun, what is sealed stays."""
        self._connected = False
        if self._copying is not None:
            work, self._copying = self._copying[0], None
            try:
                self._ports.capturer.end(self._job.config.timeout_s)
            finally:
                work.abandon()
        self._shut_lanes(wait=False)

    def shutdown(self) -> None:
        """The end of training: what is under way is brought to its end, on all ranks together."""
        try:
            self.before_optimizer()
            self._drain()
            for _ in range(2 if self._connected else 0):  # the second time what became persistent after the first
                self._report(self._iteration, None, None)
                self._hear()
                self._drain()
        finally:
            self._shut_lanes(wait=True)

    def report(self) -> Report:
        """What was done since the last call."""
        tally, self._tally = (
            self._tally,
            replace(self._tally, stall_s=0.0, snapshot_bytes=0, replicated_bytes=0, tokens=()),
        )
        return Report(
            tally.stall_s,
            tally.snapshot_bytes,
            tally.replicated_bytes,
            self._protection,
            self._durable if self._persister else None,
            tally.tokens,
        )

    def _begin(self, plan: SnapshotPlan) -> None:
        """Reserve memory and begin to copy; without room this rank takes part in the round all the same."""
        pieces = self._strategy.pieces(plan)
        layouts = [self._ports.capturer.layout(piece.plan, trainer=at == 0) for at, piece in enumerate(pieces)]
        work = Work(plan, pieces, None, nbytes=sum(layout.nbytes for layout in layouts))
        self._open(Level.SNAPSHOT, plan, work)
        work.writers = self._reserved(work, layouts)
        if work.writers is not None:
            self._ports.capturer.begin(list(zip(layouts, work.writers, strict=True)))
        self._copying = work, self._ports.trainer.scalars()

    def _reserved(self, work: Work, layouts: Sequence[Layout]) -> tuple[MappedWriter, ...] | None:
        writers: list[MappedWriter] = []
        try:
            for piece, layout in zip(work.pieces, layouts, strict=True):
                name = SnapshotId(work.plan.iteration, self._ports.control.rank, piece.kind)
                writers.append(self._ports.memory.reserve(name, layout))
        except StoreFailure as error:
            work.failures.append(str(error))
            for writer in writers:
                writer.abandon()
            return None
        self._tally.snapshot_bytes += work.nbytes
        return tuple(writers)

    def _end_copy(self) -> tuple[Work, dict[str, Json]] | None:
        copied, self._copying = self._copying, None
        if copied is not None and copied[0].writers is not None:
            try:
                self._ports.capturer.end(self._job.config.timeout_s)
            except (TimeoutError, StoreFailure) as error:
                copied[0].failures.append(str(error))
                copied[0].abandon()
        return copied

    def _report(self, iteration: int, plan: SnapshotPlan | None, counts: TokenCounts | None) -> None:
        """Send what this rank knows, on the control lane; the least and the sums of all ranks come back.

        What is almost done is waited for, half an iteration at most: news that miss this message come one later.
        """
        mark = int(plan.digest()[:15], 16) if plan else 0
        tally, control = self._tally, self._ports.control
        costs = (tally.iteration_s, tally.last_stall_s, tally.last_round_s)
        head = [mark, -mark, *(-round(cost * MICROSECONDS) for cost in costs)]
        under_way = [(self._works[one.key], self._rounds_tasks.get(one.key)) for one in self._rounds.open]
        summed = self._counts_of_all_layers(counts)
        until_s = self._ports.clock.now_s() + tally.iteration_s / 2

        def exchanged() -> Heard:
            for _, task in under_way:
                if task is not None:
                    self._await(task, until_s)
            least = [*head, *(work.status for work, _ in under_way)]
            return control.least(least), control.total(summed) if summed else ()

        self._sent = iteration, self._lanes["control"].submit(exchanged)

    def _await(self, task: Task[None], until_s: float) -> None:
        """Wait for background work that may still be in time; how it ended is looked at by training's thread."""
        with suppress(Exception):
            task.result(max(0.0, until_s - self._ports.clock.now_s()))

    def _counts_of_all_layers(self, counts: TokenCounts | None) -> list[int]:
        if counts is None or not self._strategy.counts_tokens:
            return []
        none = (0,) * self._job.num_experts
        return [count for layer in self._job.moe_layers for count in counts.get(layer, none)]

    def _hear(self) -> None:
        """Take in the ranks' reports that were sent last."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        iteration, task = sent
        try:
            least, summed = task.result(self._job.config.timeout_s)
        except (PeerLost, TimeoutError) as error:
            self._lose_control(iteration, error)
            return
        mark, negative, *costs = least[:5]
        if mark != -negative:
            raise MoECheckpointError(
                f"the ranks planned different snapshots of iteration {iteration}: this is a defect, as plans depend"
                " only on what all ranks know; training cannot be protected"
            )
        if summed:
            experts = self._job.num_experts
            rows = tuple(summed[at : at + experts] for at in range(0, len(summed), experts))
            self._strategy.counted(iteration, rows)
            self._tally.tokens += ((iteration, rows),)
        self._rounds, news = self._rounds.after(least[5:])
        for one in news:
            (self._on_snapshot if one.level is Level.SNAPSHOT else self._on_persisted)(one)
        if any(one.agreed.is_final and one.level is Level.SNAPSHOT for one in news):
            iteration_s, stall_s, round_s = (-cost / MICROSECONDS for cost in costs)
            self._strategy.measured(Costs(iteration_s, stall_s, round_s))

    def _on_snapshot(self, one: Round) -> None:
        work, restored = self._works[one.key], self._restored == one.plan.iteration
        assert isinstance(work, Work)
        is_kept = any(kept.piece.plan.iteration == one.plan.iteration for kept in self._kept)
        if one.agreed >= Status.SEALED and not restored and not is_kept:
            self._strategy.settled(one.plan, Level.SNAPSHOT, True)
            self._kept += tuple(Kept(piece) for piece in work.pieces)
            self._retain()
        if not one.agreed.is_final:
            return
        del self._works[one.key], self._rounds_tasks[one.key]
        self._tally.replicated_bytes += work.replicated_bytes
        self._tally.last_round_s = work.duration_s
        self._renew = self._renew or one.agreed is not Status.PROTECTED
        if one.agreed is Status.PROTECTED:
            names = {Kept(piece).name for piece in work.pieces}
            self._kept = tuple(kept.acknowledged(names) for kept in self._kept)
            self._protection = self._protection.after(ProtectionEvent.COMMITTED, one.plan.iteration)
            self._retain()
        else:
            self._degraded(one, work.failures)
        if one.agreed is Status.FAILED:
            self._strategy.settled(one.plan, Level.SNAPSHOT, False)
            names = {Kept(piece).name for piece in work.pieces}
            # Behind the round itself on its lane: a replica may still be arriving here.
            self._submit("keeper", lambda: self._keeper.free(names))
        elif not restored:
            self._persist(one.plan, work.pieces)

    def _retain(self) -> None:
        """Free the pieces in memory that newer ones cover: at once, because the next snapshot needs their room."""
        in_use = [iteration for level, iteration in self._works if level is Level.PERSIST]
        self._kept, freed = keep_pieces(self._kept, self._rounds, in_use)
        try:
            self._keeper.free({kept.name for kept in freed})
        except StoreFailure as error:
            self._complain("memory could not be freed", [str(error)])

    def _persist(self, plan: SnapshotPlan, pieces: Sequence[Piece]) -> None:
        wanted = self._strategy.persistent(plan) if self._persister else None
        if wanted is None:
            return
        assert self._persister is not None
        if any(one.level is Level.PERSIST for one in self._rounds.open):
            log.warning(
                "the snapshot of iteration %d is not persisted: the one before is still written", plan.iteration
            )
            self._strategy.settled(wanted, Level.PERSIST, False)
            self._durable = self._durable.after(ProtectionEvent.ATTEMPT_FAILED, self._iteration)
            return
        persister, clock = self._persister, self._ports.clock
        work = PersistWork(wanted, self._strategy.pieces(wanted), tuple(piece.kind for piece in pieces))
        self._open(Level.PERSIST, wanted, work)
        self._rounds_tasks[Level.PERSIST, wanted.iteration] = self._submit(
            "persister", lambda: persister.persist(work, clock)
        )

    def _on_persisted(self, one: Round) -> None:
        work, _ = self._works.pop(one.key), self._rounds_tasks.pop(one.key)
        ok = one.agreed is Status.PROTECTED
        self._strategy.settled(one.plan, Level.PERSIST, ok)
        if not ok:
            self._durable = self._durable.after(ProtectionEvent.ATTEMPT_FAILED, self._iteration)
            self._complain(f"the snapshot of iteration {one.plan.iteration} was NOT persisted", work.failures)
            return
        self._durable = self._durable.after(ProtectionEvent.COMMITTED, one.plan.iteration)
        self._persisted += (one.plan,)
        self._persisted = keep_persistent(self._persisted, self._job.config.persist_keep)
        held, newest, persister = {plan.iteration for plan in self._persisted}, one.plan.iteration, self._persister
        assert persister is not None
        self._submit("persister", lambda: persister.retain(held, newest))
        self._retain()

    def _degraded(self, one: Round, failures: Sequence[str]) -> None:
        self._protection = self._protection.after(ProtectionEvent.ATTEMPT_FAILED, one.plan.iteration)
        what = "was NOT taken" if one.agreed is Status.FAILED else "has too few replicas"
        self._complain(
            f"{self._protection.state.name.lower()} since iteration {self._protection.since_iteration}: the snapshot of"
            f" iteration {one.plan.iteration} {what}",
            failures,
        )

    def _complain(self, what: str, failures: Sequence[str]) -> None:
        why = "; ".join(dict.fromkeys(failures)) or "the reason is in the log of another rank"
        if self._job.config.strict:
            raise CheckpointFailure(f"{what}: {why}; training ends because of --moe-ckpt-strict")
        if failures or self._ports.control.rank == 0:
            log.error("rank %d: %s: %s; training goes on", self._ports.control.rank, what, why)

    def _lose_control(self, iteration: int, error: Exception) -> None:
        """Without the reports of the others nothing can be agreed on: what is sealed stays, nothing more is taken."""
        self._connected = False
        self._protection = self._protection.after(ProtectionEvent.COPIES_SHORT, iteration)
        self._complain(f"no further snapshots after iteration {iteration} until the job restarts", [str(error)])

    def _open(self, level: Level, plan: SnapshotPlan, work: Work | PersistWork) -> None:
        self._rounds = self._rounds.begun(level, plan)
        self._works[level, plan.iteration] = work

    def _submit(self, lane: str, work: Callable[[], None]) -> Task[None]:
        task = self._lanes[lane].submit(work)
        self._tasks.append(task)
        return task

    def _check_tasks(self) -> None:
        """Let failures of background work reach training; what a store refuses only costs protection."""
        ended, self._tasks = [task for task in self._tasks if task.done()], [t for t in self._tasks if not t.done()]
        for task in ended:
            self._finish(task)

    def _finish(self, task: Task[None]) -> None:
        try:
            task.result(self._job.config.timeout_s)
        except StoreFailure as error:
            self._complain("a store refused", [str(error)])

    def _drain(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._finish(task)

    def _shut_lanes(self, *, wait: bool) -> None:
        for lane in self._lanes.values():
            lane.shutdown(wait, cancel_futures=True)
