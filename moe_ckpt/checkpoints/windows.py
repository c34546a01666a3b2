"""What stored snapshots add up to: timelines, and on each of them states that are whole, or lack something.

A state is what all ranks stored of one window; a snapshot of everything, or of `pec`, is a window of one iteration.
What a snapshot of `pec` lacks is in older ones, so a whole state can be restored only if these are there as well:
`restorable` judges that, for inspect, verify, gc, diff and convert alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct, ValidationError, convert

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.policy.lineage import MAX_ATTEMPTS, Lineage, belongs, newest_first
from megatron.core.dist_checkpointing.moe.policy.tracking import kept_in_storage
from megatron.core.dist_checkpointing.moe.ports import Facts, Manifest, SnapshotId, Store
from megatron.core.dist_checkpointing.moe.strategies import Piece
from megatron.core.dist_checkpointing.moe.types import (
    STANDBY,
    OperatorId,
    OperatorKind,
    Part,
    SnapshotPlan,
    expert,
)

_Owned = dict[tuple[str, int], set[OperatorId]]
"""By layout and rank the operators of which it stored anything."""


MOST_RANKS, MOST_ITERATIONS = 2**17, 2**16
"""Of a job, and of one window: what says more is damaged, or made to keep a reader busy."""

type _Count = Annotated[int, Meta(ge=0, le=2**62)]
type _PerLayer = _Count | tuple[_Count, ...]


class Command(Struct):
    """The flags of the driver, as they were given in `folder`."""

    flags: tuple[str, ...] = ()
    folder: str = ""


class _Trainer(Struct):
    command: Command | None = None


class _Ledger(Struct):
    losses: tuple[tuple[int, int, tuple[_Count, ...]], ...] = ()
    layers: tuple[_Count, ...] = ()
    copies: dict[str, tuple[tuple[tuple[tuple[int, _Count], ...], ...], ...]] = {}

    def saved(self) -> set[OperatorId]:
        """Experts of which each level has a copy with tokens; without any it is as when the ledger began."""
        of_levels = (
            {
                expert(layer, index)
                for layer, row in zip(self.layers, rows, strict=False)
                for index, history in enumerate(row)
                if history and history[-1][1]
            }
            for rows in self.copies.values()
        )
        return set.intersection(*of_levels) if self.copies else set()


class _Strategy(Struct):
    ledger: _Ledger | None = None
    planned: tuple[_PerLayer, _PerLayer] = (0, 0)  # tokens, and top-k

    def __post_init__(self) -> None:
        if self.ledger and len({len(lost) for _, _, lost in self.ledger.losses}) > 1:
            raise ValueError("its faults lost tokens of different layers")


class _Said(Struct):
    """What readers of a manifest believe of its scalars."""

    timeline: Annotated[tuple[tuple[str, int], ...], Meta(max_length=MAX_ATTEMPTS)] = ()
    window: tuple[int, int] | None = None
    operators: tuple[tuple[int, OperatorKind, int, Annotated[int, Meta(ge=0, le=15)]], ...] = ()
    left_out: tuple[tuple[int, OperatorKind, int], ...] = ()
    made_by: str | None = None
    trainer: _Trainer | None = None
    strategy: _Strategy | None = None

    def __post_init__(self) -> None:
        if self.window and not 0 <= self.window[1] - self.window[0] < MOST_ITERATIONS:
            raise ValueError(f"no window has the iterations {self.window}")


class _Topology(Struct):
    world_size: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0


@dataclass(frozen=True)
class StoredSnapshot:
    """One sealed snapshot: what its manifest says beside the records, and the bytes of these.

    world_size: ranks of the job that made it; 0 where its manifest does not say.
    """

    snapshot: SnapshotId
    facts: Facts = field(repr=False)
    nbytes: int
    said: _Said = field(repr=False)
    world_size: int

    @classmethod
    def of(cls, manifest: Manifest) -> StoredSnapshot:
        """What a manifest describes. Raises UnreadableCheckpoint for one that no job writes."""
        facts = manifest.facts
        try:
            said, ranks = convert(facts.scalars, _Said), convert(facts.topology, _Topology).world_size
        except ValidationError as error:
            raise UnreadableCheckpoint(f"{manifest.snapshot}: no job writes such a manifest: {error}") from error
        return cls(manifest.snapshot, facts, manifest.layout.nbytes, said, ranks)

    @property
    def name(self) -> tuple[int, str]:
        """Iteration and kind, which all ranks' snapshots of one piece have in common."""
        return self.snapshot.iteration, self.snapshot.kind

    @property
    def timeline(self) -> Lineage:
        """The attempts that led to it; empty where its manifest does not say."""
        return self.said.timeline

    @property
    def span(self) -> range:
        """The iterations whose snapshots restore a state together with this one."""
        first, last = self.said.window or (self.snapshot.iteration, self.snapshot.iteration)
        return range(first, last + 1)

    @property
    def layout(self) -> str:
        """In which its rank owns what it owns: after a change of it others do."""
        return repr(sorted(self.facts.topology.items()))

    @property
    def leads(self) -> bool:
        """Whether it has the state of the trainer, which each rank writes last."""
        return "trainer" in self.facts.scalars

    @property
    def parts(self) -> dict[OperatorId, Part]:
        """What it holds of its rank's operators."""
        return {OperatorId(layer, kind, index): Part(part) for layer, kind, index, part in self.said.operators}

    @property
    def owned(self) -> set[OperatorId]:
        """The operators of its rank, as far as it holds or names them."""
        return {*self.parts, *(OperatorId(*one) for one in self.said.left_out)}

    def unheld_experts(self, held: Mapping[OperatorId, Part]) -> set[OperatorId]:
        """Experts of which its strategy counts on copies, its own or older ones, and some state is not held."""
        strategy = self.said.strategy
        saved = strategy.ledger.saved() if strategy and strategy.ledger else ()
        return {one for one in saved if Part.MASTER_AND_MOMENTS not in held.get(one, Part.NOTHING)}

    @property
    def command(self) -> Command | None:
        """How its job was started; None where its manifest does not say."""
        return self.said.trainer.command if self.said.trainer else None


