"""What every rank finds in its memory and in persistent storage, told to all, so that all plan from the same facts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..errors import UnreadableCheckpoint
from ..policy.timelines import Timeline, belongs, newest_first, past
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
)

Place = tuple[int, SnapshotId, Tier]
"""Who found a snapshot (a rank), which one, and in which tier: OWN_MEMORY of the finder, or PERSISTENT."""


@dataclass(frozen=True)
class Found:
    """One stored snapshot, as `finder` sees it: the parts that it holds of its owner's operators.

    digest: of the plan that all ranks followed. timeline: the attempts that led to it. why: the reason why it cannot be
    used, empty if it can. job: that made it. torn: it was never sealed. span: the iterations whose snapshots restore a
    state together with this one. journal: it has what a replay of its iteration needs of this rank besides operators:
    the global outcome of the step, and the trainer state. remembers: it has what the strategy remembered.
    """

    finder: int
    snapshot: SnapshotId
    tier: Tier
    plan: SnapshotPlan
    digest: str = ""
    timeline: Timeline = ()
    why: str = ""
    job: str = ""
    torn: bool = False
    span: range = range(0)
    journal: bool = False
    remembers: bool = False

    @property
    def place(self) -> Place:
        """What tells it apart from all others."""
        return self.finder, self.snapshot, self.tier

    @property
    def is_state(self) -> bool:
        """Whether it has state of its owner after its iteration, and not what passed by in it."""
        return self.snapshot.kind not in (LOG, GRADIENTS)


@dataclass(frozen=True)
class Catalogue:
    """All that was found by all ranks; `nodes[rank]` is the node of each rank, `required[rank]` its operators."""

    found: tuple[Found, ...] = field(repr=False)
    required: Mapping[int, frozenset[OperatorId]] = field(repr=False)
    nodes: tuple[int, ...]

    @property
    def newest_iteration(self) -> int:
        """The newest iteration of which anything was found, torn or not; -1 if nothing was."""
        return max((one.snapshot.iteration for one in self.found), default=-1)

    @property
    def timelines(self) -> list[Timeline]:
        """The timelines of all intact finds, the newest first."""
        return newest_first(one.timeline for one in self.found if not one.why)

    def of(self, timeline: Timeline) -> Catalogue:
        """Only what lies in the past of `timeline`; what is torn or cannot be used stays, with its reason."""

        def stays(one: Found) -> bool:
            return bool(one.why) or is_past(one.timeline, one.snapshot.iteration, timeline)

        return replace(self, found=tuple(filter(stays, self.found)))

    def inventory(self, damaged: Collection[Place] = ()) -> Inventory:
        """What the planner sees; `damaged` are copies that proved unreadable."""
        seen = [one for one in self.found if one.snapshot.rank in self.required]
        usable = [one for one in seen if not one.why and one.place not in damaged]
        rolling = _rolling(usable)
        copies: dict[int, list[Copy]] = {}
        for one in seen:
            rank, iteration = one.snapshot.rank, one.snapshot.iteration
            # Gradients belong to the newest parked state: from an older one nothing rolls forward.
            stale = one.snapshot.kind == PARKED and iteration < rolling.get(rank, 0)
            if one.is_state and not stale:
                corrupt = frozenset(one.plan.parts) if one.place in damaged else frozenset()
                copies.setdefault(rank, []).append(
                    Copy(rank, one.plan, self._tier(one), self._holder(one), not one.why, corrupt)
                )
        return Inventory(
            self.required,
            {rank: tuple(held) for rank, held in copies.items()},
            self._logs(usable),
            self._journal(usable),
            frozenset(rolling),
        )

    def witnesses(self, rank: int, iteration: int) -> list[Found]:
        """Snapshots that have what a replay of `iteration` needs of `rank` besides operators, the nearest first."""
        of = (one for one in self.found if (one.snapshot.rank, one.snapshot.iteration) == (rank, iteration))
        usable = (one for one in of if one.journal and one.is_state and not one.why)
        return sorted(usable, key=lambda one: (self._tier(one), one.finder != rank, one.place))

    def of_kind(self, kind: str, owner: int, iteration: int, reader: int) -> list[Found]:
        """The intact finds of one snapshot, those first that `reader` reaches best."""
        snapshot = SnapshotId(iteration, owner, kind)
        found = (one for one in self.found if one.snapshot == snapshot and not one.why)
        node = self.nodes[reader]
        return sorted(found, key=lambda one: (one.finder != reader, self.nodes[one.finder] != node, one.place))

    def logged(self, rank: int) -> frozenset[int]:
        """The iterations whose log a rank holds itself."""
        own = (one for one in self.found if one.snapshot.kind == LOG and one.snapshot.rank == one.finder == rank)
        return frozenset(one.snapshot.iteration for one in own if not one.why)

    def tellers(self, iteration: int, first: Collection[int] = ()) -> list[Found]:
        """Who can tell everybody how an iteration came out; the ranks in `first` know more of it than others."""
        usable = (one for one in self.found if one.snapshot.iteration == iteration and one.journal and not one.why)
        return sorted(usable, key=lambda one: (one.snapshot.rank not in first, one.snapshot.rank, one.place))

    def memories(self, iteration: int) -> list[Found]:
        """Who has what the strategy remembered after an iteration, the lowest rank first."""
        usable = (one for one in self.found if one.snapshot.iteration == iteration and one.remembers and not one.why)
        return sorted(usable, key=lambda one: (one.snapshot.rank, one.place))

    def givers(self, copy: Copy, operators: Collection[OperatorId]) -> list[Found]:
        """The intact finds behind a planned copy that have any of these operators, one for each kind."""
        chosen: dict[str, Found] = {}
        for one in self.found:
            same = (one.snapshot.rank, one.snapshot.iteration) == (copy.rank, copy.plan.iteration) and not one.why
            here = (self._tier(one), self._holder(one)) == (copy.tier, copy.holder)
            if same and here and any(operator in one.plan.parts for operator in operators):
                best = chosen.setdefault(one.snapshot.kind, one)
                # The owner's own slot before another process of its node.
                if one.finder == copy.rank and best.finder != copy.rank:
                    chosen[one.snapshot.kind] = one
        return [chosen[kind] for kind in sorted(chosen)]

    def without(self, damaged: Collection[Place]) -> Catalogue:
        """The same without what proved unreadable."""
        return replace(self, found=tuple(one for one in self.found if one.place not in damaged))

    def without_standby(self) -> Catalogue:
        """Only what is there under any strategy: with it all stages roll back together."""
        return replace(self, found=tuple(one for one in self.found if one.snapshot.kind not in STANDBY))

    def _journal(self, usable: Iterable[Found]) -> frozenset[int]:
        """Iterations of which every rank has a snapshot with a journal, or of which anybody kept one for all.

        A log tells how the step came out, and trainer state that is the same on all ranks; random states come out of
        the replay itself.
        """
        ranks: dict[int, set[int]] = {}
        for one in usable:
            if one.journal:
                told = self.required if one.snapshot.kind in (LOG, PARKED) else (one.snapshot.rank,)
                ranks.setdefault(one.snapshot.iteration, set()).update(told)
        return frozenset(iteration for iteration, known in ranks.items() if known >= self.required.keys())

    def _logs(self, usable: Iterable[Found]) -> dict[int, tuple[BoundaryLog, ...]]:
        """By sender what was logged without a gap, each run once for each direction."""
        at: dict[tuple[int, int], set[int]] = {}
        for one in usable:
            if one.snapshot.kind == LOG:
                at.setdefault((one.snapshot.rank, self.nodes[one.finder]), set()).add(one.snapshot.iteration)
        logs: dict[int, list[BoundaryLog]] = {}
        for (sender, holder), iterations in sorted(at.items()):
            for run in _runs(iterations):
                logs.setdefault(sender, []).extend(BoundaryLog(sender, way, run, holder) for way in Direction)
        return {sender: tuple(found) for sender, found in logs.items()}

    def _tier(self, one: Found) -> Tier:
        if one.tier is Tier.PERSISTENT:
            return one.tier
        if one.snapshot.kind == PARKED:
            return Tier.PARKED
        same_node = self.nodes[one.finder] == self.nodes[one.snapshot.rank]
        return Tier.OWN_MEMORY if same_node else Tier.PEER_MEMORY

    def _holder(self, one: Found) -> int | None:
        return None if one.tier is Tier.PERSISTENT else self.nodes[one.finder]


def is_past(snapshot: Timeline, iteration: int, timeline: Timeline) -> bool:
    """Whether a snapshot of `iteration` lies in the past of `timeline`, also one that was made by an attempt that only
    went on from that iteration: it was trained by the one before."""
    return belongs(past(snapshot, iteration), iteration, timeline)


def listing(
    store: Store, tier: Tier, rank: int, accepts: Mapping[str, Json], job: str | None, strategy: str = ""
) -> list[Json]:
    """What `store` holds, for `gather`: everything in memory, in persistent storage what `rank` owns.

    accepts: the parallel layout that snapshots must have been made in. job: the job that must have made them; None for
    any. strategy: the one that must have made them. Raises StoreFailure.
    """
    listed = store.snapshots()
    mine = [one for one in listed.sealed if tier is not Tier.PERSISTENT or one.rank == rank]
    torn = [one for one in listed.torn if tier is not Tier.PERSISTENT or one.snapshot.rank == rank]
    rows: list[Json] = [_row(one.snapshot, tier, why=one.why, torn=_interrupted(one)) for one in torn]
    for snapshot in mine:
        try:
            with store.open(snapshot) as reader:
                facts = reader.manifest.facts
        except UnreadableCheckpoint as error:
            rows.append(_row(snapshot, tier, why=str(error)))
            continue
        why = ""
        if dict(facts.topology) != dict(accepts):
            why = f"it was made in the parallel layout {dict(facts.topology)}, this job has {dict(accepts)}"
        elif job is not None and facts.job != job:
            why = f"it belongs to job {facts.job}"
        elif facts.scalars.get("made_by", strategy) != strategy:
            why = f"it was made with --moe-ckpt-strategy {facts.scalars['made_by']}, this job has {strategy}"
        rows.append(_row(snapshot, tier, facts, why))
    return rows


def catalogue(told: Sequence[Mapping[str, Any]]) -> Catalogue:
    """From what each rank told: `node` (a name), `operators` (its own) and `found` (rows of `listing`)."""
    names = sorted({one["node"] for one in told})
    plans: dict[tuple[int, tuple[tuple[int, ...], ...]], SnapshotPlan] = {}
    sets: dict[tuple[tuple[int, ...], ...], frozenset[OperatorId]] = {}
    required, found = {}, []
    for rank, one in enumerate(told):
        own = tuple(map(tuple, one["operators"]))
        required[rank] = sets.setdefault(own, frozenset(map(_operator, own)))
        found += [_found(rank, row, plans) for row in one["found"]]
    return Catalogue(tuple(found), required, tuple(names.index(one["node"]) for one in told))


def operators_told(operators: Iterable[OperatorId]) -> list[Json]:
    """Operators as JSON values."""
    return [[one.layer, one.kind.value, one.expert] for one in sorted(operators)]


def _interrupted(torn: Torn) -> bool:
    """Whether it was left while it was written; else it was sealed once, and is damaged or of another version."""
    return torn.path.rpartition("/")[2].startswith(".writing.") or torn.path.endswith(".writing")


def _row(snapshot: SnapshotId, tier: Tier, facts: Facts | None = None, why: str = "", torn: bool = False) -> list[Json]:
    said: list[Json] = ["", [], [], ""]
    window: list[Json] = [snapshot.iteration, snapshot.iteration]
    journal = remembers = False
    if facts is not None:
        try:
            said = [facts.plan_digest, facts.scalars["operators"], facts.scalars["timeline"], facts.job]
        except KeyError as error:
            why = why or f"its manifest does not say {error}: something else made it"
        window = cast("list[Json]", facts.scalars.get("window", window))
        journal = facts.scalars.get("journal") is not None and "trainer" in facts.scalars
        remembers = facts.scalars.get("strategy") is not None
    return [snapshot.iteration, snapshot.rank, snapshot.kind, tier.value, *said, torn, window, journal, remembers, why]


def _rolling(usable: Iterable[Found]) -> dict[int, int]:
    """By rank the newest iteration at which it parked, where it has the reduced gradients of the next one."""
    parked: dict[int, int] = {}
    reduced: dict[int, set[int]] = {}
    for one in usable:
        rank, iteration = one.snapshot.rank, one.snapshot.iteration
        if one.snapshot.kind == PARKED:
            parked[rank] = max(iteration, parked.get(rank, iteration))
        elif one.snapshot.kind == GRADIENTS:
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


def _found(finder: int, row: Sequence[Any], plans: dict[Any, SnapshotPlan]) -> Found:
    iteration, rank, kind, tier, digest, operators, timeline, job, torn, (first, last), journal, remembers, why = row
    key = iteration, tuple(map(tuple, operators))
    if key not in plans:
        plans[key] = SnapshotPlan(iteration, {_operator(one): Part(one[3]) for one in key[1]})
    led = tuple((name, after) for name, after in timeline)
    snapshot, span = SnapshotId(iteration, rank, kind), range(first, last + 1)
    return Found(finder, snapshot, Tier(tier), plans[key], digest, led, why, job, torn, span, journal, remembers)


def _operator(told: Sequence[int]) -> OperatorId:
    return OperatorId(told[0], OperatorKind(told[1]), told[2])
