"""The windows of a job as all ranks know them, and what follows from that alone.

A commit round begins when a snapshot, or its persistent copy, is planned, which all ranks do alike. Each rank then
reports how far it has come; the least of these reports is what all have reached. So every rank learns the same in the
same iteration, whatever the order in which things happen on it.

A window is the range of iterations whose snapshots restore a state together; a snapshot of `full` or `pec` is a window
of one. `snapshot.tracker` keeps one value per window and replaces it at each piece of news; every change of state goes
through a table of `lifecycle`. Nothing here depends on the rank, so all ranks decide alike without asking.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import MoECheckpointError
from ..types import CONSTANT, Level, Piece, SnapshotPlan
from .lifecycle import PERSISTENT_COPY, WINDOW, PersistEvent, PersistState, WindowEvent, WindowState

MAX_OPEN_SPANS = 2
"""Spans of snapshots under way at a time: one is being copied, one may still be replicated (MoC 5.2)."""

PLACES = 3
"""Spans of one kind that memory has room for: those under way, and one that is kept until then."""


class Status(enum.IntEnum):
    """How far a rank, or the least of all, has come with a round; the least value of several is the joint one."""

    FAILED = 0  # this rank's part does not exist and will not
    PENDING = 1
    SEALED = 2  # this rank's part is whole on its node, and on its way to peers
    UNDER_REPLICATED = 3  # as sealed, but some peer did not take it and it is not tried again
    PROTECTED = 4  # all peers that were asked for verified it; or it is persistent

    @property
    def is_final(self) -> bool:
        """Whether it does not change any more."""
        return self not in (Status.PENDING, Status.SEALED)


@dataclass(frozen=True)
class CommitRound:
    """A snapshot (or the part of one that becomes persistent) and how far all ranks are known to have come.

    Args:
        span: the iterations whose snapshots restore a state together with this one.
    """

    level: Level
    plan: SnapshotPlan
    span: range
    agreed: Status = Status.PENDING

    @property
    def key(self) -> tuple[Level, int]:
        """What tells open rounds apart."""
        return self.level, self.plan.iteration


@dataclass(frozen=True)
class CommitRounds:
    """The open rounds, oldest first."""

    open: tuple[CommitRound, ...] = ()

    def begun(self, level: Level, plan: SnapshotPlan, span: range) -> CommitRounds:
        """With one more round.

        Args:
            level: Where the copies go.
            plan: The snapshot.
            span: The iterations whose snapshots restore a state together with this one.

        Raises:
            MoECheckpointError: It is open already.
        """
        round_ = CommitRound(level, plan, span)
        if round_.key in [known.key for known in self.open]:
            raise MoECheckpointError(f"the {level.value} round of iteration {plan.iteration} is open already")
        return CommitRounds((*self.open, round_))

    def after(self, agreed: Sequence[int]) -> tuple[CommitRounds, tuple[CommitRound, ...]]:
        """The rounds after the least reports of all ranks, one per open round.

        Returns:
            The rounds that are still open, and those that came farther: a round is closed when its status is final.

        Raises:
            MoECheckpointError: for another number of reports than there are rounds.
        """
        if len(agreed) != len(self.open):
            raise MoECheckpointError(f"{len(agreed)} reports for {len(self.open)} open rounds: the ranks lost step")
        now = [replace(round_, agreed=Status(value)) for round_, value in zip(self.open, agreed, strict=True)]
        updates = tuple(new for new, old in zip(now, self.open, strict=True) if new.agreed is not old.agreed)
        return CommitRounds(tuple(round_ for round_ in now if not round_.agreed.is_final)), updates


PieceName = tuple[int, str]
"""Iteration and kind, which tell pieces apart."""

SPARE_SPAN = range(0)
"""The key of the spare pieces among the windows: they belong to one state, whatever their iterations."""


@dataclass(frozen=True)
class TrackedPiece:
    """A piece of a snapshot, and how far all ranks have come with it."""

    piece: Piece
    agreed: Status = Status.PENDING

    @property
    def iteration(self) -> int:
        """Of its snapshot."""
        return self.piece.plan.iteration

    @property
    def name(self) -> PieceName:
        """Iteration and kind."""
        return self.iteration, self.piece.kind


@dataclass(frozen=True)
class TrackedWindow:
    """A window in memory.

    Args:
        pieces: what takes memory, oldest first: what all ranks have sealed and is not freed, and what is still copied.
    """

    span: range
    state: WindowState = WindowState.COPYING
    pieces: tuple[TrackedPiece, ...] = ()

    @property
    def sealed(self) -> tuple[TrackedPiece, ...]:
        """The pieces that a recovery may use; of a window that is given up or spare none count."""
        if self.state in (WindowState.GIVEN_UP, WindowState.SPARE):
            return ()
        return tuple(piece for piece in self.pieces if piece.agreed >= Status.SEALED)

    def after(self, event: WindowEvent) -> TrackedWindow:
        """The window after an event. Raises UnexpectedEvent."""
        return replace(self, state=WINDOW.after(self.state, event))

    def begun(self, pieces: Iterable[Piece]) -> TrackedWindow:
        """With the pieces of one more snapshot that is copied."""
        window = self.after(WindowEvent.BEGUN) if self.pieces else self
        return replace(window, pieces=(*self.pieces, *map(TrackedPiece, pieces)))

    def awaits_seal(self, iteration: int) -> bool:
        """Whether it is news for this window that all ranks have sealed this snapshot."""
        pending = any(piece.iteration == iteration and piece.agreed is Status.PENDING for piece in self.pieces)
        return pending and self.state is WindowState.COPYING

    def all_ranks_sealed(self, iteration: int) -> TrackedWindow:
        """After all ranks have sealed the snapshot of this iteration."""
        event = WindowEvent.ALL_SEALED if iteration == self.span[-1] else WindowEvent.SEALED
        return self._agreed(Status.SEALED, iteration).after(event)

    def ended(self, iteration: int, agreed: Status) -> TrackedWindow:
        """After nothing more happens to the snapshot of one iteration.

        A window that is given up keeps what is still under way, because that takes memory until it has ended.

        Args:
            iteration: The iteration of the snapshot.
            agreed: The final status, of all ranks the least.
        """
        if self.state is WindowState.RESTORED:  # all of it is replicated in one round
            return self._judged(self._agreed(agreed))
        window = self._agreed(agreed, iteration)
        if agreed is Status.FAILED or self.state is WindowState.GIVEN_UP:
            under_way = tuple(piece for piece in window.pieces if not piece.agreed.is_final)
            event = WindowEvent.FAILED if agreed is Status.FAILED else WindowEvent.ENDED
            return replace(window, pieces=under_way).after(event)
        return self._judged(window) if iteration == self.span[-1] else window.after(WindowEvent.ENDED)

    def without(self, names: Collection[PieceName]) -> TrackedWindow:
        """Without these pieces, which newer ones cover; freed once none is left."""
        pieces = tuple(piece for piece in self.pieces if piece.name not in names)
        window = replace(self, pieces=pieces)
        return window.after(WindowEvent.SUPERSEDED) if self.pieces and not pieces else window

    def _agreed(self, agreed: Status, iteration: int | None = None) -> TrackedWindow:
        pieces = tuple(
            replace(piece, agreed=agreed) if iteration in (None, piece.iteration) else piece for piece in self.pieces
        )
        return replace(self, pieces=pieces)

    @staticmethod
    def _judged(window: TrackedWindow) -> TrackedWindow:
        """A whole window of which nothing is under way any more: it has all replicas or it has not."""
        safe = all(piece.agreed is Status.PROTECTED for piece in window.pieces)
        return window.after(WindowEvent.ALL_ACKNOWLEDGED if safe else WindowEvent.REPLICAS_MISSING)


@dataclass(frozen=True)
class PersistedWindow:
    """The copy of a window in persistent storage."""

    pieces: tuple[Piece, ...]
    state: PersistState = PersistState.WRITING

    def after(self, event: PersistEvent) -> PersistedWindow:
        """The copy after an event. Raises UnexpectedEvent."""
        return replace(self, state=PERSISTENT_COPY.after(self.state, event))


@dataclass(frozen=True)
class RestoredState:
    """What a recovery left: from here on the windows are tracked again.

    Args:
        target: the iteration that training continues after.
        kept: pieces of snapshots in the memory of all ranks, of windows only whole ones.
        persisted: snapshots in storage, of all ranks, those of one window together, oldest first.
        spare: pieces in the memory of some ranks, by iteration and kind, to be kept until a newer window is protected.
    """

    target: int
    kept: tuple[Piece, ...]
    persisted: tuple[tuple[SnapshotPlan, ...], ...]
    spare: frozenset[PieceName]

    def windows(self) -> dict[range, TrackedWindow]:
        """The windows in memory."""
        found: dict[range, TrackedWindow] = {}
        for piece in self.kept:
            window = found.get(piece.span, TrackedWindow(piece.span, WindowState.RESTORED))
            found[piece.span] = replace(window, pieces=(*window.pieces, TrackedPiece(piece, Status.SEALED)))
        if self.spare:
            pieces = [Piece(kind, SnapshotPlan(iteration, {})) for iteration, kind in sorted(self.spare)]
            spare = tuple(TrackedPiece(piece, Status.SEALED) for piece in pieces)
            found[SPARE_SPAN] = TrackedWindow(SPARE_SPAN, WindowState.SPARE, spare)
        return found

    def persisted_windows(self) -> dict[range, PersistedWindow]:
        """The windows in storage."""
        found = {}
        for plans in self.persisted:
            span = range(plans[0].iteration, plans[-1].iteration + 1)
            found[span] = PersistedWindow(tuple(Piece("", plan, span) for plan in plans), PersistState.PERSISTENT)
        return found


def may_begin(iteration: int, windows: Collection[TrackedWindow], rounds: CommitRounds, places: int = PLACES) -> bool:
    """Whether memory has room for a snapshot of this iteration.

    A window that was begun has its room. For a new one, of each kind one span is kept, one may be under way, one is
    coming (MoC 5.2); what lacks replicas, or is still being persisted, takes the place of one.

    Args:
        iteration: The iteration to snapshot.
        windows: The windows that memory holds.
        rounds: The open rounds.
        places: Spans of one kind that memory has room for.
    """
    copying = {window.span for window in windows if window.state is WindowState.COPYING}
    if any(iteration in span for span in copying):
        return True
    under_way = copying | {round_.span for round_ in rounds.open if round_.level is Level.SNAPSHOT}
    taken = Counter(
        kind for kind, _ in {(held.piece.kind, window.span) for window in windows for held in window.pieces}
    )
    return len(under_way) < MAX_OPEN_SPANS and max(taken.values(), default=0) < places


def oldest_base(windows: Iterable[TrackedWindow]) -> int | None:
    """The first iteration of the oldest window that is kept, where the earliest replay starts; None without one."""
    states = (window for window in windows if any(held.piece.kind != CONSTANT for held in window.sealed))
    return min((window.span[0] for window in states), default=None)


def yields_replicas(window: TrackedWindow, windows: Iterable[TrackedWindow]) -> bool:
    """Whether a whole window that lacks replicas gives up those it has: the next one brings its own as it goes.

    Not where it is all there is: some ranks may have all of their replicas. A single snapshot leaves no room to gain.

    Args:
        window: The window that lacks replicas.
        windows: All windows that memory holds.
    """
    lacks_some = window.state is WindowState.UNDER_REPLICATED and len(window.span) > 1
    return lacks_some and any(other.state is WindowState.PROTECTED for other in windows)
