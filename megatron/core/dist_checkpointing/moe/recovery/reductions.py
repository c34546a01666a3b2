"""What ranks make one value of: the pieces that they share, the sources of a plan, what was found in the end.

Each is a struct whose `|` merges the values of two groups of ranks, as `merged` wants it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from operator import or_
from typing import NamedTuple

import msgspec

from ..policy.availability import OperatorOrder
from ..policy.lineage import Lineage
from ..ports import SnapshotId, Transport
from ..replication.agreement import merged
from ..strategies import Piece
from ..types import (
    MANY_NODES,
    OperatorId,
    Part,
    RecoveryPlan,
    RefusalReason,
    RefusedGroup,
    SnapshotPlan,
    Taken,
    Tier,
)
from ..types.recovery import joined_spans
from .findings import packed, unpacked
from .inventory import CopyLocation, InventoryRow, JudgedRow, operator_of

# Pieces of snapshots that all ranks have which own a part of them.


class _Key(NamedTuple):
    """Tier, iteration, kind, and the digest of the plan that all ranks followed."""

    tier: Tier
    iteration: int
    kind: str
    digest: str


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What ranks hold of a piece: how many they are, of which window it is, and by part the operators."""

    holders: int
    first: int
    last: int
    has_strategy: bool
    parts: dict[int, bytes]

    def __or__(self, other: _Share) -> _Share:
        theirs = {part: unpacked(bits) for part, bits in other.parts.items()}
        overruled = 0
        for bits in theirs.values():
            overruled |= bits
        for part, own in self.parts.items():
            theirs[part] = theirs.get(part, 0) | (unpacked(own) & ~overruled)
        parts = {part: packed(bits) for part, bits in theirs.items() if bits}
        has_strategy = self.has_strategy or other.has_strategy
        return _Share(self.holders + other.holders, other.first, other.last, has_strategy, parts)

    def plan(self, iteration: int, order: OperatorOrder) -> SnapshotPlan:
        """What they hold together.

        Args:
            iteration: Of the piece.
            order: The numbers of all operators.
        """
        parts: dict[OperatorId, Part] = {}
        for part, bits in self.parts.items():
            parts.update(dict.fromkeys(order.listed(unpacked(bits)), Part(part)))
        return SnapshotPlan(iteration, parts)


class _Shares(msgspec.Struct, frozen=True, array_like=True):
    """What ranks hold of all pieces, and tiers of which some rank cannot tell."""

    shares: list[tuple[_Key, _Share]]
    failed: frozenset[Tier]

    def __or__(self, other: _Shares) -> _Shares:
        shares = dict(self.shares)
        for key, share in other.shares:
            shares[key] = shares[key] | share if key in shares else share
        return _Shares(list(shares.items()), self.failed | other.failed)


def shared_pieces(
    transport: Transport,
    rows: Iterable[InventoryRow],
    failed: Collection[Tier],
    operators: Collection[OperatorId],
    order: OperatorOrder,
) -> dict[Tier, list[Piece]]:
    """By tier the pieces that lie on all ranks, or on all that own a part of them, by iteration; a collective.

    Args:
        transport: To all ranks.
        rows: Pieces that this rank has.
        failed: Tiers of which it cannot tell.
        operators: Its own.
        order: The numbers of all operators.
    """
    own: dict[_Key, _Share] = {}
    for row in rows:
        parts: dict[int, list[OperatorId]] = {}
        for held in row.operators:
            parts.setdefault(held.part, []).append(operator_of(held[:3]))
        first, last = row.window or (row.snapshot.iteration, row.snapshot.iteration)
        bits = {part: packed(order.bits(listed)) for part, listed in parts.items()}
        key = _Key(row.tier, row.snapshot.iteration, row.snapshot.kind, row.digest)
        own[key] = _Share(1, first, last, row.has_strategy, bits)
    all_ = merged(transport, _Shares(list(own.items()), frozenset(failed)), _Shares, or_)
    shares = {key: share for key, share in sorted(all_.shares) if key.tier not in all_.failed}
    # Owners are known once all operators of a piece are. All ranks have the piece with the trainer's state.
    mine, partial = order.bits(operators), []
    for key, share in shares.items():
        if share.holders < transport.world_size and key not in own:
            partial += [key] if any(unpacked(bits) & mine for bits in share.parts.values()) else []
    lacking = merged(transport, frozenset(partial), frozenset[_Key], or_)
    found: dict[Tier, list[Piece]] = {}
    for key, share in shares.items():
        plan = share.plan(key.iteration, order)
        is_everywhere = share.holders == transport.world_size
        is_owned = not share.has_strategy and key not in lacking and plan.digest() == key.digest
        if is_everywhere or is_owned:
            piece = Piece(key.kind, plan, range(share.first, share.last + 1))
            found.setdefault(key.tier, []).append(piece)
    return found


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
