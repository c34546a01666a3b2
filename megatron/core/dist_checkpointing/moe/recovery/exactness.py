"""What a recovery did, for people, and whether its state is the one that was lost, as far as that was compared."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import msgspec

from ..policy.lineage import Lineage, past
from ..ports import SnapshotId
from ..replay.densify import Compared
from ..storage.small_files import INFORMING_BYTES, put_aside, read_small
from ..strategies import LossReport
from ..types import (
    MANY_NODES,
    NO_NODE,
    OperatorId,
    Part,
    RecoveryPlan,
    RefusedGroup,
    ReplaySegment,
    Taken,
    Tier,
    Topology,
)
from ..types.recovery import spans
from .inventory import CopyLocation, JudgedRow

ComparedIterations = Mapping[int, frozenset[Compared]]


@dataclass(frozen=True)
class Unverified:
    """Stages whose replay of these iterations was compared with nothing."""

    stages: tuple[int, ...]
    iterations: tuple[int, ...]


@dataclass(frozen=True)
class Exactness:
    """What can be said of a state that was recovered.

    tolerance: by which share losses of replayed iterations
    were allowed to differ; 0 where none were replayed. unverified: what was replayed and not compared.
    """

    tolerance: float = 0.0
    unverified: tuple[Unverified, ...] = ()

    def __str__(self) -> str:
        if self.unverified:
            return "unverified"
        return f"within tolerance {self.tolerance:g} of the recorded losses" if self.tolerance else "exactly"


def exactness(
    plan: RecoveryPlan, topology: Topology, tolerance: float, compared: Mapping[int, frozenset[int]]
) -> Exactness:
    """How exactly a recovery led back to the state, from what the ranks of each stage compared.

    Stages that pass their tensors on to each other are judged together: a loss, or what the last of them sends,
    depends on the weights of all.

    Args:
        plan: What was carried out.
        topology: Of the job.
        tolerance: By which share losses were allowed to differ.
        compared: By stage, the iterations that `compared_in` gave for each of its ranks.
    """
    replayed = [segment for segment in plan.segments if segment.replayed]
    unverified = [one for segment in replayed for one in _unverified(segment, topology, compared)]
    return Exactness(tolerance if replayed else 0.0, tuple(unverified))


def compared_in(segment: ReplaySegment, compared: ComparedIterations, topology: Topology) -> frozenset[int]:
    """The replayed iterations that one rank compared with enough of what was recorded.

    Args:
        segment: The stages that replayed with it.
        compared: What each replayed iteration was compared by.
        topology: Of the job.
    """
    alone = len(segment.stages) < topology.pp
    # Of a stage with several chunks that replays alone, the loss tells of the last chunk only.
    enough = {Compared.SENT} if alone and topology.vpp > 1 else set(Compared)
    return frozenset(iteration for iteration, kinds in compared.items() if kinds & enough)


def _unverified(
    segment: ReplaySegment, topology: Topology, compared: Mapping[int, frozenset[int]]
) -> Iterator[Unverified]:
    for group in _neighbouring(segment.stages, topology):
        known = frozenset[int]().union(*(compared[stage] for stage in group))
        if missing := [iteration for iteration in segment.replayed if iteration not in known]:
            yield Unverified(group, tuple(missing))


def _neighbouring(stages: Sequence[int], topology: Topology) -> list[tuple[int, ...]]:
    """Stages beside each other, together; with virtual stages the last one is beside the first."""
    groups: list[list[int]] = []
    for stage in sorted(stages):
        if groups and groups[-1][-1] == stage - 1:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    if topology.vpp > 1 and len(groups) > 1 and groups[0][0] == 0 and groups[-1][-1] == topology.pp - 1:
        groups[0] = groups.pop() + groups[0]
    return [tuple(group) for group in groups]


# Replays that came out otherwise than recorded, noted for the next start of the job, which takes another way.
#
# The note lies in the rank's slot of the node's memory, beside its snapshots, which stay as they are. All ranks gather
# all notes, so it is enough that one of those that replayed together still has it. A note names the attempt and the
# iterations whose snapshots were used, so it never meets those of another past, and it stays as long as the slot does.

log = logging.getLogger(__name__)

FILE = "diverged.json"
"""In the folder of the rank's slot, which a restarted process takes over."""


