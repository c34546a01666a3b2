"""What the snapshots in storage add up to: timelines, and on each of them states that are whole, or lack something.

A state is what all ranks stored of one window; a snapshot of everything, or of `pec`, is a window of one iteration.
What a snapshot of `pec` lacks is in older ones, so a whole state can be restored only if these are there as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import UnreadableCheckpoint
from ..policy.retention import kept_in_storage
from ..policy.timelines import Timeline, belongs, newest_first
from ..ports import Facts, SnapshotId, Store
from ..strategies import Piece
from ..types import STANDBY, OperatorId, OperatorKind, Part, SnapshotPlan


@dataclass(frozen=True)
class Stored:
    """One sealed snapshot: what its manifest says beside the records, and the bytes of these."""

    snapshot: SnapshotId
    facts: Facts = field(repr=False)
    nbytes: int

    @property
    def name(self) -> tuple[int, str]:
        """Iteration and kind, which all ranks' snapshots of one piece have in common."""
        return self.snapshot.iteration, self.snapshot.kind

    @property
    def timeline(self) -> Timeline:
        """The attempts that led to it; empty where its manifest does not say."""
        rows = cast("Sequence[tuple[str, int]]", self.facts.scalars.get("timeline", ()))
        return tuple((name, after) for name, after in rows)

    @property
    def span(self) -> range:
        """The iterations whose snapshots restore a state together with this one."""
        alone = (self.snapshot.iteration, self.snapshot.iteration)
        first, last = cast("Sequence[int]", self.facts.scalars.get("window", alone))
        return range(first, last + 1)

    @property
    def world_size(self) -> int:
        """Ranks of the job that made it; 0 where its manifest does not say."""
        return cast("int", self.facts.topology.get("world_size", 0))

    @property
    def leads(self) -> bool:
        """Whether it has the state of the trainer, which each rank writes last."""
        return "trainer" in self.facts.scalars

    @property
    def parts(self) -> dict[OperatorId, Part]:
        """What it holds of its rank's operators."""
        rows = cast("Sequence[Sequence[Any]]", self.facts.scalars.get("operators", ()))
        return {OperatorId(row[0], OperatorKind(row[1]), row[2]): Part(row[3]) for row in rows}


@dataclass(frozen=True)
class State:
    """What all ranks stored of one window.

    leading: one of its snapshots with the trainer's state. lacking: the (iteration, rank) of snapshots of that kind
    that are missing, torn or of another timeline; a whole state lacks none.
    """

    leading: Stored
    members: tuple[Stored, ...] = field(repr=False)
    lacking: tuple[tuple[int, int], ...]

    @property
    def span(self) -> range:
        """Its iterations; the state is that after the last one."""
        return self.leading.span

    def __str__(self) -> str:
        first, last = self.span[0], self.span[-1]
        return f"iteration {last}" if first == last else f"iterations {first} to {last}"


@dataclass(frozen=True)
class Restorable:
    """A whole state, its timeline, and all snapshots that restore it: its own, and older ones with what these lack."""

    timeline: Timeline
    state: State
    members: tuple[Stored, ...] = field(repr=False)


def stored(store: Store) -> tuple[Stored, ...]:
    """All sealed snapshots, ascending; what is freed meanwhile is left out. Raises StoreFailure."""
    return tuple(_each(store))


def read_stored(store: Store, snapshot: SnapshotId) -> Stored:
    """One sealed snapshot. Raises UnreadableCheckpoint when it is missing, torn or damaged."""
    with store.open(snapshot) as reader:
        return Stored(snapshot, reader.manifest.facts, reader.manifest.layout.nbytes)


def _each(store: Store) -> Iterator[Stored]:
    for snapshot in store.snapshots().sealed:
        with suppress(UnreadableCheckpoint):
            yield read_stored(store, snapshot)


def timelines(snapshots: Sequence[Stored]) -> list[Timeline]:
    """Those that the snapshots are of, the newest first."""
    return newest_first(one.timeline for one in snapshots)


def on(timeline: Timeline, snapshots: Sequence[Stored]) -> tuple[Stored, ...]:
    """Those that lie in the past of `timeline`. What a job left when it went back is no part of it."""
    return tuple(one for one in snapshots if belongs(one.timeline, one.snapshot.iteration, timeline))


