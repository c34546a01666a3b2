"""What all ranks have to know of what each of them found: sets and extremes, which do not grow with their number.

Rows stay with the ranks that found them and go to the ranks whose state they are of. All ranks together make

1. an `Overview`: which jobs and attempts left anything, and which replays diverged. By it each rank judges its rows.
2. for each past that may be taken up, a `Digest`: per stage what its ranks can rebuild together, and who tells what
   one rank knows for all. The plan follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from ..policy.availability import OperatorOrder, StageState, Survey
from ..policy.lineage import Lineage, attempt_of, largest_number, newest_first
from ..ports import SnapshotId
from ..types import (
    LOG,
    MANY_NODES,
    PARKED,
    STANDBY,
    Direction,
    Part,
    RecoveryPlan,
    RefusalReason,
    RefusedGroup,
    Taken,
    Tier,
)
from ..types.recovery import joined_spans
from .exactness import Divergence, without_repetitions
from .inventory import Catalogue, CopyLocation, InventoryRow, JudgedRow, is_past

Iterations = frozenset[int]


class Trace(msgspec.Struct, frozen=True, array_like=True):
    """What an attempt of a job left that can be used: iterations of snapshots, of parked state, and of the rest."""

    job: str
    timeline: Lineage
    snapshots: Iterations = frozenset()
    parked: Iterations = frozenset()
    passing: Iterations = frozenset()

    def __or__(self, other: Trace) -> Trace:
        return Trace(
            self.job,
            self.timeline,
            self.snapshots | other.snapshots,
            self.parked | other.parked,
            self.passing | other.passing,
        )

    @property
    def states(self) -> Iterations:
        """The iterations of which there is state."""
        return self.snapshots | self.parked


class Overview(msgspec.Struct, frozen=True, array_like=True):
    """What ranks found, as far as all have to know it.

    Attributes:
        problem: The lowest rank that cannot list its stores, and why.
        traces: Of rows that can be used, by job and timeline.
        diverged: Replays that came out otherwise in earlier attempts.
        attempt: The largest number of an attempt of which anybody found anything, of use or not.
        newest: The newest iteration of which anything was found, torn or not; -1 if nothing was.
        foreign: The newest in memory of which only a setting or a version makes a state unusable, and why; -1 for none.
    """

    problem: tuple[int, str] | None = None
    traces: tuple[Trace, ...] = ()
    diverged: tuple[Divergence, ...] = ()
    attempt: int = 0
    newest: int = -1
    foreign: tuple[int, str] = (-1, "")

    def __or__(self, other: Overview) -> Overview:
        traces: dict[tuple[str, Lineage], Trace] = {}
        for trace in (*self.traces, *other.traces):
            key = trace.job, trace.timeline
            traces[key] = traces[key] | trace if key in traces else trace
        return Overview(
            self.problem or other.problem,
            tuple(traces[key] for key in sorted(traces)),
            without_repetitions((*self.diverged, *other.diverged)),
            max(self.attempt, other.attempt),
            max(self.newest, other.newest),
            max(self.foreign, other.foreign),
        )


def overview(
    rows: Collection[InventoryRow], diverged: Iterable[Divergence] = (), older: Iterable[Lineage] = ()
) -> Overview:
    """What one rank found.

    Args:
        rows: All of it.
        diverged: Replays that diverged before, as it has noted them.
        older: Timelines of which the rows do not tell.
    """
    found: dict[tuple[str, Lineage], tuple[set[int], set[int], set[int]]] = {}
    for row in rows:
        if not row.why:
            kinds = found.setdefault((row.job, row.timeline), (set(), set(), set()))
            kind = row.snapshot.kind
            kinds[0 if kind not in STANDBY else 1 if kind == PARKED else 2].add(row.snapshot.iteration)
    return Overview(
        None,
        tuple(Trace(*key, *map(frozenset, found[key])) for key in sorted(found)),
        tuple(diverged),
        largest_number((*(row.timeline for row in rows), *older)),
        max((row.snapshot.iteration for row in rows), default=-1),
        max(((row.snapshot.iteration, row.why) for row in rows if _is_foreign_state(row)), default=(-1, "")),
    )


def _is_foreign_state(row: InventoryRow) -> bool:
    is_state = row.snapshot.kind == PARKED or row.snapshot.kind not in STANDBY
    return row.is_foreign and is_state


@dataclass(frozen=True)
class Judge:
    """What may be used of what was found, the same on all ranks; `takes_over` says whether a job is asked for."""

    overview: Overview
    job: str
    takes_over: Callable[[str], bool]

    def judged(self, row: InventoryRow) -> JudgedRow:
        """A row with the reason why it is not used."""
        snapshot, why = row.snapshot, row.why or self._diverged(row.snapshot.kind, row.snapshot.iteration, row.timeline)
        strange = not why and self._is_strange(row.job, snapshot.iteration, row.timeline)
        values = msgspec.structs.asdict(row) | {"why": f"it belongs to job {row.job}" if strange else why}
        return JudgedRow(**values, is_intact=not (row.why or strange), is_strange=strange)

    def _diverged(self, kind: str, iteration: int, timeline: Lineage) -> str:
        """Why a snapshot is not used where a replay of all stages that was made from it came out otherwise."""
        if kind in STANDBY:
            return ""
        notes = (note for note in self.overview.diverged if not note.alone and note.used(iteration, timeline))
        return next(map(str, notes), "")

    def _is_strange(self, job: str, iteration: int, timeline: Lineage) -> bool:
        """Whether another job made it; what this one has come from is its own from then on."""
        if job == self.job or self.takes_over(job):
            return False
        return not any(is_past(timeline, iteration, own) for own in self._own)

    @cached_property
    def _own(self) -> tuple[Lineage, ...]:
        own = (trace for trace in self.overview.traces if trace.job == self.job)
        return tuple(trace.timeline for trace in own if self._exact(trace))

    def _exact(self, trace: Trace) -> Iterations:
        """Iterations of which something is left that led to no diverged replay."""
        snapshots = {one for one in trace.snapshots if not self._diverged("snapshot", one, trace.timeline)}
        return trace.parked | trace.passing | snapshots

    def _usable(self, trace: Trace) -> set[int]:
        return {one for one in self._exact(trace) if not self._is_strange(trace.job, one, trace.timeline)}

    @cached_property
    def timelines(self) -> list[Lineage]:
        """The timelines of all that may be used, the newest first."""
        return newest_first((trace.timeline, one) for trace in self.overview.traces for one in self._usable(trace))

    @cached_property
    def diverged(self) -> tuple[Divergence, ...]:
        """Replays that came out otherwise, as long as anything is left of what they were made from."""
        # Or training has come past it: then it need not be told again.
        states = [(one, trace.timeline) for trace in self.overview.traces for one in trace.states]
        return tuple(note for note in self.overview.diverged if any(note.used(*state) for state in states))

    @property
    def newest_stranger(self) -> tuple[int, str]:
        """The newest iteration of which another job stored state that is not used for that reason alone, and that job;
        -1 where there is none."""
        strange = [
            (one, trace.job)
            for trace in self.overview.traces
            for one in self._exact(trace) & trace.states
            if self._is_strange(trace.job, one, trace.timeline)
        ]
        return max(strange, key=lambda one: one[0], default=(-1, ""))

    def is_of(self, jobs: Collection[str], iteration: int, timeline: Lineage) -> bool:
        """Whether one of these jobs left anything of an iteration.

        Args:
            jobs: Their ids.
            iteration: The iteration.
            timeline: In whose past it lies.
        """
        own = (trace for trace in self.overview.traces if trace.job in jobs and iteration in self._usable(trace))
        return any(is_past(trace.timeline, iteration, timeline) for trace in own)

    def left_of(self, timeline: Lineage) -> set[str | None]:
        """The attempts of a timeline of whose state anything is left."""
        states = ((one, trace.timeline) for trace in self.overview.traces for one in trace.states)
        return {attempt_of(timeline, one) for one, led in states if is_past(led, one, timeline)}

    def diverged_alone(self, target: int, timeline: Lineage) -> Divergence | None:
        """A replay of single stages that was to lead to a certain state, and diverged; None where there is none.

        Args:
            target: The iteration of the state.
            timeline: That led to it.
        """
        return next((one for one in self.diverged if one.alone and one.is_of(target, timeline)), None)


def packed(bits: int) -> bytes:
    """A set, without the empty bytes at its ends."""
    skipped = ((bits & -bits).bit_length() - 1) // 8 if bits else 0
    kept = bits >> 8 * skipped
    return skipped.to_bytes(4, "little") + kept.to_bytes((kept.bit_length() + 7) // 8, "little")


def unpacked(data: bytes) -> int:
    """What `packed` gave."""
    return int.from_bytes(data[4:], "little") << 8 * int.from_bytes(data[:4], "little")


class StageDigest(msgspec.Struct, frozen=True, array_like=True):
    """A `StageState` with its sets as bytes.

    Attributes:
        own_logs: Iterations whose log each of the ranks holds itself.
        compared: Iterations of which the log of each of them says what it received.
    """

    ranks: int
    required: bytes
    lacks: dict[int, dict[int, bytes]]
    parked: Iterations
    stands: Iterations
    reaches: Iterations
    rolling: dict[int, bytes]
    logs: dict[str, Iterations]
    own_logs: Iterations
    compared: Iterations

    @classmethod
    def of(cls, stage: StageState, own_logs: Iterations, compared: Iterations) -> StageDigest:
        """From what it says.

        Args:
            stage: What the ranks can rebuild together.
            own_logs: As the attribute.
            compared: As the attribute.
        """
        lacks = {part.value: {at: packed(one) for at, one in held.items()} for part, held in stage.lacks.items()}
        rolling = {at: packed(ranks) for at, ranks in stage.rolling.items()}
        logs = {way.value: there for way, there in stage.logs.items()}
        sets = stage.parked, stage.stands, stage.reaches
        return cls(stage.ranks, packed(stage.required), lacks, *sets, rolling, logs, own_logs, compared)

    @property
    def state(self) -> StageState:
        """What the ranks can rebuild together."""
        return StageState(
            self.ranks,
            unpacked(self.required),
            {Part(part): {at: unpacked(one) for at, one in held.items()} for part, held in self.lacks.items()},
            self.parked,
            self.stands,
            self.reaches,
            {at: unpacked(ranks) for at, ranks in self.rolling.items()},
            {Direction(way): there for way, there in self.logs.items()},
        )

    def __or__(self, other: StageDigest) -> StageDigest:
        if self.lacks == other.lacks and self.required == other.required:  # ranks with equal shards: nothing to unite
            other = msgspec.structs.replace(other, lacks={part: {} for part in other.lacks}, required=packed(0))
        both = self.own_logs & other.own_logs, self.compared & other.compared
        return StageDigest.of(self.state | other.state, *both)


Speaker = tuple[int, int, str, int]
"""Who knows something for all: the owner of a snapshot, its finder, the kind, and the tier."""


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What ranks can rebuild together in one past, and where is what one of them tells all.

    Attributes:
        stages: By pipeline stage.
        journaled: Iterations of which each rank has a snapshot with a journal.
        kept: Iterations of which any rank kept the journal for all.
        logged: Iterations of which any log has the journal.
        strategies: By iteration, who has the state of the strategy; the lowest rank speaks.
        journals: By iteration, who says how it came out; first the ranks that say more than others.
    """

    stages: dict[int, StageDigest]
    journaled: Iterations
    kept: Iterations
    logged: Iterations
    strategies: dict[int, Speaker]
    journals: dict[int, tuple[bool, Speaker]]

    def __or__(self, other: Digest) -> Digest:
        stages = dict(self.stages)
        for stage, found in other.stages.items():
            stages[stage] = stages[stage] | found if stage in stages else found
        return Digest(
            stages,
            self.journaled & other.journaled,
            self.kept | other.kept,
            self.logged | other.logged,
            _least(self.strategies, other.strategies),
            _least(self.journals, other.journals),
        )

    @property
    def survey(self) -> Survey:
        """What the planner sees of it."""
        return Survey({stage: found.state for stage, found in self.stages.items()}, self.journaled | self.kept)

    def strategy(self, iteration: int) -> CopyLocation | None:
        """Which snapshot tells the state of the strategy after an iteration."""
        return _location(iteration, self.strategies.get(iteration))

    def journal(self, iteration: int) -> CopyLocation | None:
        """Which snapshot tells how an iteration came out."""
        return _location(iteration, self.journals[iteration][1] if iteration in self.journals else None)