class Divergence(msgspec.Struct, frozen=True):
    """A replay that came out otherwise.

    Attributes:
        iteration: The first one that did.
        target: To which the recovery led.
        stages: Which replayed together.
        alone: Whether other stages of the pipeline took no part.
        first: Of the iterations whose snapshots it was made from.
        last: Of these.
        timeline: Of the state that was to be rebuilt.
        why: What was compared, with both values.
        tolerance: By which share losses were allowed to differ; a user who allows more may have it tried again.
    """

    iteration: int
    target: int
    stages: tuple[int, ...]
    alone: bool
    first: int
    last: int
    timeline: Lineage
    why: str
    tolerance: float = 0.0

    def __str__(self) -> str:
        stages = f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"
        who = f"{stages} alone" if self.alone else "all stages"
        return f"the replay of {who} from iteration {self.first} to {self.target} diverged: {self.why}"

    def used(self, iteration: int, led: Lineage) -> bool:
        """Whether it was made from certain snapshots.

        Args:
            iteration: Of the snapshots.
            led: The timeline that led to them.
        """
        return self.first <= iteration <= self.last and past(led, iteration) == past(self.timeline, iteration)

    def is_of(self, target: int, led: Lineage) -> bool:
        """Whether it was to lead to a certain state.

        Args:
            target: The iteration of the state.
            led: The timeline that led to it.
        """
        return target == self.target and past(led, target) == past(self.timeline, target)