def states(snapshots: Sequence[Stored]) -> tuple[State, ...]:
    """The states that snapshots of one timeline make, the newest first, whether they are whole or not."""
    leading: dict[tuple[str, range], Stored] = {}
    members: dict[tuple[str, range], list[Stored]] = {}
    for one in snapshots:
        members.setdefault((one.facts.job, one.span), []).append(one)
        if one.leads:
            leading.setdefault((one.facts.job, one.span), one)
    found = [State(one, tuple(members[key]), _lacking(one, members[key])) for key, one in leading.items()]
    return tuple(sorted(found, key=lambda state: (-state.span[-1], -state.span[0])))


def newest_whole(snapshots: Sequence[Stored]) -> tuple[Timeline, tuple[State, ...]] | None:
    """The newest timeline that leads to a whole state, and all whole states on it, the newest first; None without one.

    Whether older snapshots that a whole state may need are there is asked by `restorable`.
    """
    for timeline in timelines(snapshots):
        whole = tuple(state for state in states(on(timeline, snapshots)) if not state.lacking)
        if whole:
            return timeline, whole
    return None


def restorable(usable: Sequence[Stored], known: Sequence[Stored] | None = None) -> Iterator[Restorable]:
    """The states that can be restored, the newest first, on the newest timeline that leads to one.

    usable: the snapshots to restore from. known: all that ever were, as far as one knows, damaged ones among them:
    every part of an operator that a rank stored up to a state has to be among what restores it. By default `usable`.
    """
    for timeline in timelines(usable):
        here = _of_state(on(timeline, usable))
        ever = here if known is None else _of_state(on(timeline, known))
        pieces, any_here = pieces_of(here), False
        for state in states(here):
            if state.lacking:
                continue
            own = (piece for piece in pieces if piece.span == state.span)
            names = {piece_name(piece) for piece in (*own, *needed_pieces(pieces, state))}
            members = tuple(one for one in here if one.name in names)
            there, wanted = held(members), held(one for one in ever if one.span[-1] <= state.span[-1])
            if all(part in there.get(key, Part.NOTHING) for key, part in wanted.items()):
                any_here = True
                yield Restorable(timeline, state, members)
        if any_here:
            return


def pieces_of(snapshots: Iterable[Stored]) -> list[Piece]:
    """What all ranks have of one timeline, as retention judges it, by iteration and kind."""
    ranks: dict[tuple[int, str], dict[int, Stored]] = {}
    for one in snapshots:
        ranks.setdefault(one.name, {})[one.snapshot.rank] = one
    pieces = []
    for (iteration, kind), of_ranks in sorted(ranks.items()):
        first = next(iter(of_ranks.values()))
        if of_ranks.keys() >= set(range(first.world_size)):
            parts: dict[OperatorId, Part] = {}
            for one in of_ranks.values():
                for operator, part in one.parts.items():
                    parts[operator] = parts.get(operator, Part.NOTHING) | part
            pieces.append(Piece(kind, SnapshotPlan(iteration, parts), first.span))
    return pieces


def needed_pieces(pieces: Sequence[Piece], state: State, keep_last: int = 1) -> tuple[Piece, ...]:
    """Those of `keep_last` states, of which `state` is the newest, and those that these need."""
    return kept_in_storage([piece for piece in pieces if piece.span[-1] <= state.span[-1]], keep_last)


def piece_name(piece: Piece) -> tuple[int, str]:
    """As `Stored.name`."""
    return piece.plan.iteration, piece.kind


def held(snapshots: Iterable[Stored]) -> dict[tuple[int, OperatorId], Part]:
    """By rank and operator the parts of its state that there are copies of."""
    found: dict[tuple[int, OperatorId], Part] = {}
    for one in snapshots:
        for operator, part in one.parts.items():
            # Compute weights are the cast of master weights.
            given = part | Part.COMPUTE if Part.MASTER in part else part
            key = one.snapshot.rank, operator
            found[key] = found.get(key, Part.NOTHING) | given
    return found


def _of_state(snapshots: Iterable[Stored]) -> tuple[Stored, ...]:
    """Without logs and what was parked."""
    return tuple(one for one in snapshots if one.snapshot.kind not in STANDBY)


def _lacking(leading: Stored, members: Sequence[Stored]) -> tuple[tuple[int, int], ...]:
    kind = leading.snapshot.kind
    there = {(one.snapshot.iteration, one.snapshot.rank) for one in members if one.snapshot.kind == kind}
    wanted = ((iteration, rank) for iteration in leading.span for rank in range(leading.world_size))
    return tuple(one for one in wanted if one not in there)