def digest(
    rank: int,
    survey: Survey,
    usable: Catalogue,
    finds: Iterable[JudgedRow],
    damaged: Collection[CopyLocation],
    tells_more: Collection[int],
) -> Digest:
    """What one rank tells the others.

    Args:
        rank: The rank.
        survey: What it can rebuild.
        usable: What was found of its state, in one past.
        finds: What it found itself, in that past.
        damaged: Copies that proved unreadable.
        tells_more: Ranks whose snapshots say more than others of how an iteration came out.
    """
    intact = [row for row in finds if not row.why and (rank, row.snapshot, row.tier) not in damaged]
    journals = [row for row in intact if row.has_journal]
    own = [row for row in usable.without(damaged).found if not row.why and row.snapshot.rank == rank]
    logs = [row for row in own if row.snapshot.kind == LOG]
    here = frozenset(row.snapshot.iteration for row in logs if row.finder == rank)
    compared = frozenset(row.snapshot.iteration for row in logs if row.has_fingerprints)
    return Digest(
        {stage: StageDigest.of(state, here, compared) for stage, state in survey.stages.items()},
        # A log has how the step came out, and trainer state that is the same on all ranks; random states come out of
        # the replay itself.
        frozenset(row.snapshot.iteration for row in own if row.has_journal and row.snapshot.kind not in (LOG, PARKED)),
        frozenset(row.snapshot.iteration for row in journals if row.snapshot.kind in (LOG, PARKED)),
        frozenset(row.snapshot.iteration for row in journals if row.snapshot.kind == LOG),
        _least({}, *({row.snapshot.iteration: _speaker(rank, row)} for row in intact if row.has_strategy)),
        _least(
            {},
            *({row.snapshot.iteration: (row.snapshot.rank not in tells_more, _speaker(rank, row))} for row in journals),
        ),
    )


