"""Which pieces of snapshots all ranks have that own a part of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import or_
from typing import NamedTuple

import msgspec

from ..policy.availability import OperatorOrder
from ..ports import Transport
from ..replication.collectives import merged
from ..strategies import Piece
from ..types import OperatorId, Part, SnapshotPlan, Tier
from .findings import packed, unpacked
from .inventory import InventoryRow, operator_of


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