class DivergenceNotes:
    """What one rank noted; folder: of its slot. None: they are kept as long as this object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = folder / FILE if folder is not None else None
        self._noted: list[Divergence] = []

    def read(self) -> list[Divergence]:
        """All notes, oldest first.

        None where they are damaged, which is said once: then a replay may be tried once more. It is compared with what
        was recorded as before, so what comes out otherwise is not trained from, and is noted again.
        """
        if self._path is None:
            return list(self._noted)
        try:
            return msgspec.json.decode(read_small(self._path, INFORMING_BYTES), type=list[Divergence])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:  # ValueError: msgspec's, and of text that is no UTF-8
            put_aside(self._path, "replays that diverged before, of which one may be tried again,", error)
            return []

    def add(self, divergence: Divergence) -> None:
        """Keep another one. Never raises: what cannot be written down is tried once more, and said."""
        self._noted.append(divergence)
        if self._path is None:
            return
        aside = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            # No fsync: the file has to survive the process, not the node.
            aside.write_bytes(msgspec.json.encode([*self.read(), divergence]))
            aside.replace(self._path)
        except OSError as error:
            log.error("cannot record a diverged replay in %s: %s; it will be tried again", self._path, error)


def without_repetitions(notes: Iterable[Divergence]) -> tuple[Divergence, ...]:
    """One note for each replay: the ranks that replayed together have the same."""
    return tuple(dict.fromkeys(notes))


# What a recovery did, for people: what came from where, as of which iteration, and what was lost.

_PARTS = {
    Part.MASTER_AND_MOMENTS: "full state",
    Part.MASTER: "master weights",
    Part.MOMENTS: "moments",
    Part.COMPUTE: "weights",
}


@dataclass(frozen=True)
class RecoveryTable:
    """A recovery plan that was carried out; `nodes[rank]` is the node of each rank, `damaged` are refused copies.

    losses: of all faults so far; None where nothing can be lost. windows: by iteration, those whose snapshots restore a
    state together with its own. wider: why more stages rolled back than had lost their state; empty if they did not.
    stages: of the pipeline. exactness: what was compared, and how. diverged: replays of earlier
    attempts that came out otherwise, for which this one was taken; then `again` are the iterations that had been
    trained and are trained again.
    """

    plan: RecoveryPlan
    nodes: tuple[int, ...]
    damaged: tuple[str, ...] = ()
    duration_s: float = 0.0
    losses: LossReport | None = None
    windows: Mapping[int, range] = field(default_factory=dict)
    wider: str = ""
    stages: int = 1
    exactness: Exactness = field(default_factory=Exactness)
    diverged: tuple[str, ...] = ()
    again: range = range(0)

    @property
    def came_out(self) -> str:
        """How the recovered state compares with the one that was lost, in a few words."""
        return "with lost tokens" if self.plan.lost_tokens else str(self.exactness)

    def lines(self) -> Iterator[str]:
        """The table, one line each."""
        plan = self.plan
        how = f"({plan.scope.value} rollback); state restored in {self.duration_s:.2f} s"
        yield f"recovered iteration {plan.target} {self.came_out} {how}:"
        for text in self.diverged:
            yield f"  diverged before: {text}"
        if self.diverged and self.again:
            yield f"  trained again: iteration{'s' if len(self.again) > 1 else ''} {_span(self.again)}"
        if self.wider and self.wider not in self.diverged:
            yield f"  not local: {self.wider}"
        for one in self.exactness.unverified:
            yield (
                f"  not verified: {self._named(one.stages)}, iterations {spans(set(one.iterations))}: nothing is"
                " recorded with which their replay can be compared"
            )
        for segment in plan.segments:
            if segment.replayed:
                yield self._replay(segment)
        yield from self._waiting()
        yield f"  {'from':<26} {'iteration':>9}  {'what':<15} {'operators':>9}  ranks"
        rows = ((_place(taken), taken.iteration, _PARTS[taken.part], taken) for taken in plan.taken)
        for place, iteration, part, taken in sorted(rows, key=itemgetter(0, 1, 2)):
            yield f"  {place:<26} {iteration:>9}  {part:<15} {len(taken.operators):>9}  {taken.ranks}"
        yield from _refusals(plan.refused)
        for text in self.damaged:
            yield f"  refused: {text}"
        yield from self._losses()

    def _kept_by(self, experts: Collection[OperatorId]) -> str:
        """What these experts have lost nothing of, where only one part of their state came back older."""
        older = {part: set[OperatorId]() for part in (Part.MASTER, Part.MOMENTS)}
        for source in self.plan.taken:
            for part, found in older.items():
                if part in source.part and source.iteration < self.plan.target:
                    found |= source.operators
        for part, other in ((Part.MASTER, Part.MOMENTS), (Part.MOMENTS, Part.MASTER)):
            if older[part].issuperset(experts) and older[other].isdisjoint(experts):
                return (
                    f", in their {_PARTS[part]} only; their {_PARTS[other]} are those of iteration {self.plan.target}"
                )
        return ""

    def _replay(self, segment: ReplaySegment) -> str:
        window = self.windows.get(segment.base, range(segment.base, segment.base + 1))
        who = "" if len(segment.stages) == self.stages else f"{self._named(segment.stages)}, "
        fed = f", fed from the logs of {_stages(segment.logs_from)}" if segment.logs_from else ""
        return (
            f"  {who}window {_span(window)}: restored iteration {segment.base}, then replayed"
            f" {_span(segment.replayed)} with up to {max(map(len, segment.frozen))} operators frozen{fed}"
        )

    def _waiting(self) -> Iterator[str]:
        """The stages that kept their state, where others did not."""
        moved = {stage for segment in self.plan.segments for stage in segment.stages}
        kept = [stage for stage in range(self.stages) if stage not in moved]
        if kept and self.stages > 1:
            yield f"  {self._named(kept)}: resumed from parked state, ran nothing again"
        if self.plan.roll_forward:
            ranks = spans(set(self.plan.roll_forward))
            yield f"  ranks {ranks}: made the step of iteration {self.plan.target} with the gradients they had kept"

    def _named(self, stages: Collection[int]) -> str:
        each = len(self.nodes) // self.stages
        ranks = {rank for stage in stages for rank in range(stage * each, (stage + 1) * each)}
        return f"{_stages(stages)} (ranks {spans(ranks)})"

    def _losses(self) -> Iterator[str]:
        by_layer: dict[int, dict[OperatorId, int]] = {}
        for operator, tokens in self.plan.lost_tokens.items():
            by_layer.setdefault(operator.layer, {})[operator] = tokens
        for layer, lost in sorted(by_layer.items()):
            updates = f"the updates of {sum(lost.values())} routed tokens, of {len(lost)} experts"
            yield f"  lost in layer {layer}: {updates}{self._kept_by(lost)}"
        if (losses := self.losses) is not None:
            yield f"  proportion of lost tokens, all faults so far: {100 * losses.plt:.4f} %"
            yield f"  portion of lost tokens by PEC eq. 4, all faults so far: {100 * losses.plt_pec:.4f} %"
            yield f"  momentary lost tokens (MLT), all faults so far: {100 * losses.mlt:.4f} %"


def _place(one: Taken) -> str:
    nodes = {NO_NODE: "", MANY_NODES: " of many nodes"}
    return one.tier.name.lower().replace("_", " ") + nodes.get(one.holder, f" of node {one.holder}")


def _refusals(refused: Collection[RefusedGroup]) -> Iterator[str]:
    """One line for each reason and tier."""
    for one in sorted(refused, key=lambda one: (one.tier, one.reason.value)):
        copies = f"{one.copies} copies" if one.copies > 1 else "1 copy"
        yield (
            f"  skipped: {copies} in {one.tier.name.lower().replace('_', ' ')} of ranks {one.ranks},"
            f" iterations {spans(set(one.iterations))}: {one.reason.value}"
        )


def _stages(stages: Collection[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {spans(set(stages))}"


def _span(iterations: range) -> str:
    return f"{iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else "".join(map(str, iterations))


# What ranks tell each other once all of them stand at the target of a recovery.

_NAMED = 32
"""So many unusable snapshots are named in the table of a recovery; more are counted."""


class EndedRecovery(msgspec.Struct, frozen=True, array_like=True):
    """What ranks compared and found, together.

    Attributes:
        compared: By stage, the replayed iterations that each of its ranks compared with what was recorded.
        memory: Iteration and kind of what holds state in any memory.
        windows: By iteration, first and last of those whose snapshots restore a state together with its own.
        unusable: Iteration, owner, kind, finder and tier of sealed snapshots that cannot be used, and why.
        unnamed: How many more there are.
    """

    compared: dict[int, frozenset[int]] = {}
    memory: frozenset[tuple[int, str]] = frozenset()
    windows: dict[int, tuple[int, int]] = {}
    unusable: list[tuple[int, int, str, int, int, str]] = []
    unnamed: int = 0

    @classmethod
    def of(
        cls, rank: int, stage: int, compared: frozenset[int], found: Iterable[JudgedRow], timeline: Lineage
    ) -> EndedRecovery:
        """Of one rank.

        Args:
            rank: The rank.
            stage: Its pipeline stage.
            compared: As the attribute.
            found: What it found in its own stores.
            timeline: Of the state that was recovered.
        """
        found = list(found)
        led = [row for row in found if row.is_state and row.may_be_of(timeline)]
        return cls() | cls(
            {stage: compared},
            frozenset((row.snapshot.iteration, row.snapshot.kind) for row in led if row.tier is not Tier.PERSISTENT),
            {row.snapshot.iteration: (row.span[0], row.span[-1]) for row in led if not row.why},
            [
                (row.snapshot.iteration, row.snapshot.rank, row.snapshot.kind, rank, row.tier.value, row.why)
                for row in found
                if row.why and not (row.torn or row.is_intact)
            ],
        )

    def __or__(self, other: EndedRecovery) -> EndedRecovery:
        compared = dict(self.compared)
        for stage, iterations in other.compared.items():
            compared[stage] = compared[stage] & iterations if stage in compared else iterations
        unusable = sorted([*self.unusable, *other.unusable])
        unnamed = self.unnamed + other.unnamed + max(0, len(unusable) - _NAMED)
        windows = {**self.windows, **other.windows}
        return EndedRecovery(compared, self.memory | other.memory, windows, unusable[:_NAMED], unnamed)

    def lines(self, damaged: Mapping[CopyLocation, str]) -> tuple[str, ...]:
        """What was refused when it was listed, and what when it was read, for people.

        Args:
            damaged: What proved unreadable, and why.
        """
        listed = [
            ((finder, SnapshotId(iteration, owner, kind), Tier(tier)), why)
            for iteration, owner, kind, finder, tier, why in self.unusable
        ]
        refused = sorted([*listed, *damaged.items()])
        named = (f"{snapshot}, held by rank {finder}: {why}" for (finder, snapshot, _), why in refused)
        return (*named, *([f"{self.unnamed} more copies that cannot be used"] if self.unnamed else ()))
