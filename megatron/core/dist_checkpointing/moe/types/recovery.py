"""What is left after a failure, and what is done about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .operators import OperatorId, Part
from .snapshots import SnapshotPlan


class Tier(enum.IntEnum):
    """Where a copy of state lies; lower values are preferred."""

    PARKED = 0  # live state that a survivor put aside when it heard of the failure
    OWN_MEMORY = 1  # memory tier of the node that the rank runs on
    PEER_MEMORY = 2  # a replica in another node's memory tier
    PERSISTENT = 3  # disk or object store


@dataclass(frozen=True, slots=True)
class Copy:
    """One stored snapshot of the state that one rank owns: its shard of the operators that the plan names.

    `holder` is the node whose memory has it, None for persistent storage. `sealed` is False when the manifest is
    missing, so that a reader must take it for torn. `corrupt` names the operators whose records failed their checksum.
    """

    rank: int
    plan: SnapshotPlan
    tier: Tier
    holder: int | None
    sealed: bool = True
    corrupt: frozenset[OperatorId] = frozenset()


class Direction(enum.Enum):
    """Which way a boundary log flowed (MoEvement 3.4)."""

    FORWARD = "forward"  # activations, to the next stage
    BACKWARD = "backward"  # gradients, to the previous stage


@dataclass(frozen=True, slots=True)
class BoundaryLog:
    """Tensors that `sender` sent over a stage boundary in a range of iterations, all microbatches and chunks."""

    sender: int
    direction: Direction
    iterations: range
    holder: int


@dataclass(frozen=True)
class Inventory:
    """All that was found after a failure.

    required: the operators of which each rank owns a shard.
    copies: what was found of each rank's state, torn and damaged copies included.
    logs: boundary logs by sender.
    journal: iterations whose global scalars (gradient norm, loss scale, ...) are known, each on all ranks.
    can_roll_forward: ranks that hold the reduced gradients of the iteration after their parked one.

    Ranks with equal operators, and copies with equal plans, should share one object: planning takes time for each
    different object, whatever it says.
    """

    required: Mapping[int, frozenset[OperatorId]] = field(repr=False)
    copies: Mapping[int, tuple[Copy, ...]] = field(repr=False)
    logs: Mapping[int, tuple[BoundaryLog, ...]] = field(default_factory=dict, repr=False)
    journal: frozenset[int] = frozenset()
    can_roll_forward: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Lost:
    """What failed: ranks whose process ended without parking, and nodes whose memory tier is gone with them."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()


