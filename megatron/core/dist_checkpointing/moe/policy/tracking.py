"""The windows of a job as all ranks know them, what follows from that alone, and which of them may be freed.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import MoECheckpointError, UsageError
from ..types import CONSTANT, Level, OperatorId, Part, Piece, SnapshotPlan
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
        from_storage: whether any rank took any of the state from storage, so that no memory may have it.
        torn: by iteration the kinds of pieces in storage that are not whole there, as a rank was lost while it wrote.
    """

    target: int
    kept: tuple[Piece, ...]
    persisted: tuple[tuple[SnapshotPlan, ...], ...]
    spare: frozenset[PieceName]
    from_storage: bool = False
    torn: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def windows(self) -> dict[range, TrackedWindow]:
        """The windows in memory."""
        found = _restored(self.kept)
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


def leaving_room(pieces: Sequence[Piece], places: int = PLACES) -> tuple[Piece, ...]:
    """The pieces that stay, of what a recovery found in the memory of all ranks, so that training can continue.

    Where ranks end all places may be taken: the oldest span is protected, the next was on its way to peers, and the
    newest waits behind it. Replicas have one place less. What was on its way goes, as it is no safer than the newest.

    Args:
        pieces: In memory, of windows only whole ones.
        places: Spans of one kind that memory has room for.
    """
    spans: dict[str, set[range]] = {}
    for piece in pieces:
        spans.setdefault(piece.kind, set()).add(piece.span)
    on_the_way = {kind: sorted(found, key=lambda span: span[-1])[places - 2 : -1] for kind, found in spans.items()}
    covered = covered_pieces(_restored(pieces).values())
    return tuple(
        piece
        for piece in pieces
        if piece.span not in on_the_way[piece.kind] or (piece.plan.iteration, piece.kind) not in covered
    )


def _restored(pieces: Iterable[Piece]) -> dict[range, TrackedWindow]:
    """The windows of pieces that all ranks have in memory after a recovery."""
    found: dict[range, TrackedWindow] = {}
    for piece in pieces:
        window = found.get(piece.span, TrackedWindow(piece.span, WindowState.RESTORED))
        found[piece.span] = replace(window, pieces=(*window.pieces, TrackedPiece(piece, Status.SEALED)))
    return found


def oldest_base(windows: Iterable[TrackedWindow]) -> int | None:
    """The first iteration of the oldest window that is kept, where the earliest replay starts; None without one.

    Spare pieces count: until a newer window is whole, the next recovery has nothing else.
    """
    bases: list[int] = []
    for window in windows:
        is_spare = window.state is WindowState.SPARE  # whose pieces are of several spans
        held = window.pieces if is_spare else window.sealed
        if iterations := [one.iteration for one in held if one.piece.kind != CONSTANT]:
            bases.append(min(iterations) if is_spare else window.span[0])
    return min(bases, default=None)


def yielded_replicas(window: TrackedWindow, windows: Iterable[TrackedWindow]) -> list[PieceName]:
    """The replicas that a whole window gives up where it lacks others: the next one brings its own as it goes.

    None where it is all there is: some ranks may have all of their replicas. A single snapshot leaves no room to gain.
    What training does not change stays, as it is sent once.

    Args:
        window: The window that lacks replicas.
        windows: All windows that memory holds.
    """
    lacks_some = window.state is WindowState.UNDER_REPLICATED and len(window.span) > 1
    if not lacks_some or not any(other.state is WindowState.PROTECTED for other in windows):
        return []
    return [held.name for held in window.pieces if held.piece.kind != CONSTANT]


# What may be freed: windows in memory, and windows in storage; the same answer on all ranks.
#
# The paper frees a window once a newer one is protected, and leaves out that ranks get there at different times and
# can only recover to a state that all of them have (MoEvement 3.2, "Persisting Snapshots"; MoC 5.1). Here a window is
# in a state only once all ranks agree on it, so what is freed on one rank is not missed on
# another.

_COMPONENTS = (Part.MASTER, Part.MOMENTS, Part.COMPUTE)
_WHOLE = (WindowState.REPLICATING, WindowState.PROTECTED, WindowState.UNDER_REPLICATED, WindowState.RESTORED)


@dataclass(frozen=True)
class _Whole:
    """A window as it is after its last iteration: all of its operators, in full."""

    iteration: int
    operators: frozenset[OperatorId]

    def giving(self, part: Part) -> frozenset[OperatorId]:
        """As `SnapshotPlan.giving`."""
        return self.operators


@dataclass(frozen=True, eq=False)
class _Candidate:
    """What is freed together: the pieces of one kind of a whole window, or all of a window in storage.

    Args:
        plans: what it is worth, for comparison with others.
    """

    span: range
    plans: tuple[SnapshotPlan | _Whole, ...]
    names: frozenset[PieceName]
    protected: bool = False


