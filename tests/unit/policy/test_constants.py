"""What training does not change: one copy for each level, which counts for later iterations until it is changed."""

from __future__ import annotations

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import RecoveryImpossible
from megatron.core.dist_checkpointing.moe.policy.recovery import plan_recovery
from megatron.core.dist_checkpointing.moe.strategies import Job
from megatron.core.dist_checkpointing.moe.strategies.full import Full
from megatron.core.dist_checkpointing.moe.types import (
    CONSTANT,
    Copy,
    Inventory,
    Level,
    Lost,
    OperatorId,
    Part,
    RecoveryPlan,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    full_plan,
    iterate_operators,
)

OPERATORS = tuple(iterate_operators(2, 4, 1))

EXPERTS = frozenset(operator for operator in OPERATORS if operator.is_expert)
REST = frozenset(OPERATORS) - EXPERTS
ONCE = full_plan(2, sorted(EXPERTS), Part.MASTER_AND_MOMENTS | Part.CONSTANT)


def strategy() -> Full:
    config = MoECheckpointConfig(strategy="full", persist_dir="storage", persist_interval=3)
    return Full(Job(config, tuple(sorted(OPERATORS)), Topology(1), 1, 100, unchanging=EXPERTS))


def planned(full: Full, iteration: int) -> SnapshotPlan:
    plan = full.plan(iteration)
    assert plan is not None
    return plan


def test_each_level_gets_one_copy_and_one_that_failed_is_made_again() -> None:
    full = strategy()
    first = planned(full, 1)
    assert first.constant == EXPERTS
    assert [piece.kind for piece in full.pieces(first)] == ["snapshot", CONSTANT]
    full.on_commit(first, Level.SNAPSHOT, False)
    second = planned(full, 2)
    assert second.constant == EXPERTS, "the first one failed"
    full.on_commit(second, Level.SNAPSHOT, True)
    third = planned(full, 3)
    assert third.constant == EXPERTS, "storage has none"
    full.on_commit(third, Level.SNAPSHOT, True)
    (stored,) = full.persistent(third)
    assert stored.constant == EXPERTS
    full.on_commit(third, Level.PERSIST, True)
    fourth = planned(full, 4)
    assert fourth.parts.keys() == REST
    assert [piece.kind for piece in full.pieces(fourth)] == ["snapshot"]
    full.on_commit(third, Level.REPLICAS, False)
    assert planned(full, 5).constant == EXPERTS, "a peer lacks it"


@pytest.mark.parametrize(("stored", "is_written"), [([ONCE], False), ([], True), ([full_plan(2, REST)], True)])
def test_storage_that_turns_out_to_have_no_copy_gets_one(stored: list[SnapshotPlan], is_written: bool) -> None:
    """Another folder was named, or the one of before was emptied, while memory stayed."""
    full, resumed = strategy(), strategy()
    data = full.to_data()
    data["constants"]["levels"] = sorted(level.value for level in (Level.SNAPSHOT, Level.PERSIST))
    resumed.resumed(RecoveryPlan(2, Scope.GLOBAL, (), ()), data, 2)
    resumed.on_stored(stored)
    assert bool(planned(resumed, 3).constant) is is_written


def recovered(*plans: SnapshotPlan) -> tuple[int, dict[int, frozenset[OperatorId]]]:
    """The iteration that these copies lead to, and what is taken of which."""
    copies = {0: tuple(Copy(0, plan, Tier.OWN_MEMORY, 0) for plan in plans)}
    plan = plan_recovery(Inventory({0: frozenset(OPERATORS)}, copies), Lost(), Topology(1))
    return plan.target, {source.iteration: source.operators for source in plan.sources}


def test_an_older_copy_of_what_does_not_change_completes_a_newer_state() -> None:
    assert recovered(ONCE, full_plan(8, REST)) == (8, {2: EXPERTS, 8: REST})


def test_a_newer_copy_never_completes_an_older_state() -> None:
    with pytest.raises(RecoveryImpossible):
        recovered(full_plan(1, REST), ONCE)


def test_once_experts_were_trained_the_old_copy_counts_for_no_later_state() -> None:
    trained, damaged = full_plan(6, OPERATORS), full_plan(8, REST)
    assert recovered(ONCE, trained, damaged) == (6, {6: frozenset(OPERATORS)})