class RefusalReason(enum.Enum):
    """Why a copy was not used."""

    HOLDER_LOST = "its node is lost"
    TORN = "it was never sealed"
    CORRUPT = "its checksum does not match"
    NEWER = "it is newer than the target"
    INCOMPLETE = "no complete state can be built from its iteration"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A copy that is not used, or not for some operators, and why. Copies that were simply not needed have none."""

    rank: int
    iteration: int
    tier: Tier
    holder: int | None
    reason: RefusalReason

    def __str__(self) -> str:
        place = f" on node {self.holder}" if self.holder is not None else ""
        tier = self.tier.name.lower().replace("_", " ")
        return f"rank {self.rank}, iteration {self.iteration}, {tier}{place}: {self.reason.value}"


class CopySource(NamedTuple):
    """Which copy gives `rank` this part of the state of `operators`, as it was after `iteration`."""

    rank: int
    iteration: int
    tier: Tier
    holder: int | None
    part: Part
    operators: frozenset[OperatorId]


NO_NODE, MANY_NODES = -1, -2
"""In place of a holder: a copy in storage, and copies of too many nodes to name each."""


class Taken(NamedTuple):
    """What ranks take of one iteration from one place; `ranks` as `spans` has them."""

    tier: Tier
    holder: int
    iteration: int
    part: Part
    operators: frozenset[OperatorId]
    ranks: str


class RefusedGroup(NamedTuple):
    """How many copies are not used for one reason, of which iterations and ranks; these as `spans` has them."""

    tier: Tier
    reason: RefusalReason
    copies: int
    iterations: frozenset[int]
    ranks: str


class Scope(enum.Enum):
    """How far a recovery reaches."""

    NONE = "none"  # every rank has its state at the target
    LOCAL = "local"  # some stages replay, the others wait in their parked state
    GLOBAL = "global"  # all stages roll back together


@dataclass(frozen=True)
class ReplaySegment:
    """Pipeline stages that roll back to `base` and replay up to `target` together (MoEvement App. A).

    `frozen[i]` are the operators that take no update in the replay of iteration `base + 1 + i`: their anchor snapshot
    is of that iteration or later. `logs_from` are the stages outside whose boundary logs feed the replay.
    """

    stages: tuple[int, ...]
    base: int
    target: int
    frozen: tuple[frozenset[OperatorId], ...] = field(default=(), repr=False)
    logs_from: tuple[int, ...] = ()

    @property
    def replayed(self) -> range:
        """The iterations that are replayed."""
        return range(self.base + 1, self.target + 1)


@dataclass(frozen=True)
class RecoveryPlan:
    """Who restores what from where, what is replayed by whom, and what is lost.

    `target` is the iteration after which all ranks stand when the recovery is done. Ranks in `roll_forward` apply their
    kept gradients once. `lost_tokens` counts the tokens whose updates a lossy strategy loses, per expert. `lost` is the
    failure that the plan answers. `wider`: why more stages roll back than have lost their state; empty if they do not.

    `sources` and `refusals` are of the ranks whose inventory the plan was made from; where that was not of all, `taken`
    and `refused` come from all.
    """

    target: int
    scope: Scope
    segments: tuple[ReplaySegment, ...]
    sources: tuple[CopySource, ...] = field(repr=False)
    refusals: tuple[Refusal, ...] = field(default=(), repr=False)
    roll_forward: tuple[int, ...] = ()
    lost_tokens: Mapping[OperatorId, int] = field(default_factory=dict)
    lost: Lost = field(default_factory=Lost)
    wider: str = ""
    all_taken: tuple[Taken, ...] | None = field(default=None, repr=False)
    all_refused: tuple[RefusedGroup, ...] | None = field(default=None, repr=False)

    @property
    def taken(self) -> tuple[Taken, ...]:
        """What all ranks take."""
        return taken_of(self.sources) if self.all_taken is None else self.all_taken

    @property
    def refused(self) -> tuple[RefusedGroup, ...]:
        """What all ranks refuse."""
        return refused_of(self.refusals) if self.all_refused is None else self.all_refused


def taken_of(sources: Iterable[CopySource]) -> tuple[Taken, ...]:
    """What these sources give together."""
    groups: dict[tuple[Tier, int, int, Part], tuple[set[OperatorId], set[int]]] = {}
    for source in sources:
        holder = NO_NODE if source.holder is None else source.holder
        key = source.tier, holder, source.iteration, source.part
        operators, ranks = groups.setdefault(key, (set(), set()))
        operators |= source.operators
        ranks.add(source.rank)
    return tuple(Taken(*key, frozenset(operators), spans(ranks)) for key, (operators, ranks) in groups.items())


def refused_of(refusals: Iterable[Refusal]) -> tuple[RefusedGroup, ...]:
    """These refusals by tier and reason."""
    groups: dict[tuple[Tier, RefusalReason], set[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.tier, refusal.reason), set()).add(refusal)
    return tuple(
        RefusedGroup(*key, len(found), frozenset(one.iteration for one in found), spans({one.rank for one in found}))
        for key, found in groups.items()
    )


# What a rank keeps beside its snapshots so that a recovery can stay local: names of what is stored, and records.

LOG = "log"
"""Kind of a snapshot with the tensors that a rank sent over stage boundaries in one iteration (MoEvement 3.4)."""


PARKED = "parked"
"""Kind of a snapshot of the complete live state, put aside when a peer was lost."""


GRADIENTS = "gradients"
"""Kind of a snapshot of the reduced gradients of the iteration after the parked one."""


STANDBY = frozenset({LOG, PARKED, GRADIENTS})
"""Kinds of snapshots that lie in the standby store."""


def boundary_key(direction: Direction, chunk: int, microbatch: int) -> str:
    """The key of a tensor in a log.

    Args:
        direction: Which way it was sent.
        chunk: The model chunk of the sender.
        microbatch: The microbatch, counted from 0.
    """
    return f"{direction.value}/chunk{chunk}/microbatch{microbatch}"


def received_key(direction: Direction) -> str:
    """The key of the fingerprints of all that came this way, in a log: 64 bits each, in the order of arrival; 0 where
    none was taken."""
    return f"received/{direction.value}"


def joined_spans(one: str, other: str) -> str:
    """The numbers of both, as `spans` has them.

    Args:
        one: Some of the numbers.
        other: The others.
    """
    runs: list[list[int]] = []
    for first, last in sorted((int(ends[0]), int(ends[-1])) for run in f"{one},{other}".strip(",").split(",") if run
                              for ends in [run.split("-")]):  # fmt: skip
        if runs and first <= runs[-1][1] + 1:
            runs[-1][1] = max(last, runs[-1][1])
        else:
            runs.append([first, last])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def spans(numbers: set[int]) -> str:
    """Numbers as ranges: 0-3,6."""
    spans: list[list[int]] = []
    for rank in sorted(numbers):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