def covered_pieces(windows: Iterable[TrackedWindow]) -> frozenset[PieceName]:
    """The pieces in memory that newer ones cover, which are as safe.

    Of each operator and component (master weights, moments, compute weights) the newest copy is kept among the
    protected windows, and among all whole ones. For a sparse window, which has every operator, that leaves the paper's
    one protected window and one in flight; under lossy strategies an old snapshot stays while it has the newest copy
    of one component of one operator. Master weights count as compute weights too, which are their cast. Windows that
    are not whole are not judged: they stay until they are, or are given up.
    """
    whole = sorted((piece for window in windows if window.state in _WHOLE for piece in _by_kind(window)), key=_age)
    protected = [candidate for candidate in whole if candidate.protected]
    needed = {*_newest_holders(whole), *_newest_holders(protected)}
    return frozenset[PieceName]().union(*(candidate.names for candidate in whole if candidate not in needed))


def all_are_protected(windows: Iterable[TrackedWindow]) -> bool:
    """Whether protected windows have a copy of each component of each operator that whole ones have: under lossy
    strategies a new snapshot may need an old one that peers lack."""
    whole = [piece for window in windows if window.state in _WHOLE for piece in _by_kind(window)]
    for component in _COMPONENTS:
        safe, other = (
            # Mostly one object: windows have the same operators.
            {id(given): given for one in whole if one.protected is is_safe for given in _given(one, component)}
            for is_safe in (True, False)
        )
        rest = [given for key, given in other.items() if key not in safe]
        if rest and not frozenset[OperatorId]().union(*rest) <= frozenset[OperatorId]().union(*safe.values()):
            return False
    return True


def _given(candidate: _Candidate, component: Part) -> Iterator[frozenset[OperatorId]]:
    return (plan.giving(component) for plan in candidate.plans)


def kept_in_storage(pieces: Sequence[Piece], keep_last: int) -> tuple[Piece, ...]:
    """The pieces in storage that stay: the newest snapshots or windows, and what these need.

    Snapshots may need older ones that have the newest copy, as of their iteration, of a component that they lack (MoC
    5.1); windows never do, and those that lack a piece are not kept.

    Args:
        pieces: The pieces that are stored.
        keep_last: How many of the newest snapshots or windows to keep, at least 1.

    Raises:
        UsageError: `keep_last` is below 1.
    """
    if keep_last < 1:
        raise UsageError(f"keep_last is {keep_last}, but must be at least 1")
    complete = sorted(_complete(pieces), key=_age)
    kept: set[_Candidate] = set()
    for end in range(len(complete), max(0, len(complete) - keep_last), -1):
        kept |= {complete[end - 1], *_newest_holders(complete[:end])}
    spans = {candidate.span for candidate in kept}
    return tuple(piece for piece in pieces if piece.span in spans)


def _by_kind(window: TrackedWindow) -> Iterator[_Candidate]:
    """The pieces of a whole window, those of one kind together.

    A whole window is worth all that its first snapshot names, as it is after its last iteration. What training does
    not change is sent with one snapshot of it, whatever becomes of the others.
    """
    safe = window.state is WindowState.PROTECTED
    for kind in dict.fromkeys(held.piece.kind for held in window.pieces):
        pieces = [held for held in window.pieces if held.piece.kind == kind]
        first = pieces[0].piece.plan
        plan = first if len(window.span) == 1 else _Whole(window.span[-1], first.operators)
        yield _Candidate(
            window.span,
            (plan,),
            frozenset(held.name for held in pieces),
            protected=all(
                held.piece.replicated and (safe or (kind == CONSTANT and held.agreed is Status.PROTECTED))
                for held in pieces
            ),
        )


def _complete(pieces: Iterable[Piece]) -> Iterator[_Candidate]:
    """The windows of these pieces of which no iteration is missing."""
    spans: dict[range, list[Piece]] = {}
    for piece in pieces:
        spans.setdefault(piece.span, []).append(piece)
    for span, members in spans.items():
        plans = tuple(piece.plan for piece in members)
        if {plan.iteration for plan in plans}.issuperset(span):
            yield _Candidate(span, plans, frozenset((piece.plan.iteration, piece.kind) for piece in members))


def _newest_holders(candidates: Sequence[_Candidate]) -> set[_Candidate]:
    """Those that hold the newest copy of any component; of equally new ones the last in the sequence."""
    snapshots = [(plan.iteration, at, plan) for at, candidate in enumerate(candidates) for plan in candidate.plans]
    snapshots.sort(key=lambda snapshot: snapshot[:2], reverse=True)
    found: set[_Candidate] = set()
    for component in _COMPONENTS:
        seen: frozenset[OperatorId] = frozenset()
        for _, at, plan in snapshots:
            given = plan.giving(component)
            if given is not seen and not given <= seen:  # mostly one object: windows have the same operators
                found.add(candidates[at])
                seen = seen | given if seen else given
    return found


def _age(candidate: _Candidate) -> tuple[int, int, list[PieceName]]:
    return candidate.span[-1], candidate.span[0], sorted(candidate.names)
