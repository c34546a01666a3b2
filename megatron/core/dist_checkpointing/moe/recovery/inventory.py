"""What every rank finds in its memory and in persistent storage, gathered, so that all ranks plan from the same facts.

1. Each rank lists its own stores: `listing` opens each manifest, none of the records, and gives a row for every
   snapshot, also for those that cannot be used, with the reason.
2. All ranks gather their rows; `catalogue` makes the same `Catalogue` of them everywhere.
3. It has copies of several attempts of the job, which may differ in the same iteration: `within` leaves those that led
   to one state. `inventory` is what the planner sees of these, without what proved damaged meanwhile, and without
   snapshots from which a replay diverged before.
4. For a plan, it says who serves it: `sources_for` operators, `trainer_sources` for the random states of a replayed
   iteration, `journal_sources` and `strategy_sources` for what all need and one rank reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from ..errors import UnreadableCheckpoint
from ..policy.lineage import Lineage, belongs, largest_number, newest_first, past
from ..ports import Facts, Json, SnapshotId, Store, Torn
from ..types import (
    GRADIENTS,
    LOG,
    PARKED,
    STANDBY,
    BoundaryLog,
    Copy,
    Direction,
    Inventory,
    OperatorId,
    OperatorKind,
    Part,
    SnapshotPlan,
    Tier,
    received_key,
)
from .exactness import Divergence, without_repetitions


class OperatorPart(NamedTuple):
    """An operator and the part of its state that a snapshot holds, as the scalar `operators` of manifests has it."""

    layer: int
    kind: int
    expert: int
    part: int


class InventoryRow(msgspec.Struct, frozen=True, array_like=True):
    """One stored snapshot, whether it can be used or not.

    Attributes:
        why: The reason why it cannot be used, empty if it can.
        torn: Whether it was never sealed.
        digest: Of the plan that all ranks followed.
        operators: The operators of its owner of which it holds a part.
        timeline: The attempts that led to it.
        job: The job that made it.
        window: First and last iteration of those whose snapshots restore a state together with this one.
        has_journal: Whether it has what a replay of its iteration needs of its owner besides operators: the global
            outcome of the step, and the trainer state.
        has_strategy: Whether it has the state of the strategy.
        has_fingerprints: Of a boundary log: whether it says what its owner received.
    """

    snapshot: SnapshotId
    tier: Tier
    why: str = ""
    torn: bool = False
    digest: str = ""
    operators: tuple[OperatorPart, ...] = ()
    timeline: Lineage = ()
    job: str = ""
    window: tuple[int, int] | None = None
    has_journal: bool = False
    has_strategy: bool = False
    has_fingerprints: bool = False


class RankInventory(msgspec.Struct):
    """All that one rank tells the others: the name of its node, which operators it owns, what it found, replays that
    diverged before, and the largest number of an attempt of which it found anything."""

    node: str
    operators: tuple[tuple[int, int, int], ...]
    rows: tuple[InventoryRow, ...]
    diverged: tuple[Divergence, ...] = ()
    attempt: int = 0


class _Scalars(msgspec.Struct):
    """What a recovery needs of the scalars of a manifest; others may stand beside it."""

    operators: tuple[OperatorPart, ...]
    timeline: Lineage
    window: tuple[int, int] | None = None
    journal: Any = None
    trainer: Any = msgspec.UNSET
    strategy: Any = None


def listing(
    store: Store,
    tier: Tier,
    accepts: Mapping[str, Json],
    strategy: str = "",
    *,
    job: str = "",
    owner: int | None = None,
) -> list[InventoryRow]:
    """The rows of one store.

    Args:
        store: Is listed.
        tier: Of the store.
        accepts: The parallel layout that snapshots must have been made in.
        strategy: The strategy that must have made them.
        job: The job that must have made them; empty for any.
        owner: The rank whose snapshots to list; None: all.

    Raises:
        StoreFailure: The store cannot be listed.
    """
    listed = store.snapshots(owner)
    rows = [InventoryRow(torn.snapshot, tier, torn.why, torn=_interrupted(torn)) for torn in listed.torn]
    for snapshot in listed.sealed:
        try:
            with store.open(snapshot) as reader:
                facts, places = reader.manifest.facts, reader.manifest.layout.places
        except UnreadableCheckpoint as error:
            rows.append(InventoryRow(snapshot, tier, str(error)))
        else:
            row = _row(snapshot, tier, facts, _mismatch(facts, accepts, job, strategy))
            has_fingerprints = snapshot.kind == LOG and any(received_key(way) in places for way in Direction)
            rows.append(msgspec.structs.replace(row, has_fingerprints=has_fingerprints))
    return rows


def rank_inventory(
    node: str,
    operators: Iterable[OperatorId],
    rows: Iterable[InventoryRow],
    diverged: Iterable[Divergence] = (),
    older: Iterable[Lineage] = (),
) -> Json:
    """A `RankInventory` as JSON values.

    Args:
        node: On which the rank runs.
        operators: Of which it owns a part.
        rows: What it found.
        diverged: Replays that diverged before, as it has noted them.
        older: Timelines of which the rows do not tell.
    """
    rows = tuple(rows)
    attempt = largest_number((*(row.timeline for row in rows), *older))
    ids = tuple((operator.layer, operator.kind.value, operator.expert) for operator in sorted(operators))
    values: Json = msgspec.to_builtins(RankInventory(node, ids, rows, tuple(diverged), attempt))
    return values


def _mismatch(facts: Facts, accepts: Mapping[str, Json], job: str, strategy: str) -> str:
    """Why this job cannot go on from such a snapshot; empty if it can."""
    if dict(facts.topology) != dict(accepts):
        return f"it was made in the parallel layout {dict(facts.topology)}, this job has {dict(accepts)}"
    if job and facts.job != job:
        return f"it belongs to job {facts.job}"
    made_by = facts.scalars.get("made_by", strategy)
    return "" if made_by == strategy else f"it was made with --moe-ckpt-strategy {made_by}, this job has {strategy}"


def _row(snapshot: SnapshotId, tier: Tier, facts: Facts, why: str) -> InventoryRow:
    try:
        scalars = msgspec.convert(facts.scalars, _Scalars)
    except msgspec.ValidationError as error:
        return InventoryRow(snapshot, tier, why or f"its manifest does not fit: {error}; something else made it")
    return InventoryRow(
        snapshot,
        tier,
        why,
        digest=facts.plan_digest,
        operators=scalars.operators,
        timeline=scalars.timeline,
        job=facts.job,
        window=scalars.window,
        has_journal=scalars.journal is not None and scalars.trainer is not msgspec.UNSET,
        has_strategy=scalars.strategy is not None,
    )


def _interrupted(torn: Torn) -> bool:
    """Whether it was left while it was written; else it was sealed once, and is damaged or of another version."""
    return torn.path.rpartition("/")[2].startswith(".writing.") or torn.path.endswith(".writing")


CopyLocation = tuple[int, SnapshotId, Tier]
"""Who found a snapshot (a rank), which one, and in which tier: OWN_MEMORY of the finder, or PERSISTENT."""


class SnapshotEntry(InventoryRow, frozen=True, kw_only=True):
    """One stored snapshot as `finder` sees it.

    Attributes:
        finder: The rank.
        plan: The parts that it holds of its owner's operators.
        is_intact: Whether nothing but a replay that diverged, and began with it, speaks against it; `why` says so then.
        is_strange: Whether nothing but its job does.
    """

    finder: int
    plan: SnapshotPlan
    is_intact: bool = False
    is_strange: bool = False

    @property
    def place(self) -> CopyLocation:
        """What tells it apart from all others."""
        return self.finder, self.snapshot, self.tier

    @property
    def is_state(self) -> bool:
        """Whether it has state of its owner after its iteration, and not what passed by in it."""
        return self.snapshot.kind not in (LOG, GRADIENTS)

    @property
    def span(self) -> range:
        """The iterations whose snapshots restore a state together with this one."""
        first, last = self.window or (self.snapshot.iteration, self.snapshot.iteration)
        return range(first, last + 1)


@dataclass(frozen=True)
class Catalogue:
    """All that was found by all ranks; `nodes[rank]` is the node of each rank, `required[rank]` its operators.

    diverged: replays that came out otherwise in earlier attempts; snapshots that they began with are not used again.
    attempt: the largest number of an attempt of which anybody found anything, of use or not.
    """

    found: tuple[SnapshotEntry, ...] = field(repr=False)
    required: Mapping[int, frozenset[OperatorId]] = field(repr=False)
    nodes: tuple[int, ...]
    diverged: tuple[Divergence, ...] = field(default=(), repr=False)
    attempt: int = 0

    @property
    def newest_iteration(self) -> int:
        """The newest iteration of which anything was found, torn or not; -1 if nothing was."""
        return max((found.snapshot.iteration for found in self.found), default=-1)

    @property
    def timelines(self) -> list[Lineage]:
        """The timelines of all intact finds, the newest first."""
        return newest_first((found.timeline, found.snapshot.iteration) for found in self.found if not found.why)

    def within(self, timeline: Lineage) -> Catalogue:
        """Only what lies in the past of `timeline`; what is torn or cannot be used stays, with its reason."""
        return self._where(lambda found: bool(found.why) or is_past(found.timeline, found.snapshot.iteration, timeline))

    def without_strangers(self, job: str, takes_over: Callable[[str], bool]) -> Catalogue:
        """The same, where what other jobs stored is of no use, unless this one has come from there or asks for it.

        Args:
            job: Id of this job.
            takes_over: Whether it asks for a job of this id.
        """
        own = {found.timeline for found in self.found if not found.why and found.job == job}

        def judged(found: SnapshotEntry) -> SnapshotEntry:
            if found.why or found.job == job or takes_over(found.job):
                return found
            if any(is_past(found.timeline, found.snapshot.iteration, timeline) for timeline in own):
                return found
            why = f"it belongs to job {found.job}"
            return msgspec.structs.replace(found, why=why, is_intact=False, is_strange=True)

        return replace(self, found=tuple(map(judged, self.found)))

    @property
    def newest_stranger(self) -> SnapshotEntry | None:
        """The newest state that another job stored, and that is not used for that reason alone."""
        strange = (found for found in self.found if found.is_strange and found.is_state)
        return max(strange, key=lambda found: found.snapshot.iteration, default=None)

    def without(self, damaged: Collection[CopyLocation]) -> Catalogue:
        """The same without what proved unreadable."""
        return self._where(lambda found: found.place not in damaged)

    def diverged_alone(self, target: int, timeline: Lineage) -> Divergence | None:
        """A replay of single stages that was to lead to a certain state, and diverged; None where there is none.

        Args:
            target: The iteration of the state.
            timeline: That led to it.
        """
        return next((one for one in self.diverged if one.alone and one.is_of(target, timeline)), None)

    def without_standby(self) -> Catalogue:
        """Only what is there under any strategy: with it all stages roll back together."""
        return self._where(lambda found: found.snapshot.kind not in STANDBY)

    def inventory(self, damaged: Collection[CopyLocation] = ()) -> Inventory:
        """What the planner sees; `damaged` are copies that proved unreadable."""
        seen = [found for found in self.found if found.snapshot.rank in self.required]
        usable = [found for found in seen if not found.why and found.place not in damaged]
        rolling = _rolling(usable)
        copies: dict[int, list[Copy]] = {}
        for found in seen:
            rank, iteration = found.snapshot.rank, found.snapshot.iteration
            # Gradients belong to the newest parked state: from an older one nothing rolls forward.
            stale = found.snapshot.kind == PARKED and iteration < rolling.get(rank, 0)
            if found.is_state and not stale:
                corrupt = frozenset(found.plan.parts) if found.place in damaged else frozenset()
                copy = Copy(rank, found.plan, self._tier(found), self._holder(found), not found.why, corrupt)
                copies.setdefault(rank, []).append(copy)
        return Inventory(
            self.required,
            {rank: tuple(held) for rank, held in copies.items()},
            self._logs(usable),
            self._journal(usable),
            frozenset(rolling),
        )

    def sources_for(self, copy: Copy, operators: Collection[OperatorId]) -> list[SnapshotEntry]:
        """The intact finds behind a planned copy, one for each kind.

        Args:
            copy: As it was planned.
            operators: Of which a find has to have any.
        """
        chosen: dict[str, SnapshotEntry] = {}
        for found in self._intact(copy.plan.iteration):
            same = (found.snapshot.rank, self._tier(found), self._holder(found)) == (copy.rank, copy.tier, copy.holder)
            if same and any(operator in found.plan.parts for operator in operators):
                best = chosen.setdefault(found.snapshot.kind, found)
                # The owner's own slot before another process of its node.
                if found.finder == copy.rank and best.finder != copy.rank:
                    chosen[found.snapshot.kind] = found
        return [chosen[kind] for kind in sorted(chosen)]

    def trainer_sources(self, rank: int, iteration: int) -> list[SnapshotEntry]:
        """Snapshots that have what a replay of an iteration needs of a rank besides operators, the nearest first.

        Args:
            rank: Whose snapshots they are, and which replays.
            iteration: Which is replayed.
        """
        own = (found for found in self._intact(iteration) if found.snapshot.rank == rank)
        usable = (found for found in own if found.has_journal and found.is_state)
        return sorted(usable, key=lambda found: (self._tier(found), found.finder != rank, found.place))

    def journal_sources(self, iteration: int, first: Collection[int] = ()) -> list[SnapshotEntry]:
        """Snapshots that say how an iteration came out.

        Args:
            iteration: The iteration.
            first: Ranks whose snapshots say more of it than others, and come first.
        """
        usable = (found for found in self._intact(iteration) if found.has_journal)
        return sorted(usable, key=lambda found: (found.snapshot.rank not in first, found.snapshot.rank, found.place))

    def strategy_sources(self, iteration: int) -> list[SnapshotEntry]:
        """Snapshots that have the state of the strategy after an iteration, that of the lowest rank first."""
        usable = (found for found in self._intact(iteration) if found.has_strategy)
        return sorted(usable, key=lambda found: (found.snapshot.rank, found.place))

    def of_kind(self, kind: str, owner: int, iteration: int, reader: int) -> list[SnapshotEntry]:
        """The intact finds of one snapshot.

        Args:
            kind: Of the snapshot.
            owner: The rank that made it.
            iteration: Of the snapshot.
            reader: The rank that reads it; finds that it reaches best come first.
        """
        snapshot, node = SnapshotId(iteration, owner, kind), self.nodes[reader]
        usable = (found for found in self._intact(iteration) if found.snapshot == snapshot)
        return sorted(usable, key=lambda found: (found.finder != reader, self.nodes[found.finder] != node, found.place))

    def logged(self, rank: int) -> frozenset[int]:
        """The iterations whose log a rank holds itself."""
        logs = (found for found in self.found if found.snapshot.kind == LOG and not found.why)
        return frozenset(log.snapshot.iteration for log in logs if log.snapshot.rank == log.finder == rank)

    def _intact(self, iteration: int) -> Iterator[SnapshotEntry]:
        return (found for found in self.found if found.snapshot.iteration == iteration and not found.why)

    def _where(self, condition: Callable[[SnapshotEntry], bool]) -> Catalogue:
        return replace(self, found=tuple(filter(condition, self.found)))

    def _journal(self, usable: Iterable[SnapshotEntry]) -> frozenset[int]:
        """Iterations of which every rank has a snapshot with a journal, or of which anybody kept one for all.

        A log has how the step came out, and trainer state that is the same on all ranks; random states come out of
        the replay itself.
        """
        ranks: dict[int, set[int]] = {}
        for found in usable:
            if found.has_journal:
                known = self.required if found.snapshot.kind in (LOG, PARKED) else (found.snapshot.rank,)
                ranks.setdefault(found.snapshot.iteration, set()).update(known)
        return frozenset(iteration for iteration, known in ranks.items() if known >= self.required.keys())

    def _logs(self, usable: Iterable[SnapshotEntry]) -> dict[int, tuple[BoundaryLog, ...]]:
        """By sender what was logged without a gap, each run once for each direction."""
        at: dict[tuple[int, int], set[int]] = {}
        for found in usable:
            if found.snapshot.kind == LOG:
                at.setdefault((found.snapshot.rank, self.nodes[found.finder]), set()).add(found.snapshot.iteration)
        logs: dict[int, list[BoundaryLog]] = {}
        for (sender, holder), iterations in sorted(at.items()):
            for run in _runs(iterations):
                logs.setdefault(sender, []).extend(BoundaryLog(sender, way, run, holder) for way in Direction)
        return {sender: tuple(runs) for sender, runs in logs.items()}

    def _tier(self, found: SnapshotEntry) -> Tier:
        if found.tier is Tier.PERSISTENT:
            return found.tier
        if found.snapshot.kind == PARKED:
            return Tier.PARKED
        same_node = self.nodes[found.finder] == self.nodes[found.snapshot.rank]
        return Tier.OWN_MEMORY if same_node else Tier.PEER_MEMORY

    def _holder(self, found: SnapshotEntry) -> int | None:
        return None if found.tier is Tier.PERSISTENT else self.nodes[found.finder]


def is_past(snapshot: Lineage, iteration: int, timeline: Lineage) -> bool:
    """Whether a snapshot lies in the past of a timeline.

    Also one that was made by an attempt that only went on from that iteration: it was trained by the one before.

    Args:
        snapshot: The timeline of the snapshot.
        iteration: Of the snapshot.
        timeline: In whose past it may lie.
    """
    return belongs(past(snapshot, iteration), iteration, timeline)


def catalogue(gathered: Sequence[Json]) -> Catalogue:
    """From the `rank_inventory` of all ranks. Equal sets of operators, and equal plans, become one object each: the
    planner takes time for each different one."""
    ranks = msgspec.convert(gathered, list[RankInventory])
    nodes = sorted({inventory.node for inventory in ranks})
    diverged = without_repetitions(note for inventory in ranks for note in inventory.diverged)
    plans: dict[tuple[int, tuple[OperatorPart, ...]], SnapshotPlan] = {}
    sets: dict[tuple[tuple[int, int, int], ...], frozenset[OperatorId]] = {}
    required, found = {}, []
    for rank, inventory in enumerate(ranks):
        required[rank] = sets.setdefault(inventory.operators, frozenset(map(_operator, inventory.operators)))
        for row in inventory.rows:
            key = row.snapshot.iteration, row.operators
            if key not in plans:
                parts: dict[OperatorId, Part] = {_operator(held[:3]): Part(held.part) for held in row.operators}
                plans[key] = SnapshotPlan(row.snapshot.iteration, parts)
            why = row.why or _diverged(row, diverged)
            values = msgspec.structs.asdict(row) | {"why": why, "is_intact": not row.why}
            found.append(SnapshotEntry(**values, finder=rank, plan=plans[key]))
    where = tuple(nodes.index(inventory.node) for inventory in ranks)
    # Of what a replay was made from nothing may be left, or training has come past it: then it need not be told again.
    states = [one for one in found if one.is_intact and one.is_state]
    relevant = (note for note in diverged if any(note.used(one.snapshot.iteration, one.timeline) for one in states))
    return Catalogue(tuple(found), required, where, tuple(relevant), max(inventory.attempt for inventory in ranks))


def _diverged(row: InventoryRow, notes: Iterable[Divergence]) -> str:
    """Why a snapshot is not used where a replay of all stages that was made from it came out otherwise."""
    if row.snapshot.kind in STANDBY:
        return ""
    joint = (note for note in notes if not note.alone and note.used(row.snapshot.iteration, row.timeline))
    return next((str(note) for note in joint), "")


def _operator(fields: tuple[int, int, int]) -> OperatorId:
    layer, kind, expert = fields
    return OperatorId(layer, OperatorKind(kind), expert)


def _rolling(usable: Iterable[SnapshotEntry]) -> dict[int, int]:
    """By rank the newest iteration at which it parked, where it has the reduced gradients of the next one."""
    parked: dict[int, int] = {}
    reduced: dict[int, set[int]] = {}
    for found in usable:
        rank, iteration = found.snapshot.rank, found.snapshot.iteration
        if found.snapshot.kind == PARKED:
            parked[rank] = max(iteration, parked.get(rank, iteration))
        elif found.snapshot.kind == GRADIENTS:
            reduced.setdefault(rank, set()).add(iteration)
    return {rank: iteration for rank, iteration in parked.items() if iteration + 1 in reduced.get(rank, ())}


def _runs(iterations: Iterable[int]) -> Iterator[range]:
    """Iterations that follow each other, together."""
    run = range(0)
    for iteration in sorted(iterations):
        if run and iteration != run.stop:
            yield run
            run = range(0)
        run = range(run.start if run else iteration, iteration + 1)
    if run:
        yield run