@dataclass(frozen=True)
class StoredState:
    """What all ranks stored of one window.

    leading: one of its snapshots with the trainer's state. lacking: how many snapshots of that kind are missing, torn
    or of another timeline; a whole state lacks none. first_lacking: iteration and rank of the first one.
    """

    leading: StoredSnapshot
    members: tuple[StoredSnapshot, ...] = field(repr=False)
    lacking: int
    first_lacking: tuple[int, int] | None

    @property
    def span(self) -> range:
        """Its iterations; the state is that after the last one."""
        return self.leading.span

    @property
    def missing(self) -> str:
        """The first snapshot that it lacks, and how many more; empty for a whole state."""
        if self.first_lacking is None:
            return ""
        iteration, rank = self.first_lacking
        more = f" and {self.lacking - 1} more" if self.lacking > 1 else ""
        return f"rank {rank} after iteration {iteration}{more}"

    def __str__(self) -> str:
        first, last = self.span[0], self.span[-1]
        return f"iteration {last}" if first == last else f"iterations {first} to {last}"


@dataclass(frozen=True)
class RestorableState:
    """A whole state, its timeline, and all snapshots that restore it: its own, and older ones with what these lack."""

    timeline: Lineage
    state: StoredState
    members: tuple[StoredSnapshot, ...] = field(repr=False)


def stored_snapshots(store: Store) -> tuple[StoredSnapshot, ...]:
    """All sealed snapshots, ascending; what is freed meanwhile is left out. Raises StoreFailure."""
    found = []
    for snapshot in store.snapshots().sealed:
        with suppress(UnreadableCheckpoint):
            found.append(read_stored(store, snapshot))
    return tuple(found)


def read_stored(store: Store, snapshot: SnapshotId) -> StoredSnapshot:
    """One sealed snapshot. Raises UnreadableCheckpoint when it is missing, torn or damaged.

    Args:
        store: Opens the snapshot.
        snapshot: Iteration, rank and kind of the snapshot.
    """
    with store.open(snapshot) as reader:
        return StoredSnapshot.of(reader.manifest)