def _speaker(finder: int, row: JudgedRow) -> Speaker:
    return row.snapshot.rank, finder, row.snapshot.kind, row.tier.value


def _location(iteration: int, speaker: Speaker | None) -> CopyLocation | None:
    if speaker is None:
        return None
    owner, finder, kind, tier = speaker
    return finder, SnapshotId(iteration, owner, kind), Tier(tier)


def _least[T: (Speaker, tuple[bool, Speaker])](*found: Mapping[int, T]) -> dict[int, T]:
    least: dict[int, T] = {}
    for one in found:
        for iteration, speaker in one.items():
            least[iteration] = min(speaker, least.get(iteration, speaker))
    return least


# What all ranks take and refuse by a plan of which each knows its own part: for people, and for strategies.

_NAMED_NODES = 16
"""So many nodes are named from which copies of one kind are taken; more are counted as many."""

_Group = tuple[int, int, int]
"""Tier, iteration and part."""


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """What ranks take: by tier, iteration and part, and by node, operators and ranks; and what they refuse: by tier and
    reason how many copies, of which iterations and ranks."""

    taken: list[tuple[_Group, dict[int, tuple[bytes, str]]]]
    refused: list[tuple[tuple[int, str], tuple[int, frozenset[int], str]]]

    @classmethod
    def of(cls, plan: RecoveryPlan, order: OperatorOrder) -> Summary:
        """Of the ranks for which the plan was made.

        Args:
            plan: What is carried out.
            order: The numbers of all operators.
        """
        taken = [
            (
                (one.tier.value, one.iteration, one.part.value),
                {one.holder: (packed(order.bits(one.operators)), one.ranks)},
            )
            for one in plan.taken
        ]
        refused = [((one.tier.value, one.reason.name), (one.copies, one.iterations, one.ranks)) for one in plan.refused]
        return cls([], []) | cls(taken, refused)

    def __or__(self, other: Summary) -> Summary:
        taken: dict[_Group, dict[int, tuple[bytes, str]]] = {}
        for group, nodes in (*self.taken, *other.taken):
            held = taken.setdefault(group, {})
            for node, shares in nodes.items():
                held[node] = _both(held[node], shares) if node in held else shares
            if MANY_NODES in held or len(held) > _NAMED_NODES:
                every = list(held.values())
                both = every[0]
                for shares in every[1:]:
                    both = _both(both, shares)
                taken[group] = {MANY_NODES: both}
        refused = dict(self.refused)
        for key, (copies, iterations, ranks) in other.refused:
            before, known, named = refused.get(key, (0, frozenset[int](), ""))
            refused[key] = before + copies, known | iterations, joined_spans(named, ranks)
        return Summary(list(taken.items()), list(refused.items()))

    def added_to(self, plan: RecoveryPlan, order: OperatorOrder) -> RecoveryPlan:
        """The plan with what all ranks take and refuse.

        Args:
            plan: What is carried out.
            order: The numbers of all operators.
        """
        taken = tuple(
            Taken(Tier(tier), node, iteration, Part(part), order.named(unpacked(operators)), ranks)
            for (tier, iteration, part), nodes in self.taken
            for node, (operators, ranks) in nodes.items()
        )
        refused = tuple(RefusedGroup(Tier(tier), RefusalReason[why], *found) for (tier, why), found in self.refused)
        return replace(plan, all_taken=taken, all_refused=refused)


def _both(one: tuple[bytes, str], other: tuple[bytes, str]) -> tuple[bytes, str]:
    return packed(unpacked(one[0]) | unpacked(other[0])), joined_spans(one[1], other[1])
