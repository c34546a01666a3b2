"""Snapshots in memory become persistent beside training: each rank writes what it owns, in the order of plans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from ..errors import UnreadableCheckpoint, format_error
from ..policy.lineage import Identity
from ..policy.tracking import Status
from ..ports import Clock, Layout, Reader, SnapshotId, Store, StoreFailure, Task
from ..strategies import Piece
from ..types import SnapshotPlan
from ..types.operators import scaled
from .persisting import CopyOrder, carry_out, retried


@dataclass
class PersistTask:
    """What becomes persistent together, and how far this rank has come.

    Args:
        plans: of one snapshot, or of all of a window, oldest first.
        pieces: of each plan.
        held: the pieces in memory that have the records of each plan, the one with the trainer state first.
    """

    plans: tuple[SnapshotPlan, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    held: tuple[tuple[Piece, ...], ...]
    status: Status = Status.PENDING
    failures: list[str] = field(default_factory=list)
    running: Task[None] | None = None
    written_bytes: int = 0
    begun_s: float = 0.0
    duration_s: float = 0.0


class Persister:
    """Writes what one rank owns.

    Args:
        layout: gives the records of a piece on this rank, from the piece and its place among those of its plan.
        varying: keys that are not in memory where a peer stored them in place of this rank.
        announce: is told what is about to be written, and with nothing when that has come to an end: who outlives this
            process can then finish it.
    """

    def __init__(
        self,
        memory: Store,
        storage: Store,
        rank: int,
        identity: Identity,
        layout: Callable[[Piece, int], Layout],
        *,
        clock: Clock,
        varying: frozenset[str] = frozenset(),
        announce: Callable[[Sequence[CopyOrder]], None] = lambda orders: None,
    ) -> None:
        self._varying, self._announce = varying, announce
        self._memory, self._storage, self._rank = memory, storage, rank
        self._identity, self._layout, self._clock = identity, layout, clock
        self._is_stopped = False

    def stop(self) -> None:
        """Give up what is being written, and write no more; called from another thread, and not waited for here."""
        # One thread sets it, another reads it before each record: a lock would add nothing.
        self._is_stopped = True

    def _check_stopped(self) -> None:
        if self._is_stopped:
            raise UnreadableCheckpoint("this process writes no more: what was being persisted is given up")

    def persist(self, task: PersistTask) -> None:
        """Write the pieces, each sealed on its own; tried again after a pause where storage refuses."""
        task.begun_s = self._clock.now_s()

        def note(error: Exception) -> None:
            task.failures.append(format_error(error))

        try:
            retried(partial(self._write, task), self._clock.sleep, note)
            task.duration_s = self._clock.now_s() - task.begun_s
            task.status = Status.PROTECTED
        except Exception as error:  # whatever it is costs this copy, and all ranks hear of it
            note(error)
            task.status = Status.FAILED
        if not self._is_stopped:
            self._announce(())

    def free(self, iterations: Collection[int]) -> None:
        """Remove this rank's snapshots of these iterations. Raises StoreFailure once all were tried."""
        failures = []
        for snapshot in self._storage.snapshots(self._rank).sealed:
            if snapshot.iteration in iterations:
                try:
                    self._storage.free(snapshot)
                except StoreFailure as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _write(self, task: PersistTask) -> None:
        self._check_stopped()
        with ExitStack() as stack:
            found = [
                (order, sources)
                for plan, pieces, held in zip(task.plans, task.pieces, task.held, strict=True)
                for order, sources in self._orders(plan.iteration, pieces, held, stack)
            ]
            # Before the first record is written: a trainer that is killed in between leaves an order to be finished.
            self._announce([order for order, _ in found])
            for order, sources in found:
                task.written_bytes += carry_out(order, sources, self._storage, self._check_stopped)

    def behind(self, task: PersistTask) -> str:
        """Who still writes this, and since when; any rank may be the one, and only that rank knows."""
        if task.running is None or task.running.done():
            return "by another rank"
        since_s = self._clock.now_s() - task.begun_s if task.begun_s else 0.0
        return f"by rank {self._rank}: for {since_s:.0f} s, {scaled(task.written_bytes)} are whole"

    def _orders(
        self, iteration: int, pieces: Sequence[Piece], held: Sequence[Piece], stack: ExitStack
    ) -> Iterator[tuple[CopyOrder, list[Reader]]]:
        """What is to be written of one snapshot, and the readers of its sources, which `stack` closes."""
        sources = [
            stack.enter_context(self._memory.open(SnapshotId(iteration, self._rank, piece.kind)))
            for _, piece in self._identity.pieces(held)
        ]
        keys = {key for reader in sources for key in reader.manifest.by_key}
        # The first piece last, as in memory.
        for index, piece in reversed(self._identity.pieces(pieces)):
            layout = self._layout(piece, index)
            if not self._varying <= keys:
                layout = Layout.of([one for one in layout.fields if one.key not in self._varying or one.key in keys])
            scalars = dict(sources[0].manifest.facts.scalars) if index == 0 else {}
            target = SnapshotId(iteration, self._rank, piece.kind)
            yield CopyOrder.of(target, self._identity.facts(piece, scalars), layout, sources), sources