def timelines(snapshots: Sequence[StoredSnapshot]) -> list[Lineage]:
    """Those that the snapshots are of, the newest first."""
    return newest_first((seen.timeline, seen.snapshot.iteration) for seen in snapshots)


def on_timeline(timeline: Lineage, snapshots: Sequence[StoredSnapshot]) -> tuple[StoredSnapshot, ...]:
    """The snapshots in the past of a timeline. What a job left when it went back is no part of it.

    Args:
        timeline: Lineage of the newest snapshot.
        snapshots: Snapshots of any timeline.
    """
    return tuple(seen for seen in snapshots if belongs(seen.timeline, seen.snapshot.iteration, timeline))


def states(snapshots: Sequence[StoredSnapshot]) -> tuple[StoredState, ...]:
    """The states that snapshots of one timeline make, the newest first, whether they are whole or not."""
    leading: dict[tuple[str, range], StoredSnapshot] = {}
    members: dict[tuple[str, range], list[StoredSnapshot]] = {}
    for seen in snapshots:
        members.setdefault((seen.facts.job, seen.span), []).append(seen)
        if seen.leads:
            leading.setdefault((seen.facts.job, seen.span), seen)
    found = [StoredState(lead, tuple(members[key]), *_lacking(lead, members[key])) for key, lead in leading.items()]
    return tuple(sorted(found, key=lambda state: (-state.span[-1], -state.span[0])))


def restorable(
    usable: Sequence[StoredSnapshot], known: Sequence[StoredSnapshot] | None = None
) -> Iterator[RestorableState]:
    """The states that can be restored, the newest first, on the newest timeline that leads to one.

    Args:
        usable: the snapshots to restore from.
        known: all that ever were, as far as one knows, damaged ones among them: every part of an operator that a rank
            stored up to a state has to be among what restores it. By default `usable`.
    """
    for timeline in timelines(usable):
        here = _of_state(on_timeline(timeline, usable))
        ever = here if known is None else _of_state(on_timeline(timeline, known))
        pieces, any_here = pieces_of(here), False
        for state in states(here):
            if state.lacking:
                continue
            own = (piece for piece in pieces if piece.span == state.span)
            names = {piece_name(piece) for piece in (*own, *needed_pieces(pieces, state))}
            members = tuple(seen for seen in here if seen.name in names)
            wanted = [seen for seen in ever if seen.span[-1] <= state.span[-1]]
            if _holds(members, wanted, state.leading):
                any_here = True
                yield RestorableState(timeline, state, members)
        if any_here:
            return


def _holds(members: Sequence[StoredSnapshot], wanted: Sequence[StoredSnapshot], leading: StoredSnapshot) -> bool:
    """Whether members have all that ranks of its layout ever stored, and from any rank what those of others did and
    the experts whose copies it counts on."""
    layout = leading.layout
    there, own = (held_parts(seen for seen in some if seen.layout == layout) for some in (members, wanted))
    anywhere, others = (
        by_operator(held_parts(some)) for some in (members, [seen for seen in wanted if seen.layout != layout])
    )
    return (
        all(part in there.get(key, Part.NOTHING) for key, part in own.items())
        and all(part in anywhere.get(operator, Part.NOTHING) for operator, part in others.items())
        and not leading.unheld_experts(anywhere)
    )


def by_operator(held: Mapping[tuple[int, OperatorId], Part]) -> dict[OperatorId, Part]:
    """What there are copies of, on any rank."""
    found: dict[OperatorId, Part] = {}
    for (_, operator), part in held.items():
        found[operator] = found.get(operator, Part.NOTHING) | part
    return found


def pieces_of(snapshots: Iterable[StoredSnapshot]) -> list[Piece]:
    """What all ranks that own a part have of one timeline, as retention judges it, by iteration and kind."""
    ranks: dict[tuple[int, str], dict[int, StoredSnapshot]] = {}
    owned: _Owned = {}
    for seen in snapshots:
        ranks.setdefault(seen.name, {})[seen.snapshot.rank] = seen
        owned.setdefault((seen.layout, seen.snapshot.rank), set()).update(seen.owned)
    pieces = []
    for (iteration, kind), of_ranks in sorted(ranks.items()):
        first = next(iter(of_ranks.values()))
        if not _without_share(of_ranks, owned):
            pieces.append(Piece(kind, SnapshotPlan(iteration, _parts_of(of_ranks)), first.span))
    return pieces


