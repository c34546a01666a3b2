"""Who is responsible for each snapshot between its copy and its end: what is under way, kept, persistent, protected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from ..errors import MoECheckpointError
from ..policy.copies import Level
from ..policy.keeping import Kept, keep_persistent, keep_pieces
from ..policy.lifecycle import Protection, ProtectionEvent, ProtectionState
from ..policy.rounds import Round, Rounds, Status
from ..ports import Lane, SnapshotId, StoreFailure, Task
from ..strategies import Job, Piece, Strategy
from ..types import SnapshotPlan
from .keeper import Keeper, Work
from .persister import Persister, PersistWork

log = logging.getLogger(__name__)


class CheckpointFailure(MoECheckpointError):
    """Protection was lost and `--moe-ckpt-strict` says that training must not go on without it."""


class Custody:
    """The rounds of one rank, and what is done at each piece of news about them; alike on all ranks."""

    def __init__(
        self, job: Job, strategy: Strategy, keeper: Keeper, persister: Persister | None, lane: Callable[[str], Lane]
    ) -> None:
        self._job, self._strategy = job, strategy
        self._keeper, self._persister = keeper, persister
        self._lanes = {"keeper": lane("keeper"), "persister": lane("persister")}
        self.rounds = Rounds()
        self.protection = Protection()
        self.durable = Protection() if persister else None
        self.last_round_s, self.replicated_bytes = 0.0, 0
        self._works: dict[tuple[Level, int], Work | PersistWork] = {}
        self._under_way: dict[tuple[Level, int], Task[None]] = {}
        self._tasks: list[Task[None]] = []
        self._kept: tuple[Kept, ...] = ()
        self._persisted: tuple[Piece, ...] = ()
        self._spare: frozenset[tuple[int, str]] = frozenset()
        self._given_up: frozenset[range] = frozenset()
        self._renew = False
        self._restored: int | None = None
        self._behind = False

    def resume(
        self,
        kept: Sequence[Piece],
        persisted: Sequence[Sequence[SnapshotPlan]],
        spare: frozenset[tuple[int, str]],
        rank: int,
    ) -> None:
        """See `Coordinator.resume`."""
        self._kept, self._spare = tuple(map(Kept, kept)), spare
        self._persisted = tuple(
            Piece("", plan, range(plans[0].iteration, plans[-1].iteration + 1)) for plans in persisted for plan in plans
        )
        if persisted and self.durable:
            self.durable = Protection(ProtectionState.DEGRADED, persisted[-1][-1].iteration)
        if not kept:
            return
        iteration = max(piece.plan.iteration for piece in kept)
        parts = {operator: part for piece in kept for operator, part in piece.plan.parts.items()}
        work = Work(SnapshotPlan(iteration, parts), tuple(kept), None)
        self._restored = iteration
        # What was restored has copies; whether enough of them is known once they have been counted anew.
        self.protection = Protection(ProtectionState.DEGRADED, iteration)
        self.open(work)
        mine = [SnapshotId(piece.plan.iteration, rank, piece.kind) for piece in kept]
        self._begin(Level.SNAPSHOT, iteration, "keeper", lambda: self._keeper.protect_again(work, mine))

    @property
    def oldest_base(self) -> int | None:
        """The first iteration of the oldest window that is kept; None while none is."""
        return min((kept.piece.span[0] for kept in self._kept), default=None)

    def may_begin(self, iteration: int) -> bool:
        """Whether memory has room for a snapshot of this iteration; the same answer on all ranks."""
        held = [one.held for one in self._kept]
        for one in self._works.values():
            held += [Kept(piece).held for piece in one.pieces] if isinstance(one, Work) else []
        # What is spare belongs to one state, whatever its spans were.
        return self.rounds.may_begin(iteration, [*held, *((kind, range(0)) for _, kind in self._spare)])

    def open(self, work: Work) -> None:
        """A snapshot was planned and is being copied, or takes part in its round without a copy."""
        self._behind = False
        span = max((piece.span for piece in work.pieces), key=lambda one: one[-1])
        self.rounds = self.rounds.begun(Level.SNAPSHOT, work.plan, span)
        self._works[Level.SNAPSHOT, work.plan.iteration] = work

    def copied(self, work: Work) -> None:
        """The copy has ended: from here on the keeper has it, unless all ranks have given the round up meanwhile."""
        if (Level.SNAPSHOT, work.plan.iteration) not in self._works:
            work.abandon()
            return
        work.renew, self._renew = self._renew, False
        self._begin(Level.SNAPSHOT, work.plan.iteration, "keeper", lambda: self._keeper.protect(work))

    def statuses(self) -> list[int]:
        """How far this rank has come with each open round."""
        return [self._works[one.key].status for one in self.rounds.open]

    def awaited(self) -> list[Task[None]]:
        """The work under way for open rounds."""
        return [self._under_way[one.key] for one in self.rounds.open if one.key in self._under_way]

    def hear(self, statuses: Sequence[int], iteration: int) -> bool:
        """Take in how far all ranks have come; whether a snapshot's round has ended with that."""
        self.rounds, news = self.rounds.after(statuses)
        for one in news:
            if one.level is Level.SNAPSHOT:
                self._on_snapshot(one, iteration)
            else:
                self._on_persisted(one, iteration)
        self._given_up &= self.rounds.spans
        return any(one.agreed.is_final and one.level is Level.SNAPSHOT for one in news)

    def lost_contact(self, iteration: int, error: Exception) -> None:
        """Without the reports of the others nothing can be agreed on: what is sealed stays, nothing more is taken."""
        self.protection = self.protection.after(ProtectionEvent.COPIES_SHORT, iteration)
        self.complain(f"no further snapshots after iteration {iteration} until the job restarts", [str(error)])

    def behind(self, iteration: int) -> None:
        """A snapshot is due, but earlier ones are still on their way: said once for each time that it begins."""
        if self._behind:
            return
        self._behind = True
        self.protection = self.protection.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
        open_ = ", ".join(f"{one.level.value} of iteration {one.plan.iteration}" for one in self.rounds.open)
        why = f"still under way are {open_}; memory or links are slow" if open_ else "older ones lack their replicas"
        log.warning("no snapshot of iteration %d: %s", iteration, why)

    def complain(self, what: str, failures: Sequence[str]) -> None:
        """Say what protection was lost and why; ends training with `--moe-ckpt-strict`. Raises CheckpointFailure."""
        why = "; ".join(dict.fromkeys(failures)) or "the reason is in the log of another rank"
        then = "training ends because of --moe-ckpt-strict" if self._job.config.strict else "training goes on"
        # A rank without a reason of its own leaves it to those that have one, and to rank 0, to speak.
        log.log(logging.ERROR if failures else logging.WARNING, "%s: %s; %s", what, why, then)
        if self._job.config.strict:
            raise CheckpointFailure(f"{what}: {why}; {then}")

    def check(self) -> None:
        """Let failures of background work reach training; what a store refuses only costs protection."""
        ended, self._tasks = [one for one in self._tasks if one.done()], [one for one in self._tasks if not one.done()]
        self._finish(ended)

    def drain(self) -> None:
        """Wait for all background work."""
        tasks, self._tasks = self._tasks, []
        self._finish(tasks)

    def close(self, *, wait: bool) -> None:
        """End the lanes; what has not begun is dropped."""
        for lane in self._lanes.values():
            lane.shutdown(wait, cancel_futures=True)

    def _on_snapshot(self, one: Round, iteration: int) -> None:
        work, restored = self._works[one.key], self._restored == one.plan.iteration
        assert isinstance(work, Work)
        is_kept = any(kept.piece.plan.iteration == one.plan.iteration for kept in self._kept)
        if one.agreed >= Status.SEALED and not restored and not is_kept and one.span not in self._given_up:
            self._strategy.settled(one.plan, Level.SNAPSHOT, True)
            self._kept += tuple(map(Kept, work.pieces))
            self._retain(one)
        if not one.agreed.is_final:
            return
        del self._works[one.key]
        self._under_way.pop(one.key, None)
        self.replicated_bytes += work.replicated_bytes
        self.last_round_s = work.duration_s
        self._renew = self._renew or one.agreed is not Status.PROTECTED
        if one.agreed is Status.PROTECTED:
            self._acknowledge(one, work, restored=restored)
        elif one.agreed is Status.FAILED or one.span not in self._given_up:
            self._degraded(one, work.failures)
        if one.agreed is Status.FAILED or one.span in self._given_up:
            self._give_up(one, work)
        elif restored:
            self._retain(one)
        else:
            self._clear_for_next(one)
            self._persist(one.plan, iteration)

    def _acknowledge(self, one: Round, work: Work, *, restored: bool) -> None:
        """All peers have the pieces of this round; the state is protected once they have all of its window."""
        names = {Kept(piece).name for piece in work.pieces}
        self._kept = tuple(kept.acknowledged(names) for kept in self._kept)
        if self._is_protected(one.span):
            self.protection = self.protection.after(ProtectionEvent.COMMITTED, one.plan.iteration)
            self._retain(one)
            if not restored:
                self._free(self._spare)
                self._spare = frozenset()

    def _clear_for_next(self, one: Round) -> None:
        """A whole window that lacks replicas gives up those it has: the next one brings its own as it goes.

        Not where it is all there is: some of its ranks may have all of their replicas.
        """
        others = {kept.piece.span for kept in self._kept} - {one.span}
        is_last = len(one.span) > 1 and one.plan.iteration == one.span[-1]
        if is_last and not self._is_protected(one.span) and any(map(self._is_protected, others)):
            names = {kept.name for kept in self._kept if kept.piece.span == one.span}
            self._submit("keeper", lambda: self._keeper.free(names, own=False))

    def _is_protected(self, span: range) -> bool:
        """Whether all of a window is kept, with all replicas."""
        window = [kept for kept in self._kept if kept.piece.span == span]
        iterations = {kept.piece.plan.iteration for kept in window}
        return iterations.issuperset(span) and all(kept.protected for kept in window)

    def _give_up(self, one: Round, work: Work) -> None:
        """Nothing can be made of this window any more: what there is of it is freed, and what comes of it later."""
        self._given_up |= {one.span}
        self._strategy.settled(one.plan, Level.SNAPSHOT, False)
        freed = {kept.name for kept in self._kept if kept.piece.span == one.span}
        self._kept = tuple(kept for kept in self._kept if kept.piece.span != one.span)
        freed |= {Kept(piece).name for piece in work.pieces}
        # Behind the round itself on its lane: a replica may still be arriving here.
        self._submit("keeper", lambda: self._keeper.free(freed))

    def _retain(self, one: Round) -> None:
        """Free the pieces in memory that newer ones cover: at once, because the next snapshot needs their room.

        A window covers nothing before its last snapshot.
        """
        if one.plan.iteration < one.span[-1]:
            return
        writing = [work.iterations for work in self._works.values() if isinstance(work, PersistWork)]
        needed, _ = keep_pieces(self._kept, ())
        self._kept, freed = keep_pieces(self._kept, frozenset[int]().union(*writing))
        self._free({kept.name for kept in freed})
        # What is only still being written to storage is covered by newer ones: peers need their room for these.
        self._free({kept.name for kept in self._kept} - {kept.name for kept in needed}, own=False)

    def _free(self, names: Collection[tuple[int, str]], *, own: bool = True) -> None:
        try:
            self._keeper.free(names, own=own)
        except StoreFailure as error:
            self.complain("memory could not be freed", [str(error)])

    def _persist(self, plan: SnapshotPlan, iteration: int) -> None:
        persister = self._persister
        plans = self._strategy.persistent(plan) if persister else ()
        if persister is None or not plans or self.durable is None:
            return
        if any(one.level is Level.PERSIST for one in self.rounds.open):
            log.warning(
                "the snapshot of iteration %d is not persisted: the one before is still written", plan.iteration
            )
            self._strategy.settled(plans[-1], Level.PERSIST, False)
            self.durable = self.durable.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
            return
        kinds = [tuple(one.piece.kind for one in self._kept if one.name[0] == each.iteration) for each in plans]
        work = PersistWork(plans, tuple(map(self._strategy.pieces, plans)), tuple(kinds))
        self.rounds = self.rounds.begun(Level.PERSIST, plans[-1])
        self._works[Level.PERSIST, plans[-1].iteration] = work
        self._begin(Level.PERSIST, plans[-1].iteration, "persister", lambda: persister.persist(work))

    def _on_persisted(self, one: Round, iteration: int) -> None:
        work, persister = self._works.pop(one.key), self._persister
        self._under_way.pop(one.key, None)
        assert isinstance(work, PersistWork) and persister is not None and self.durable is not None
        ok = one.agreed is Status.PROTECTED
        self._strategy.settled(one.plan, Level.PERSIST, ok)
        if ok:
            self.durable = self.durable.after(ProtectionEvent.COMMITTED, one.plan.iteration)
            known = (*self._persisted, *(piece for pieces in work.pieces for piece in pieces))
            self._persisted = keep_persistent(known, self._job.config.persist_keep)
            left = {piece.plan.iteration for piece in self._persisted}
            freed = {piece.plan.iteration for piece in known} - left
            self._submit("persister", lambda: persister.free(freed))
        else:
            self.durable = self.durable.after(ProtectionEvent.ATTEMPT_FAILED, iteration)
            self.complain(f"the snapshot of iteration {one.plan.iteration} was NOT persisted", work.failures)
        self._retain(one)

    def _degraded(self, one: Round, failures: Sequence[str]) -> None:
        self.protection = self.protection.after(ProtectionEvent.ATTEMPT_FAILED, one.plan.iteration)
        what = "was NOT taken" if one.agreed is Status.FAILED else "has too few replicas"
        self.complain(
            f"{self.protection.state.name.lower()} since iteration {self.protection.since_iteration}: the snapshot of"
            f" iteration {one.plan.iteration} {what}",
            failures,
        )

    def _begin(self, level: Level, iteration: int, lane: str, work: Callable[[], None]) -> None:
        self._under_way[level, iteration] = self._submit(lane, work)

    def _submit(self, lane: str, work: Callable[[], None]) -> Task[None]:
        task = self._lanes[lane].submit(work)
        self._tasks.append(task)
        return task

    def _finish(self, tasks: Sequence[Task[None]]) -> None:
        for task in tasks:
            try:
                task.result(self._job.config.timeout_s)
            except StoreFailure as error:
                self.complain("a store refused", [str(error)])
            except TimeoutError:
                self.complain("background work does not end", [f"waited {self._job.config.timeout_s:g} s for it"])
