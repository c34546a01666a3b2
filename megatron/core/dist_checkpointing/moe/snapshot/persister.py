"""Copies sealed snapshots from memory to persistent storage, and removes what is not needed there. Runs on a lane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..errors import NewerFormat, UnreadableCheckpoint, format_error
from ..policy.rounds import Status
from ..ports import Clock, Layout, Reader, SnapshotId, Store, StoreFailure, Task
from ..strategies import Piece
from ..types import SnapshotPlan
from .identity import Identity

ATTEMPTS = 3
FIRST_PAUSE_S = 1.0


@dataclass
class PersistTask:
    """What becomes persistent together, and how far this rank has come.

    Args:
        plans: of one snapshot, or of all of a window, oldest first.
        pieces: of each plan.
        kinds: of the pieces in memory that have the records of each plan, the one with the trainer state first.
    """

    plans: tuple[SnapshotPlan, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    kinds: tuple[tuple[str, ...], ...]
    status: Status = Status.PENDING
    failures: list[str] = field(default_factory=list)
    running: Task[None] | None = None


class Persister:
    """Writes what one rank owns.

    Args:
        layout: gives the records of a piece on this rank, from the piece and its place among those of its plan.
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
    ) -> None:
        self._memory, self._storage, self._rank = memory, storage, rank
        self._identity, self._layout, self._clock = identity, layout, clock

    def persist(self, task: PersistTask) -> None:
        """Write the pieces, each sealed on its own; tried again after a pause where storage refuses."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._write(task)
                task.status = Status.PROTECTED
                break
            except Exception as error:  # whatever it is costs this copy, and all ranks hear of it
                task.failures.append(format_error(error))
                if attempt < ATTEMPTS and isinstance(error, StoreFailure):
                    self._clock.sleep(pause_s)
                    pause_s *= 4
                else:
                    task.status = Status.FAILED
                    break

    def free(self, iterations: Collection[int]) -> None:
        """Remove this rank's snapshots of these iterations. Raises StoreFailure."""
        for snapshot in self._storage.snapshots().sealed:
            if snapshot.rank == self._rank and snapshot.iteration in iterations:
                self._storage.free(snapshot)

    def _write(self, task: PersistTask) -> None:
        for plan, pieces, kinds in zip(task.plans, task.pieces, task.kinds, strict=True):
            self._write_snapshot(plan.iteration, pieces, kinds)

    def _write_snapshot(self, iteration: int, pieces: Sequence[Piece], kinds: Sequence[str]) -> None:
        with ExitStack() as stack:
            sources = [
                stack.enter_context(self._memory.open(SnapshotId(iteration, self._rank, kind))) for kind in kinds
            ]
            # The first piece last, as in memory.
            for index, piece in reversed([*enumerate(pieces)]):
                target = SnapshotId(iteration, self._rank, piece.kind)
                if self._is_done(target, piece):
                    continue
                self._storage.free(target)
                self._write_piece(target, piece, index, sources)

    def _is_done(self, target: SnapshotId, piece: Piece) -> bool:
        """Whether it was written in an earlier try, and not by an attempt of the job that training left behind.

        Raises NewerFormat for a snapshot under this name that a later version wrote: it is left as it is.
        """
        try:
            with self._storage.open(target) as reader:
                facts, wanted = reader.manifest.facts, self._identity.facts(piece, {})
        except NewerFormat:
            raise
        except UnreadableCheckpoint:
            return False
        same_timeline = facts.scalars.get("timeline") == wanted.scalars["timeline"]
        return same_timeline and facts.plan_digest == wanted.plan_digest

    def _write_piece(self, target: SnapshotId, piece: Piece, index: int, sources: Sequence[Reader]) -> None:
        layout = self._layout(piece, index)
        scalars = dict(sources[0].manifest.facts.scalars) if index == 0 else {}
        with self._storage.reserve(target, layout) as writer:
            for field_ in layout.fields:
                source = next((reader for reader in sources if field_.key in reader.manifest.by_key), None)
                if source is None:
                    raise UnreadableCheckpoint(f"{target}: record {field_.key} is not in memory; it is not persisted")
                writer.put(field_.key, source.read(field_.key))
            writer.seal(self._identity.facts(piece, scalars))
