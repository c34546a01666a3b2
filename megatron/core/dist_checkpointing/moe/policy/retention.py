"""What may be freed: windows in memory, and windows in storage; the same answer on all ranks.

The paper frees a window once a newer one is protected, and leaves out that ranks get there at different times and can
only recover to a state that all of them have (MoEvement 3.2, "Persisting Snapshots"; MoC 5.1). Here a window is in a
state only once all ranks agree on it (`policy.tracking`), so what is freed on one rank is not missed on another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..types import OperatorId, Part, Piece, SnapshotPlan
from .lifecycle import WindowState
from .tracking import PieceName, TrackedWindow

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

    A whole window is worth all that its first snapshot names, as it is after its last iteration.
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
            protected=safe and all(held.piece.replicated for held in pieces),
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
