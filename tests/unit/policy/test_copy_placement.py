"""Which bytes of a copy wait for bubbles of the pipeline, and when the others are due (MOETION Alg. 4)."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.contradictions import contradictions
from megatron.core.dist_checkpointing.moe.extensions.bubbles.copy_placement import CopyPlacement, estimated_wait_share
from megatron.core.dist_checkpointing.moe.extensions.bubbles.schedules import Bubbles, schedule_1f1b


def test_what_bubbles_have_time_for_waits_for_them_and_the_rest_is_spread_over_the_passes() -> None:
    bubbles = Bubbles(((0.1, 0.2), (0.5, 0.6)), 1.0)
    placement = CopyPlacement.of(1000, bubbles, span_s=0.8, bytes_per_s=3000.0)
    assert placement.bubble_bytes == 600  # 0.2 s of 3000 bytes/s
    assert [placement.due_s(0, beside) for beside in (0, 100, 200)] == pytest.approx([0.0, 0.2, 0.4])
    # All that may go beside computation has begun: the next is due when 600 bytes take all the time that is left.
    assert placement.due_s(0, 400) == pytest.approx(0.8 - 600 / 3000)
    assert placement.due_s(600, 400) == pytest.approx(0.8)


def test_where_nothing_is_known_of_bubbles_the_copy_is_spread_and_without_time_it_is_due_at_once() -> None:
    spread = CopyPlacement.of(1000, None, span_s=0.8, bytes_per_s=1e6)
    assert [spread.due_s(0, beside) for beside in (0, 500)] == pytest.approx([0.0, 0.4])
    assert CopyPlacement.of(1000, None, span_s=0.0, bytes_per_s=0.0).due_s(0, 700) == 0.0


@given(st.integers(1, 10**6), st.floats(0.01, 0.9), st.floats(10.0, 1e6), st.integers(1, 50))
@settings(max_examples=examples(60), deadline=None)
def test_a_copy_ends_in_time_although_no_bubble_comes(nbytes: int, bubble_s: float, rate: float, chunks: int) -> None:
    placement = CopyPlacement.of(nbytes, Bubbles(((0.0, bubble_s),), 1.0), 1.0, rate)
    now_s, begun, chunk = 0.0, 0, -(-nbytes // chunks)
    while begun < nbytes:
        now_s = max(now_s, placement.due_s(0, begun)) + min(chunk, nbytes - begun) / rate
        begun += min(chunk, nbytes - begun)
    assert now_s <= max(1.0, nbytes / rate) + 1e-6


@pytest.mark.parametrize(("stage", "share"), [(0, 0.75), (3, 0.25)])
def test_the_estimated_wait_is_that_of_the_schedule_up_to_the_last_backward_pass(stage: int, share: float) -> None:
    # Four stages, four microbatches: the first waits for 3 x (f + b), the last for 3 x f alone, of 4 x (f + b).
    assert estimated_wait_share(stage, stages=4, microbatches=4, chunks=1) == pytest.approx(share)
    schedule = schedule_1f1b(4, 4, 1.0, 2.0)
    waits = schedule.waits(stage)
    assert waits.idle_s == pytest.approx(share * 12)
    assert waits.span_s == schedule.operations[stage][-1].end_s


def test_virtual_stages_wait_for_less() -> None:
    assert estimated_wait_share(0, 4, 8, 2) < estimated_wait_share(0, 4, 8, 1)


BUBBLES = MoECheckpointConfig(strategy="selective", copy_placement="bubbles")


LOCAL = MoECheckpointConfig(strategy="sparse", recovery="local")


@pytest.mark.parametrize(
    ("config", "stages", "said"),
    [
        (LOCAL, 1, "--moe-ckpt-recovery local needs pipeline stages that stay, but the job has 1"),
        (
            MoECheckpointConfig(strategy="full", recovery="local"),
            2,
            "--moe-ckpt-recovery is for --moe-ckpt-strategy sparse, not full",
        ),
        (BUBBLES, 1, "needs pipeline stages that wait for each other, but the job has 1"),
        (MoECheckpointConfig(strategy="full", copy_placement="bubbles", copy_rate="10"), 2, "copy-rate 10 contradicts"),
        (MoECheckpointConfig(copy_placement="bubbles"), 2, "no effect with --moe-ckpt-strategy none"),
    ],
)
def test_what_needs_stages_or_another_strategy_is_refused_without(
    config: MoECheckpointConfig, stages: int, said: str
) -> None:
    given = {"world_size": 4, "num_experts": 4, "use_distributed_optimizer": True}
    (sentence,) = contradictions(config, stages=stages, **given)
    assert said in sentence
    assert not list(contradictions(BUBBLES, stages=2, **given))
    assert not list(contradictions(LOCAL, stages=2, **given))
