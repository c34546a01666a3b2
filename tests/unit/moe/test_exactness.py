"""What is said of a recovered state: it is called exact only if all that was replayed was compared to the bit."""

from __future__ import annotations

from megatron.core.dist_checkpointing.moe.recovery.exactness import (
    Exactness,
    Unverified,
    compared_in,
    exactness,
)
from megatron.core.dist_checkpointing.moe.replay.densify import Compared
from megatron.core.dist_checkpointing.moe.types import RecoveryPlan, ReplaySegment, Scope, Topology

LOSS, SENT, NOTHING = frozenset({Compared.LOSS}), frozenset({Compared.SENT}), frozenset[Compared]()
FOUR = Topology(4, pp=4)


def judged(
    stages: tuple[int, ...], *by_rank: frozenset[Compared], tolerance: float = 0.0, topology: Topology = FOUR
) -> Exactness:
    """One segment that replayed iterations 5 and 6, and what each rank compared in both."""
    segment = ReplaySegment(stages, 4, 6, (frozenset(), frozenset()))
    plan = RecoveryPlan(6, Scope.LOCAL, (segment,), ())
    compared: dict[int, frozenset[int]] = {}
    for rank, found in enumerate(by_rank):
        own = compared_in(segment, {5: found, 6: found} if found else {}, topology)
        stage = topology.stage(rank)
        compared[stage] = compared.get(stage, own) & own
    return exactness(plan, topology, tolerance, compared)


def test_a_state_that_nothing_was_replayed_for_is_exact_whatever_the_tolerance() -> None:
    plan = RecoveryPlan(6, Scope.GLOBAL, (ReplaySegment((0, 1, 2, 3), 6, 6),), ())
    assert str(exactness(plan, FOUR, 0.5, {})) == "exactly"


def test_a_replay_of_all_stages_is_exact_if_the_last_one_compared_the_losses() -> None:
    assert str(judged((0, 1, 2, 3), NOTHING, NOTHING, NOTHING, LOSS)) == "exactly"
    assert str(judged((0, 1, 2, 3), NOTHING, NOTHING, NOTHING, NOTHING)) == "unverified"


def test_with_a_tolerance_that_is_said() -> None:
    found = judged((0, 1, 2, 3), NOTHING, NOTHING, NOTHING, LOSS, tolerance=1e-3)
    assert str(found) == "within tolerance 0.001 of the recorded losses"


def test_a_middle_stage_alone_is_exact_if_it_compared_what_it_sent() -> None:
    assert str(judged((1,), NOTHING, SENT, NOTHING, NOTHING)) == "exactly"
    found = judged((1,), NOTHING, NOTHING, NOTHING, NOTHING)
    assert (str(found), found.unverified) == ("unverified", (Unverified((1,), (5, 6)),))


def test_stages_beside_each_other_are_judged_by_what_leaves_them() -> None:
    assert str(judged((1, 2), NOTHING, NOTHING, SENT, NOTHING)) == "exactly"
    assert str(judged((2, 3), NOTHING, NOTHING, NOTHING, LOSS)) == "exactly"


def test_stages_apart_are_judged_apart() -> None:
    found = judged((0, 3), NOTHING, NOTHING, NOTHING, LOSS)
    assert found.unverified == (Unverified((0,), (5, 6)),)


def test_all_ranks_of_a_stage_have_to_compare() -> None:
    wide = Topology(4, pp=2)
    assert str(judged((0,), SENT, SENT, NOTHING, NOTHING, topology=wide)) == "exactly"
    assert str(judged((0,), SENT, NOTHING, NOTHING, NOTHING, topology=wide)) == "unverified"


def test_the_loss_tells_nothing_of_the_other_chunks_of_a_stage_that_replays_alone() -> None:
    chunks = Topology(2, pp=2, vpp=2)
    assert str(judged((1,), NOTHING, LOSS, topology=chunks)) == "unverified"
    assert str(judged((1,), NOTHING, LOSS | SENT, topology=chunks)) == "exactly"
