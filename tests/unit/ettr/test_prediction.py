"""How long the parts of a recovery take, predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import RecoveryPlan, Tier, Topology, expert
from megatron.core.dist_checkpointing.moe.types.recovery import ReplaySegment, Scope
from moe_ckpt.simulator.prediction import Figures, predicted_parts, replay_s

FIGURES = Figures(2.0, 8, memory_bytes_per_s=4e9, peer_bytes_per_s=1e9, storage_bytes_per_s=5e8)
TOPOLOGY = Topology(8, pp=4, ep=2)
WORK = {stage: {expert(stage, 0): 3.0, expert(stage, 1): 1.0} for stage in range(4)}
NOTHING = frozenset[object]()


def test_all_stages_together_replay_as_fast_as_they_train() -> None:
    whole = ReplaySegment((0, 1, 2, 3), 4, 7, (NOTHING,) * 3)  # type: ignore[arg-type]
    assert replay_s(whole, TOPOLOGY, FIGURES, WORK) == pytest.approx(3 * 2.0)


def test_a_stage_alone_has_no_bubbles() -> None:
    alone = ReplaySegment((1,), 4, 7, (NOTHING,) * 3)  # type: ignore[arg-type]
    assert replay_s(alone, TOPOLOGY, FIGURES, WORK) == pytest.approx(3 * 2.0 * 8 / (8 + 3))
    chunks = replace(TOPOLOGY, vpp=2)
    assert replay_s(alone, chunks, FIGURES, WORK) == pytest.approx(3 * 2.0 * 8 / (8 + 1.5))


def test_frozen_operators_save_their_share_of_a_third() -> None:
    frozen = ReplaySegment((1,), 4, 5, (frozenset({expert(1, 0)}),))
    active = ReplaySegment((1,), 4, 5, (frozenset(),))
    ratio = replay_s(frozen, TOPOLOGY, FIGURES, WORK) / replay_s(active, TOPOLOGY, FIGURES, WORK)
    assert ratio == pytest.approx(1 - 0.75 / 3)


def test_the_slowest_rank_and_the_longest_segment_count() -> None:
    plan = RecoveryPlan(
        7, Scope.LOCAL, tuple(ReplaySegment((one,), 7 - one, 7, (frozenset(),) * one) for one in (1, 3)), ()
    )
    read = {0: {Tier.OWN_MEMORY: 4_000_000_000}, 1: {Tier.PEER_MEMORY: 2_000_000_000, Tier.PARKED: 4_000_000_000}}
    parts = predicted_parts(plan, TOPOLOGY, FIGURES, read, [1_000_000_000, 2_000_000_000], WORK)
    assert list(parts) == ["detect", "park", "restart", "fetch", "replay"]
    assert parts["fetch"] == pytest.approx(3.0)
    assert parts["park"] == pytest.approx(0.5)
    assert parts["replay"] == pytest.approx(3 * 2.0 * 8 / 11)


def test_a_recovery_without_replay_and_without_survivors_only_restarts() -> None:
    parts = predicted_parts(RecoveryPlan(7, Scope.NONE, (), ()), TOPOLOGY, FIGURES, {}, [], WORK)
    assert sum(parts.values()) == FIGURES.detect_s + FIGURES.restart_s


@pytest.mark.parametrize("name", ["iteration_time_s", "microbatches", "peer_bytes_per_s"])
def test_figures_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        replace(FIGURES, **{name: 0})
