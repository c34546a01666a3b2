"""What becomes of each window between its first copy and its end, on one rank and alike on all.

The coordinator reports what was planned (`open`), what was copied (`copied`) and what all ranks have agreed on
(`update`). The tracker keeps one value per window, changes it through the tables of `policy.lifecycle`, and does what
follows:

a snapshot is copied         its task goes to the replication worker: sealed here, then sent to peers
all ranks have sealed it     the strategy may count on it; a whole window replaces older ones that are no safer
all replicas are verified    the window is protected: older ones are freed, also what a recovery had to keep
some replica is missing      it stays as it is; with another one protected, it gives its replicas up for the next window
some rank has no snapshot    the window is given up: what there is of it is freed, and what comes of it later
the strategy asks for it     the persister writes the window to storage; it stays in memory until that has ended

Which windows cover which, and whether another one may begin, is decided in `policy.tracking`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from ..policy.lifecycle import (
    PersistEvent,
    PersistState,
    Protection,
    ProtectionEvent,
    ProtectionState,
    WindowEvent,
    WindowState,
)
from ..policy.tracking import (
    SPARE_SPAN,
    CommitRound,
    CommitRounds,
    PersistedWindow,
    PieceName,
    RestoredState,
    Status,
    TrackedWindow,
    all_are_protected,
    covered_pieces,
    kept_in_storage,
    may_begin,
    oldest_base,
    yielded_replicas,
)
from ..ports import StoreFailure, Task
from ..strategies import Job, Piece, Strategy
from ..types import Level, SnapshotPlan
from .persister import Persister, PersistTask
from .workers import BackgroundWork, ReplicationWorker, SnapshotTask

log = logging.getLogger(__name__)


class SnapshotTracker:
    """The windows of one rank in memory and in storage, and the work on them that is under way."""

    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        worker: ReplicationWorker,
        persister: Persister | None,
        background: BackgroundWork,
    ) -> None:
        self._strategy, self._persist_keep = strategy, job.config.persist_keep
        self._worker, self._persister, self._background = worker, persister, background
        self.windows: dict[range, TrackedWindow] = {}
        self.persisted: dict[range, PersistedWindow] = {}
        self.rounds = CommitRounds()
        self.protection = Protection()
        self.durable = Protection() if persister else None
        self.newest_protected: int | None = None
        self.newest_persisted: int | None = None
        self.reasons: dict[Level, str] = {}  # why a tier has less than was asked for
        self.last_round_s, self.last_persist_s, self.peer_bytes_per_s = 0.0, 0.0, math.inf
        self._tasks: dict[tuple[Level, int], SnapshotTask | PersistTask] = {}  # of the open rounds
        self._replicated_bytes = self._spared_bytes = self._persisted_bytes = 0
        self._reconnect = False
        self._said_behind = False
        self._from_storage = False
        self._torn: dict[int, frozenset[str]] = {}

    def resume(self, state: RestoredState) -> None:
        """Continue after a recovery; what lost its replicas with a node is replicated again, beside training."""
        self.windows, self.persisted = state.windows(), state.persisted_windows()
        self._from_storage, self._torn = state.from_storage, dict(state.torn)
        if state.persisted and self.durable:
            self.newest_persisted = state.persisted[-1][-1].iteration
            self.durable = Protection(ProtectionState.DEGRADED, self.newest_persisted)
        if not state.kept:
            return
        iteration = max(piece.plan.iteration for piece in state.kept)
        parts = {operator: part for piece in state.kept for operator, part in piece.plan.parts.items()}
        task = SnapshotTask(SnapshotPlan(iteration, parts), state.kept, None)
        # What was restored has copies; whether enough of them is known once they have been counted again.
        self.protection = Protection(ProtectionState.DEGRADED, iteration)
        self._begin_round(Level.SNAPSHOT, task.plan, _newest_span(state.kept), task)
        task.running = self._background.replicate(lambda: self._worker.protect_again(task))

    @property
    def oldest_base(self) -> int | None:
        """The first iteration of the oldest window that is kept; None while none is."""
        return oldest_base(self.windows.values())

    def may_begin(self, iteration: int) -> bool:
        """Whether memory has room for a snapshot of this iteration; the same answer on all ranks."""
        return may_begin(iteration, self.windows.values(), self.rounds, self._strategy.places)

    def open(self, task: SnapshotTask) -> None:
        """A snapshot was planned and is being copied, or takes part in its round without a copy."""
        self._said_behind = False
        span = _newest_span(task.pieces)
        self._begin_round(Level.SNAPSHOT, task.plan, span, task)
        self.windows[span] = self.windows.get(span, TrackedWindow(span)).begun(task.pieces)

    def copied(self, task: SnapshotTask) -> None:
        """The copy has ended: from here on the worker has it, unless all ranks have given the round up meanwhile."""
        if (Level.SNAPSHOT, task.plan.iteration) not in self._tasks:
            task.abandon()
            return
        # For one task only: to renew the transport is a collective, which all ranks make in the same round.
        task.reconnect, self._reconnect = self._reconnect, False
        task.running = self._background.replicate(lambda: self._worker.protect(task))

    def statuses(self) -> Sequence[Status]:
        """How far this rank has come with each open round. Called on the thread that sends the message.

        Read from the newest to the oldest while the worker's thread continues: it ends one snapshot before it seals the
        next, so no report can say that a later snapshot is sealed and an earlier one still under way.
        """
        return [self._tasks[round_.key].status for round_ in reversed(self.rounds.open)][::-1]

    def awaited(self) -> list[Task[None]]:
        """The work under way for open rounds."""
        running = (self._tasks[round_.key].running for round_ in self.rounds.open)
        return [task for task in running if task is not None]

    def update(self, statuses: Sequence[int], iteration: int) -> bool:
        """Take in how far all ranks have come with the open rounds.

        Args:
            statuses: The least `Status` of all ranks, one per open round, oldest first.
            iteration: The newest whose step has ended.

        Returns:
            Whether the round of a snapshot ended with that.
        """
        # All ranks take in the same statuses, so windows go through the same changes in the same order on all of them.
        self.rounds, updates = self.rounds.after(statuses)
        for round_ in updates:
            if round_.level is Level.SNAPSHOT:
                self._on_snapshot(round_, iteration)
            else:
                self._on_persisted(round_, iteration)
        for window in [*self.windows.values()]:
            if window.state is WindowState.GIVEN_UP and not window.pieces:
                self._put(window.after(WindowEvent.DRAINED))
        return any(round_.agreed.is_final and round_.level is Level.SNAPSHOT for round_ in updates)

    def take_spared_bytes(self) -> int:
        """Of replicas, what peers made from what they hold or from gradients, since the last call."""
        taken, self._spared_bytes = self._spared_bytes, 0
        return taken

    def take_replicated_bytes(self) -> int:
        """Bytes sent to peers since the last call."""
        taken, self._replicated_bytes = self._replicated_bytes, 0
        return taken

    def take_persisted_bytes(self) -> int:
        """Bytes written to storage since the last call."""
        taken, self._persisted_bytes = self._persisted_bytes, 0
        return taken

    def lost_contact(self, iteration: int, error: Exception) -> None:
        """Without the reports of the others nothing can be agreed on: what is sealed stays, nothing more is taken.

        Args:
            iteration: The newest whose step has ended.
            error: Why there are none.
        """
        self.protection = self.protection.after(ProtectionEvent.CONTACT_LOST, iteration)
        self._complain(
            Level.SNAPSHOT, f"no further snapshots after iteration {iteration} until the job restarts", [str(error)]
        )

    def behind(self, iteration: int) -> None:
        """A snapshot is due, but earlier ones are still on their way: said once for each time that it begins."""
        if self._said_behind:
            return
        self._said_behind = True
        self.protection = self.protection.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
        open_ = ", ".join(f"{round_.level.value} of iteration {round_.plan.iteration}" for round_ in self.rounds.open)
        why = f"still under way are {open_}; memory or links are slow" if open_ else "older ones lack their replicas"
        self.reasons[Level.SNAPSHOT] = f"no snapshot of iteration {iteration}: {why}"
        log.warning("no snapshot of iteration %d: %s", iteration, why)

    def _on_snapshot(self, round_: CommitRound, iteration: int) -> None:
        window, plan = self.windows[round_.span], round_.plan
        if round_.agreed >= Status.SEALED and window.awaits_seal(plan.iteration):
            self._strategy.on_commit(plan, Level.SNAPSHOT, True)
            window = window.all_ranks_sealed(plan.iteration)
            self._put(window)
            if window.state is WindowState.REPLICATING:
                self._free_covered()
        if not round_.agreed.is_final:
            return
        task = self._tasks.pop(round_.key)
        assert isinstance(task, SnapshotTask)
        self._replicated_bytes += task.replicated_bytes
        self._spared_bytes += max(0, task.carried_bytes - task.replicated_bytes)
        self.last_round_s = task.duration_s
        if task.carried_bytes and task.exchange_s > 0:  # of state: where steps go in its place, a link carries more
            self.peer_bytes_per_s = task.carried_bytes / task.exchange_s
        if round_.agreed is not Status.FAILED:
            self._strategy.on_commit(round_.plan, Level.REPLICAS, round_.agreed is Status.PROTECTED)
        # After any round that some rank did not end well a connection may be void; all ranks agree on such rounds.
        self._reconnect = self._reconnect or round_.agreed is not Status.PROTECTED
        self._on_ended(round_, task, iteration)

    def _on_ended(self, round_: CommitRound, task: SnapshotTask, iteration: int) -> None:
        """Nothing more happens to a snapshot: its window continues, is judged, or is given up."""
        state, failed = self.windows[round_.span].state, round_.agreed is Status.FAILED
        if failed or (round_.agreed is Status.UNDER_REPLICATED and state is not WindowState.GIVEN_UP):
            self._degraded(round_, task.failures)
        if failed or state is WindowState.GIVEN_UP:
            self._give_up(round_)
            return
        is_restored, spans = state is WindowState.RESTORED, [round_.span]
        if is_restored:  # the windows that a recovery found have one round together
            spans = [window.span for window in self.windows.values() if window.state is WindowState.RESTORED]
        for span in spans:
            self._put(self.windows[span].ended(round_.plan.iteration, round_.agreed))
        window = self.windows[round_.span]
        is_protected = window.state is WindowState.PROTECTED
        # What some rank has in storage alone no memory restores, nor what no peer has of an older snapshot.
        is_in_storage = is_restored and self._from_storage
        is_complete = is_protected and not is_in_storage and all_are_protected(self.windows.values())
        if is_complete:
            self.newest_protected = round_.plan.iteration
            self.reasons.pop(Level.SNAPSHOT, None)
            self.protection = self.protection.after(ProtectionEvent.COMMITTED, round_.plan.iteration)
        if is_protected or is_restored:
            self._free_covered()
        if is_restored:
            return
        if is_complete:
            self._free_spare()
        elif names := yielded_replicas(window, self.windows.values()):
            self._background.replicate(lambda: self._worker.free(names, own=False))
        self._persist(window, round_.plan, iteration)

    def _give_up(self, round_: CommitRound) -> None:
        """Nothing can be made of this window any more: what there is of it is freed, and what comes of it later."""
        window, iteration = self.windows[round_.span], round_.plan.iteration
        self._strategy.on_commit(round_.plan, Level.SNAPSHOT, False)
        freed = {piece.name for piece in window.pieces if piece in window.sealed or piece.iteration == iteration}
        self._put(window.ended(iteration, round_.agreed))
        # Behind the round itself on its thread: a replica may still be arriving here.
        self._background.replicate(lambda: self._worker.free(freed))

    def _free_covered(self) -> None:
        """Free the pieces in memory that newer ones cover: at once, because the next snapshot needs their room.

        What is still being written to storage stays, but its replicas go: peers need their room for newer ones.
        """
        covered = covered_pieces(self.windows.values())
        # Own pieces have one more user: the persister, which opens them by name. Replicas are not persisted from here.
        in_use = {
            piece.name
            for span, copy in self.persisted.items()
            if copy.state is PersistState.WRITING and span in self.windows
            for piece in self.windows[span].pieces
        }
        for window in [*self.windows.values()]:
            self._put(window.without(covered - in_use))
        self._free(covered - in_use)
        self._free(covered & in_use, own=False)

    def _free_spare(self) -> None:
        """A newer state is protected: no rank needs any more what only some have."""
        spare = self.windows.get(SPARE_SPAN)
        if spare is not None:
            names = {piece.name for piece in spare.pieces}
            self._put(spare.without(names))
            self._free(names)

    def _free(self, names: Collection[PieceName], *, own: bool = True) -> None:
        try:
            self._worker.free(names, own=own)
        except StoreFailure as error:
            self._background.complain("memory could not be freed", [str(error)])

    def _put(self, window: TrackedWindow) -> None:
        if window.state is WindowState.FREED:
            del self.windows[window.span]
        else:
            self.windows[window.span] = window

    def _persist(self, window: TrackedWindow, plan: SnapshotPlan, iteration: int) -> None:
        persister = self._persister
        plans = self._strategy.persistent(plan) if persister else ()
        if persister is None or not plans or self.durable is None:
            return
        # One copy to storage at a time: each keeps its window in memory, where newer snapshots want the room.
        if written := next((self._tasks[one.key] for one in self.rounds.open if one.level is Level.PERSIST), None):
            assert isinstance(written, PersistTask)
            line = "persist skipped for iteration %d: the previous snapshot is still being written %s"
            log.warning(line, plan.iteration, persister.behind(written))
            self._strategy.on_commit(plans[-1], Level.PERSIST, False)
            self.durable = self.durable.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
            return
        pieces = tuple(map(self._strategy.pieces, plans))
        sealed = [tuple(held.piece for held in window.sealed if held.iteration == part.iteration) for part in plans]
        task = PersistTask(plans, pieces, tuple(sealed))
        self.persisted[window.span] = PersistedWindow(tuple(piece for some in pieces for piece in some))
        self._begin_round(Level.PERSIST, plans[-1], window.span, task)
        task.running = self._background.persist(lambda: persister.persist(task))

    def _on_persisted(self, round_: CommitRound, iteration: int) -> None:
        task, copy = self._tasks.pop(round_.key), self.persisted[round_.span]
        assert isinstance(task, PersistTask) and self.durable is not None
        self._persisted_bytes += task.written_bytes
        self.last_persist_s = task.duration_s or self.last_persist_s
        written = round_.agreed is Status.PROTECTED
        self._strategy.on_commit(round_.plan, Level.PERSIST, written)
        self._put_copy(round_.span, copy.after(PersistEvent.WRITTEN if written else PersistEvent.REFUSED))
        if written:
            self.newest_persisted = round_.plan.iteration
            self.reasons.pop(Level.PERSIST, None)
            self.durable = self.durable.after(ProtectionEvent.COMMITTED, round_.plan.iteration)
            self._free_storage()
            self._free_torn(copy.pieces)
        else:
            self.durable = self.durable.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
            # Other ranks may have written their parts: room that the next copy needs, and no other copy names them.
            left = {piece.plan.iteration for piece in copy.pieces}
            left -= {piece.plan.iteration for other in self.persisted.values() for piece in other.pieces}
            self._free_from_storage(left)
            self._complain(
                Level.PERSIST, f"the snapshot of iteration {round_.plan.iteration} was NOT persisted", task.failures
            )
        # What stayed in memory only to be written can go now, however that ended.
        self._free_covered()

    def _free_storage(self) -> None:
        """Remove from storage what the last states there do not need."""
        copies = {span: copy for span, copy in self.persisted.items() if copy.state is PersistState.PERSISTENT}
        known = [piece for copy in copies.values() for piece in copy.pieces]
        kept = {piece.span for piece in kept_in_storage(known, self._persist_keep)}
        freed = {piece.plan.iteration for piece in known if piece.span not in kept}
        for span in copies.keys() - kept:
            self._put_copy(span, copies[span].after(PersistEvent.SUPERSEDED))
        self._free_from_storage(freed)

    def _free_torn(self, written: Sequence[Piece]) -> None:
        """Remove from storage what a fault kept other ranks from writing, once newer pieces of each kind are there: no
        state that is kept names it, so nothing else would."""
        kinds, newest = {piece.kind for piece in written}, max(piece.plan.iteration for piece in written)
        named = {piece.plan.iteration for copy in self.persisted.values() for piece in copy.pieces}
        left = {at: lacking - kinds if at < newest else lacking for at, lacking in self._torn.items()}
        self._torn = {at: lacking for at, lacking in left.items() if lacking and at not in named}
        if freed := left.keys() - self._torn.keys() - named:
            self._free_from_storage(freed)

    def _free_from_storage(self, iterations: Collection[int]) -> None:
        persister = self._persister
        assert persister is not None
        # On the thread that writes: one after the other, so nothing is removed in the middle of a copy.
        self._background.persist(lambda: persister.free(iterations))

    def _put_copy(self, span: range, copy: PersistedWindow) -> None:
        if copy.state in (PersistState.FAILED, PersistState.REMOVED):
            del self.persisted[span]
        else:
            self.persisted[span] = copy

    def _degraded(self, round_: CommitRound, failures: Sequence[str]) -> None:
        self.protection = self.protection.after(ProtectionEvent.ATTEMPT_FAILED, round_.plan.iteration)
        what = "was NOT taken" if round_.agreed is Status.FAILED else "has too few replicas"
        self._complain(
            Level.SNAPSHOT,
            f"{self.protection.state.name.lower()} since iteration {self.protection.since_iteration}: the snapshot of"
            f" iteration {round_.plan.iteration} {what}",
            failures,
        )

    def _complain(self, level: Level, what: str, failures: Sequence[str]) -> None:
        self.reasons[level] = f"{what}: {'; '.join(dict.fromkeys(failures))}" if failures else what
        self._background.complain(what, failures)

    def _begin_round(self, level: Level, plan: SnapshotPlan, span: range, task: SnapshotTask | PersistTask) -> None:
        self.rounds = self.rounds.begun(level, plan, span)
        self._tasks[level, plan.iteration] = task


def _newest_span(pieces: Sequence[Piece]) -> range:
    return max((piece.span for piece in pieces), key=lambda span: span[-1])
