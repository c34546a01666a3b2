"""How long a replay takes, predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.types import Topology, expert
from megatron.core.dist_checkpointing.moe.types.recovery import ReplaySegment
from moe_ckpt.simulator.systems.sparse import replay_s

FIGURES = (2.0, 8)
"""Seconds of an iteration, and its microbatches."""
TOPOLOGY = Topology(8, pp=4, ep=2)
WORK = {stage: {expert(stage, 0): 3.0, expert(stage, 1): 1.0} for stage in range(4)}
NOTHING = frozenset[object]()


def test_all_stages_together_replay_as_fast_as_they_train() -> None:
    whole = ReplaySegment((0, 1, 2, 3), 4, 7, (NOTHING,) * 3)  # type: ignore[arg-type]
    assert replay_s(whole, TOPOLOGY, *FIGURES, WORK) == pytest.approx(3 * 2.0)


def test_a_stage_alone_has_no_bubbles() -> None:
    alone = ReplaySegment((1,), 4, 7, (NOTHING,) * 3)  # type: ignore[arg-type]
    assert replay_s(alone, TOPOLOGY, *FIGURES, WORK) == pytest.approx(3 * 2.0 * 8 / (8 + 3))
    chunks = replace(TOPOLOGY, vpp=2)
    assert replay_s(alone, chunks, *FIGURES, WORK) == pytest.approx(3 * 2.0 * 8 / (8 + 1.5))


def test_frozen_operators_save_their_share_of_a_third() -> None:
    frozen = ReplaySegment((1,), 4, 5, (frozenset({expert(1, 0)}),))
    active = ReplaySegment((1,), 4, 5, (frozenset(),))
    ratio = replay_s(frozen, TOPOLOGY, *FIGURES, WORK) / replay_s(active, TOPOLOGY, *FIGURES, WORK)
    assert ratio == pytest.approx(1 - 0.75 / 3)
