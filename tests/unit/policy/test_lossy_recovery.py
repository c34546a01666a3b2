"""Plans of lossy recoveries: the newest copies are merged, never newer than the target, and losses are counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import RecoveryImpossible
from megatron.core.dist_checkpointing.moe.extensions.lossy.recovery import plan_lossy_recovery
from megatron.core.dist_checkpointing.moe.types import (
    Copy,
    Inventory,
    Lost,
    OperatorId,
    OperatorKind,
    Part,
    RecoveryPlan,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

REST = OperatorId(0, OperatorKind.NON_EXPERT)
EXPERTS = tuple(expert(0, index) for index in range(4))
TWO_EP_RANKS = Topology(2, ep=2, ranks_per_node=1)
REQUIRED = {0: frozenset({REST, *EXPERTS[:2]}), 1: frozenset({REST, *EXPERTS[2:]})}


def tokens(operator: OperatorId, after: int, upto: int) -> int:
    """As if expert i got i + 1 tokens in each iteration."""
    return (operator.expert + 1) * (upto - after)


def pec(iteration: int, saved: Iterable[int], others: Part = Part.NOTHING) -> SnapshotPlan:
    parts = {
        REST: Part.MASTER_AND_MOMENTS,
        **dict.fromkeys(EXPERTS, others),
        **{EXPERTS[index]: Part.MASTER_AND_MOMENTS for index in saved},
    }
    return SnapshotPlan(iteration, {operator: part for operator, part in parts.items() if part})


def snapshot(plan: SnapshotPlan, tier: Tier, rank: int) -> Copy:
    own = SnapshotPlan(plan.iteration, {op: part for op, part in plan.parts.items() if op in REQUIRED[rank]})
    return Copy(rank, own, tier, None if tier is Tier.PERSISTENT else rank)


def recover(copies: Mapping[int, Iterable[Copy]], *nodes: int, target: int | None = None) -> RecoveryPlan:
    inventory = Inventory(REQUIRED, {rank: tuple(found) for rank, found in copies.items()})
    return plan_lossy_recovery(inventory, Lost(nodes=frozenset(nodes)), TWO_EP_RANKS, tokens, target=target)


def restored(plan: RecoveryPlan, operator: OperatorId) -> set[tuple[int, Tier, Part]]:
    return {(s.iteration, s.tier, s.part) for s in plan.sources if operator in s.operators}


def two_levels() -> dict[int, list[Copy]]:
    """Snapshots of two experts and persisted copies of one, at iterations 10 and 20."""
    first, second = pec(10, (0, 1, 2, 3)), pec(20, (0, 2))
    return {
        rank: [
            snapshot(first, Tier.OWN_MEMORY, rank),
            snapshot(second, Tier.OWN_MEMORY, rank),
            snapshot(first, Tier.PERSISTENT, rank),
            snapshot(pec(20, (0,)), Tier.PERSISTENT, rank),
        ]
        for rank in (0, 1)
    }


def test_every_expert_takes_its_newest_copy_and_what_it_lost_is_counted() -> None:
    plan = recover(two_levels())
    assert (plan.target, plan.scope) == (20, Scope.GLOBAL)
    assert restored(plan, EXPERTS[0]) == {(20, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS)}
    assert restored(plan, EXPERTS[1]) == {(10, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS)}
    assert plan.lost_tokens == {EXPERTS[1]: 2 * 10, EXPERTS[3]: 4 * 10}


def test_a_lost_node_loads_from_storage_while_the_others_use_their_memory() -> None:
    """MoC Fig. 8: the healthy node keeps the more recent experts of its snapshot."""
    plan = recover(two_levels(), 1)
    assert restored(plan, EXPERTS[0]) == {(20, Tier.OWN_MEMORY, Part.MASTER_AND_MOMENTS)}
    assert restored(plan, EXPERTS[2]) == {(10, Tier.PERSISTENT, Part.MASTER_AND_MOMENTS)}
    assert plan.lost_tokens[EXPERTS[2]] == 3 * 10


def test_experts_newer_than_what_all_ranks_have_of_the_rest_are_not_used() -> None:
    copies = two_levels()
    copies[0].append(snapshot(pec(30, (0, 1)), Tier.OWN_MEMORY, 0))
    plan = recover(copies)
    assert plan.target == 20
    assert all(source.iteration <= 20 for source in plan.sources)


def test_the_target_bounds_what_is_used() -> None:
    assert recover(two_levels(), target=19).target == 10


def test_weights_and_moments_may_come_from_different_iterations_and_the_older_one_counts() -> None:
    """MoC Table 3, scope O: master weights of all experts are saved, moments of the selected ones only."""
    copies = {
        rank: [
            snapshot(pec(10, (0, 1, 2, 3)), Tier.OWN_MEMORY, rank),
            snapshot(pec(20, (0,), Part.MASTER), Tier.OWN_MEMORY, rank),
        ]
        for rank in (0, 1)
    }
    plan = recover(copies)
    assert restored(plan, EXPERTS[1]) == {(20, Tier.OWN_MEMORY, Part.MASTER), (10, Tier.OWN_MEMORY, Part.MOMENTS)}
    assert plan.lost_tokens[EXPERTS[1]] == 2 * 10


def test_an_expert_without_any_copy_is_named() -> None:
    copies = {rank: [snapshot(pec(10, (0, 1, 2)), Tier.OWN_MEMORY, rank)] for rank in (0, 1)}
    with pytest.raises(RecoveryImpossible, match=r"iteration 10 .* suffice for layer0\.expert3;"):
        recover(copies)


def test_without_a_complete_set_of_the_rest_nothing_is_recovered() -> None:
    copies = two_levels()
    del copies[1]
    with pytest.raises(RecoveryImpossible, match=r"layer0\.non_expert"):
        recover(copies)


@st.composite
def histories(draw: st.DrawFn) -> dict[int, list[Copy]]:
    copies: dict[int, list[Copy]] = {0: [], 1: []}
    for iteration in range(draw(st.integers(1, 5))):
        plan = pec(
            iteration,
            draw(st.sets(st.integers(0, 3))),
            draw(st.sampled_from([Part.NOTHING, Part.MASTER, Part.MOMENTS])),
        )
        for rank in (0, 1):
            for tier in draw(st.sets(st.sampled_from([Tier.OWN_MEMORY, Tier.PERSISTENT]))):
                copies[rank].append(snapshot(plan, tier, rank))
    for rank in (0, 1):
        copies[rank].append(snapshot(pec(0, range(4)), Tier.PERSISTENT, rank))
    return copies


@settings(max_examples=examples(200), deadline=None)
@given(histories())
def test_each_part_of_each_expert_is_the_newest_up_to_the_newest_complete_iteration(
    copies: dict[int, list[Copy]],
) -> None:
    plan = recover(copies)
    by_rank = {rank: {copy.plan.iteration for copy in found} for rank, found in copies.items()}
    assert plan.target == max(by_rank[0] & by_rank[1])
    for rank, required in REQUIRED.items():
        for operator in required:
            for part in (Part.MASTER, Part.MOMENTS):
                having = [
                    copy.plan.iteration
                    for copy in copies[rank]
                    if part in copy.plan.parts.get(operator, Part.NOTHING) and copy.plan.iteration <= plan.target
                ]
                used = [
                    s.iteration for s in plan.sources if s.rank == rank and operator in s.operators and part in s.part
                ]
                assert used == [max(having)]
