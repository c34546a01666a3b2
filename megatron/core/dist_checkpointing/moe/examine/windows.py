"""What the snapshots in storage add up to: timelines, and on each of them states that are whole, or lack something.

A state is what all ranks stored of one window; a snapshot of everything, or of `pec`, is a window of one iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import UnreadableCheckpoint
from ..policy.timelines import Timeline, belongs, newest_first
from ..ports import Facts, SnapshotId, Store
from ..types import OperatorId, OperatorKind, Part


@dataclass(frozen=True)
class Stored:
    """One sealed snapshot: what its manifest says beside the records, and the bytes of these."""

    snapshot: SnapshotId
    facts: Facts = field(repr=False)
    nbytes: int

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

    That is where a recovery from storage goes, and where a conversion begins.
    """
    for timeline in timelines(snapshots):
        whole = tuple(state for state in states(on(timeline, snapshots)) if not state.lacking)
        if whole:
            return timeline, whole
    return None


def _lacking(leading: Stored, members: Sequence[Stored]) -> tuple[tuple[int, int], ...]:
    kind = leading.snapshot.kind
    there = {(one.snapshot.iteration, one.snapshot.rank) for one in members if one.snapshot.kind == kind}
    wanted = ((iteration, rank) for iteration in leading.span for rank in range(leading.world_size))
    return tuple(one for one in wanted if one not in there)
