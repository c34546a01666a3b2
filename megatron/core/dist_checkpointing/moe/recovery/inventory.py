"""What every rank finds in its memory and in persistent storage, and what of it each rank has to know.

1. Each rank lists its own stores: `listing` opens each manifest, none of the records, and gives a row for every
   snapshot, also for those that cannot be used, with the reason.
2. All ranks together learn what they need to judge these rows (`findings.Overview`). Then each row goes to the rank
   whose state it is of, and of a boundary log also to the ranks that it may feed: one rank got a `Catalogue`.
3. It has copies of several attempts of the job, which may differ in the same iteration: `within` leaves those that led
   to one state. `inventory` is what the planner sees of these, without what proved damaged meanwhile, and without
   snapshots from which a replay diverged before.
4. For a plan, it says who serves it: `sources_for` operators, `trainer_sources` for the random states of a replayed
   iteration, `of_kind` for logs and gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import NotAccepted, StoreFailure, UnreadableCheckpoint, may_pass
from ..policy.lineage import Lineage, belongs, past
from ..ports import Facts, Json, Manifest, ReadableStore, SnapshotId, Torn
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
from ..types.layout import is_same_layout

# Bounded: ranks tell each other of rows, in numbers of 64 bits, and make operators and parts of them.
_Index = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 32)]
_Iteration = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
_Kind = Annotated[int, msgspec.Meta(ge=0, le=max(OperatorKind).value)]
_Parts = Annotated[int, msgspec.Meta(ge=0, le=(~Part.NOTHING).value)]


PAUSES_S = 0.5, 2.0
"""Before storage that did not answer is asked once more."""


class OperatorPart(NamedTuple):
    """An operator and the part of its state that a snapshot holds, as the scalar `operators` of manifests has it."""

    layer: _Index
    kind: _Kind
    expert: _Index
    part: _Parts


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
        is_foreign: Whether it lies in memory and only a setting, or the version that wrote it, speaks against it.
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
    is_foreign: bool = False


class _Scalars(msgspec.Struct):
    """What a recovery needs of the scalars of a manifest; others may stand beside it."""

    operators: tuple[OperatorPart, ...]
    timeline: tuple[tuple[str, _Iteration], ...]
    window: tuple[_Iteration, _Iteration] | None = None
    journal: Any = None
    trainer: Any = msgspec.UNSET
    strategy: Any = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window[0] > self.window[1]:
            raise ValueError(f"its window is from {self.window[0]} to {self.window[1]}")


def listing(
    store: ReadableStore,
    tier: Tier,
    accepts: Mapping[str, Json],
    strategy: str = "",
    *,
    job: str = "",
    owner: int | None = None,
    is_older: Callable[[SnapshotId], bool] = lambda snapshot: False,
    wait: Callable[[float], object] = time.sleep,
) -> list[InventoryRow]:
    """The rows of one store. Where it does not answer it is asked again, twice: what lies there is not damaged.

    Args:
        store: Is listed.
        tier: Of the store.
        accepts: The parallel layout that snapshots must have been made in.
        strategy: The strategy that must have made them.
        job: The job that must have made them; empty for any.
        owner: The rank whose snapshots to list; None: all.
        is_older: Whether a snapshot in storage stands for one in memory, which is freed where this job cannot use it.
        wait: Waits for seconds.

    Raises:
        StoreFailure: The store cannot be listed, or none of its snapshots can be read now.
    """
    in_memory = tier is not Tier.PERSISTENT
    for pause_s in (*PAUSES_S, None):
        listed = store.snapshots(owner)
        opened = {snapshot: _opened(store, snapshot) for snapshot in listed.sealed}
        refused = [found for found in opened.values() if isinstance(found, UnreadableCheckpoint)]
        away = [one.why for one in listed.torn if one.may_pass] + [str(one) for one in refused if may_pass(one)]
        if not away or pause_s is None:
            break
        wait(pause_s)
    if away and len(refused) == len(opened):
        raise StoreFailure(f"no snapshot can be read now, {len(away)} of them perhaps later: {away[0]}")
    rows = [
        InventoryRow(one.snapshot, tier, one.why, _interrupted(one), is_foreign=one.is_newer and in_memory)
        for one in listed.torn
    ]
    for snapshot, found in opened.items():
        if isinstance(found, UnreadableCheckpoint):
            is_foreign = isinstance(found, NotAccepted) and is_older(snapshot)
            rows.append(InventoryRow(snapshot, tier, str(found), is_foreign=is_foreign))
        else:
            facts, places = found
            row = _row(snapshot, tier, facts, why := _mismatch(facts, accepts, job, strategy))
            is_foreign = bool(why) and not _mismatch(facts, accepts, job, str(facts.scalars.get("made_by")))
            is_foreign = is_foreign and (in_memory or is_older(snapshot))
            has_fingerprints = snapshot.kind == LOG and any(received_key(way) in places for way in Direction)
            rows.append(msgspec.structs.replace(row, has_fingerprints=has_fingerprints, is_foreign=is_foreign))
    return rows


def _opened(store: ReadableStore, snapshot: SnapshotId) -> tuple[Facts, Collection[str]] | UnreadableCheckpoint:
    """What the manifest says and the keys of the records, or why it cannot be opened. Raises StoreFailure."""
    try:
        with store.open(snapshot) as reader:
            return reader.manifest.facts, reader.manifest.layout.places.keys()
    except UnreadableCheckpoint as error:
        return error


def _mismatch(facts: Facts, accepts: Mapping[str, Json], job: str, strategy: str) -> str:
    """Why this job cannot continue from such a snapshot; empty if it can."""
    if not is_same_layout(facts.topology, accepts):
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


class JudgedRow(InventoryRow, frozen=True, kw_only=True):
    """A row of which is known whether it is used.

    Attributes:
        is_intact: Whether nothing but a replay that diverged, and began with it, speaks against it; `why` says so then.
        is_strange: Whether nothing but its job does.
    """

    is_intact: bool = False
    is_strange: bool = False

    @property
    def is_state(self) -> bool:
        """Whether it has state of its owner after its iteration, and not what passed by in it."""
        return self.snapshot.kind not in (LOG, GRADIENTS)

    @property
    def span(self) -> range:
        """The iterations whose snapshots restore a state together with this one."""
        first, last = self.window or (self.snapshot.iteration, self.snapshot.iteration)
        return range(first, last + 1)

    def may_be_of(self, timeline: Lineage) -> bool:
        """Whether it lies in the past of a timeline, or cannot be used in any."""
        return bool(self.why) or is_past(self.timeline, self.snapshot.iteration, timeline)


class SnapshotEntry(JudgedRow, frozen=True, kw_only=True):
    """One stored snapshot as `finder` sees it.

    Attributes:
        finder: The rank.
        plan: The parts that it holds of its owner's operators.
    """

    finder: int
    plan: SnapshotPlan

    @property
    def place(self) -> CopyLocation:
        """What tells it apart from all others."""
        return self.finder, self.snapshot, self.tier


@dataclass(frozen=True)
class Catalogue:
    """What was found of the state of some ranks, in the order of its finders, and logs that may feed them.

    `required[rank]` are the operators of each of these ranks, `nodes[rank]` is the node of any rank.
    """

    found: tuple[SnapshotEntry, ...] = field(repr=False)
    required: Mapping[int, frozenset[OperatorId]] = field(repr=False)
    nodes: tuple[int, ...]

    def within(self, timeline: Lineage) -> Catalogue:
        """Only what lies in the past of `timeline`; what is torn or cannot be used stays, with its reason."""
        return self._where(lambda found: found.may_be_of(timeline))

    def without(self, damaged: Collection[CopyLocation]) -> Catalogue:
        """The same without what proved unreadable."""
        return self._where(lambda found: found.place not in damaged)

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
            can_roll_forward=frozenset(rolling),
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

    Also one that was made by an attempt that only continued from that iteration: it was trained by the one before.

    Args:
        snapshot: The timeline of the snapshot.
        iteration: Of the snapshot.
        timeline: In whose past it may lie.
    """
    return belongs(past(snapshot, iteration), iteration, timeline)


