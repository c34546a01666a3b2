"""Which pieces of snapshots all ranks have that own a part of them, once a recovery has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from thread_ranks import on_ranks

from megatron.core.dist_checkpointing.moe.policy.availability import OperatorOrder
from megatron.core.dist_checkpointing.moe.ports import SnapshotId
from megatron.core.dist_checkpointing.moe.recovery.inventory import InventoryRow, OperatorPart
from megatron.core.dist_checkpointing.moe.recovery.local_inventory import shared_pieces
from megatron.core.dist_checkpointing.moe.types import (
    OperatorId,
    OperatorKind,
    Piece,
    SnapshotPlan,
    Tier,
    expert,
    full_plan,
)

DENSE = OperatorId(0, OperatorKind.NON_EXPERT)
OWNED = ((DENSE, expert(0, 0)), (DENSE, expert(0, 1)), (DENSE, expert(0, 2)))
EVERYTHING = tuple(sorted({one for some in OWNED for one in some}))
ORDER = OperatorOrder(EVERYTHING)


def found(held: Mapping[int, Sequence[OperatorId]], plan: SnapshotPlan, *, has_strategy: bool) -> list[Piece]:
    """The pieces that all ranks find, of one that some of them hold."""

    def rows(rank: int) -> list[InventoryRow]:
        operators = tuple(
            OperatorPart(one.layer, one.kind.value, one.expert, plan.parts[one].value) for one in held.get(rank, ())
        )
        snapshot = SnapshotId(plan.iteration, rank)
        made = InventoryRow(
            snapshot, Tier.OWN_MEMORY, operators=operators, digest=plan.digest(), has_strategy=has_strategy
        )
        return [made] if rank in held else []

    given = [rows(rank) for rank in range(len(OWNED))]

    def work(transport: Any) -> Any:
        return shared_pieces(transport, given[transport.rank], (), OWNED[transport.rank], ORDER)

    first, *others = on_ranks(*[work] * len(OWNED))
    assert all(one == first for one in others)
    pieces: list[Piece] = first.get(Tier.OWN_MEMORY, [])
    return pieces


def test_what_lies_on_all_ranks_is_found_without_a_digest_of_thousands_of_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = full_plan(7, EVERYTHING)
    of_plan = plan.digest()
    monkeypatch.setattr(SnapshotPlan, "digest", lambda self: of_plan if self is plan else pytest.fail("not needed"))
    (piece,) = found(dict(enumerate(OWNED)), plan, has_strategy=True)
    assert piece.plan == plan


def test_a_piece_lies_on_the_ranks_that_own_a_part_of_it() -> None:
    plan = full_plan(7, [expert(0, 0), expert(0, 1)])
    (piece,) = found({0: [expert(0, 0)], 1: [expert(0, 1)]}, plan, has_strategy=False)
    assert piece.plan == plan


def test_a_piece_is_lost_where_all_that_own_an_operator_of_it_lack_it() -> None:
    plan = full_plan(7, [expert(0, 0), expert(0, 1)])
    assert not found({0: [expert(0, 0)]}, plan, has_strategy=False)


def test_a_piece_is_lost_where_one_of_several_owners_lacks_it_or_a_rank_the_state_of_the_trainer() -> None:
    plan = full_plan(7, EVERYTHING)
    some = {0: OWNED[0], 1: OWNED[1]}
    assert not found(some, plan, has_strategy=False)
    assert not found(some, plan, has_strategy=True)