def _parts_of(of_ranks: Mapping[int, StoredSnapshot]) -> dict[OperatorId, Part]:
    parts: dict[OperatorId, Part] = {}
    for of_rank in of_ranks.values():
        for operator, part in of_rank.parts.items():
            parts[operator] = parts.get(operator, Part.NOTHING) | part
    return parts


def _without_share(of_ranks: Mapping[int, StoredSnapshot], owned: _Owned) -> set[int]:
    """Ranks that lack their share of a piece: of those that own a part, where all its operators are known, else of all.

    All ranks have the piece with the trainer's state. owned: operators that are known to be each rank's.
    """
    first = next(iter(of_ranks.values()))
    plan = SnapshotPlan(first.snapshot.iteration, _parts_of(of_ranks))
    owners = set(range(first.world_size))
    if not first.leads and plan.digest() == first.facts.plan_digest:
        owners = {
            rank
            for (layout, rank), operators in owned.items()
            if layout == first.layout and not plan.parts.keys().isdisjoint(operators)
        }
    return owners - of_ranks.keys()


def needed_pieces(pieces: Sequence[Piece], state: StoredState, keep_last: int = 1) -> tuple[Piece, ...]:
    """The pieces of the newest states up to one of them, and the pieces that these need.

    Args:
        pieces: All pieces in storage.
        state: The newest state to keep.
        keep_last: Number of states to keep.
    """
    return kept_in_storage([piece for piece in pieces if piece.span[-1] <= state.span[-1]], keep_last)


def piece_name(piece: Piece) -> tuple[int, str]:
    """As `StoredSnapshot.name`."""
    return piece.plan.iteration, piece.kind


def held_parts(snapshots: Iterable[StoredSnapshot]) -> dict[tuple[int, OperatorId], Part]:
    """By rank and operator the parts of its state that there are copies of."""
    found: dict[tuple[int, OperatorId], Part] = {}
    for seen in snapshots:
        for operator, part in seen.parts.items():
            # Compute weights are the cast of master weights.
            given = part | Part.COMPUTE if Part.MASTER in part else part
            key = seen.snapshot.rank, operator
            found[key] = found.get(key, Part.NOTHING) | given
    return found


def _of_state(snapshots: Iterable[StoredSnapshot]) -> tuple[StoredSnapshot, ...]:
    """Without logs and what was parked."""
    return tuple(seen for seen in snapshots if seen.snapshot.kind not in STANDBY)


def lone_pieces(snapshots: Sequence[StoredSnapshot]) -> Iterator[tuple[StoredSnapshot, int]]:
    """Snapshots without the trainer's state that not all of their ranks have, each once, with the first rank that
    lacks it."""
    ranks: dict[tuple[str, int, str, str], dict[int, StoredSnapshot]] = {}
    owned: _Owned = {}
    for seen in snapshots:
        owned.setdefault((seen.layout, seen.snapshot.rank), set()).update(seen.owned)
        if not seen.leads:
            key = seen.facts.job, seen.snapshot.iteration, seen.snapshot.kind, seen.facts.plan_digest
            ranks.setdefault(key, {})[seen.snapshot.rank] = seen
    for there in ranks.values():
        first = next(iter(there.values()))
        lacking = _without_share(there, owned)
        if lacking:
            yield first, min(lacking)


def _lacking(leading: StoredSnapshot, members: Sequence[StoredSnapshot]) -> tuple[int, tuple[int, int] | None]:
    """How many snapshots are missing, and the first: their list would be as long as a manifest says."""
    kind, ranks = leading.snapshot.kind, range(leading.world_size)
    there = {(seen.snapshot.iteration, seen.snapshot.rank) for seen in members if seen.snapshot.kind == kind}
    wanted = ((iteration, rank) for iteration in leading.span for rank in ranks)
    first = next((missing for missing in wanted if missing not in there), None)
    return len(leading.span) * len(ranks) - sum(one in leading.span and rank in ranks for one, rank in there), first