def timeline_of(manifest: Manifest) -> Lineage:
    """The attempts that led to a snapshot, as its manifest says. Raises UnreadableCheckpoint."""
    try:
        timeline: Lineage = msgspec.convert(manifest.facts.scalars.get("timeline"), Lineage)
    except msgspec.ValidationError as error:
        raise UnreadableCheckpoint(f"the {manifest.snapshot} does not say which attempts led to it: {error}") from error
    return timeline


class _Sent(msgspec.Struct, array_like=True):
    """A `JudgedRow` for another rank, its timeline as a number; without what only its finder needs."""

    iteration: int
    rank: int
    kind: str
    tier: Tier
    why: str
    torn: bool
    operators: tuple[OperatorPart, ...]
    led: int
    window: tuple[int, int] | None
    has_journal: bool
    has_strategy: bool
    has_fingerprints: bool
    is_intact: bool
    is_strange: bool


class SentRows(msgspec.Struct, array_like=True):
    """Rows for another rank, and the timelines that led to them."""

    timelines: list[Lineage]
    rows: list[_Sent]

    @classmethod
    def of(cls, rows: Iterable[JudgedRow]) -> SentRows:
        """From the rows."""
        numbers: dict[Lineage, int] = {}
        sent = [
            _Sent(
                row.snapshot.iteration, row.snapshot.rank, row.snapshot.kind, row.tier, row.why, row.torn,
                row.operators, numbers.setdefault(row.timeline, len(numbers)), row.window, row.has_journal,
                row.has_strategy, row.has_fingerprints, row.is_intact, row.is_strange,
            )
            for row in rows
        ]  # fmt: skip
        return cls(list(numbers), sent)

    @property
    def judged(self) -> Iterator[JudgedRow]:
        """The rows as the finder has them."""
        for row in self.rows:
            yield JudgedRow(
                SnapshotId(row.iteration, row.rank, row.kind), row.tier, row.why, row.torn, "", row.operators,
                self.timelines[row.led], "", row.window, row.has_journal, row.has_strategy, row.has_fingerprints,
                is_intact=row.is_intact, is_strange=row.is_strange,
            )  # fmt: skip


def catalogue(
    came: Iterable[tuple[int, SentRows]], required: Mapping[int, frozenset[OperatorId]], nodes: tuple[int, ...]
) -> Catalogue:
    """From the rows that came from each finder. Equal plans become one object: equal copies are looked at once.

    Args:
        came: Finders, ascending, and what they sent.
        required: The operators of the ranks whose state it is about.
        nodes: Of all ranks.
    """
    plans: dict[tuple[int, tuple[OperatorPart, ...]], SnapshotPlan] = {}
    found = []
    for finder, sent in came:
        for row in sent.judged:
            key = row.snapshot.iteration, row.operators
            if key not in plans:
                parts: dict[OperatorId, Part] = {operator_of(held[:3]): Part(held.part) for held in row.operators}
                plans[key] = SnapshotPlan(row.snapshot.iteration, parts)
            found.append(SnapshotEntry(**msgspec.structs.asdict(row), finder=finder, plan=plans[key]))
    return Catalogue(tuple(found), required, nodes)


def operator_of(fields: tuple[int, int, int]) -> OperatorId:
    """The operator of these numbers."""
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
