"""Iteration times from what layers took: lines through measurements, and where they count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import FP32, ModelShape, Topology
from moe_ckpt.simulator.inputs import IterationCost, TrainingJob
from moe_ckpt.simulator.layer_times import LayerTimes, Line, fitted, layer_shape

SHAPE = ModelShape(
    "m", 6, 64, 4, 128, 128, num_experts=4, moe_layer_freq=(0, 1, 1, 1, 1, 1), untie_embeddings_and_output_weights=True
)
ESTIMATED = IterationCost((9.0,), 1, 1, 5.0, 7.0)
MOE, DENSE, ENDS, REDUCE, STEP = (
    Line(0.01, 0.002), Line(0.004, 0.001), Line(0.02, 0.003), Line(0.001, 1e-8), Line(0.002, 2e-8)
)  # fmt: skip


def rows(stages: int) -> list[dict[str, Any]]:
    """What jobs would find on a machine where these lines hold."""
    found = []
    for layers, parameters in (([1], 10**6), ([1, 1], 2 * 10**6), ([1, 0], 15 * 10**5)):
        for size in (1, 2, 4):
            kinds = [MOE if kind else DENSE for kind in layers]
            microbatch_s = sum(kind.seconds(size) for kind in kinds) + ENDS.seconds(size)
            found.append({
                "layers": layers, "micro_batch_size": size, "microbatch_s": microbatch_s, "parameters": parameters,
                "fewest_s": stages * microbatch_s + REDUCE.seconds(parameters), "step_s": STEP.seconds(parameters),
            })  # fmt: skip
    return found


def times(**changes: Any) -> LayerTimes:
    found = LayerTimes(
        layer_shape(SHAPE), 4, 1, 2, 2, 32, MOE, DENSE, ENDS, REDUCE, STEP, restart_s=3.0, contention=0.5
    )
    return replace(found, **changes)


def job(topology: Topology) -> TrainingJob:
    return TrainingJob(SHAPE, topology, FP32, 16, 4, 32)


@pytest.mark.parametrize("stages", [1, 2])
def test_lines_that_hold_on_a_machine_are_found_again(stages: int) -> None:
    found = fitted(rows(stages), stages)
    for name, line in (("moe", MOE), ("dense", DENSE), ("ends", ENDS), ("reduce", REDUCE), ("step", STEP)):
        assert found[name] is not None
        assert found[name].fixed_s == pytest.approx(line.fixed_s, abs=1e-9)
        assert found[name].each_s == pytest.approx(line.each_s)


def test_a_dense_model_has_no_line_of_layers_with_experts() -> None:
    found = fitted([row | {"layers": [0] * len(row["layers"])} for row in rows(1)[:6]], 1)
    assert found["moe"] is None
    assert found["dense"] == pytest.approx(MOE) or found["dense"].fixed_s == pytest.approx(MOE.fixed_s)  # type: ignore[union-attr]


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=8))
def test_a_line_is_never_below_zero(points: list[tuple[int, float]]) -> None:
    line = Line.through(points)
    assert line.fixed_s >= 0
    assert line.each_s >= 0


def test_stages_have_the_time_of_their_layers_and_the_last_one_the_ends() -> None:
    cost = times().cost(job(Topology(4, pp=2, ep=2)), ESTIMATED)
    two = 16 / 4 / 2
    first, last = DENSE.seconds(two) + 2 * MOE.seconds(two), 3 * MOE.seconds(two) + ENDS.seconds(two)
    assert cost.stage_s == pytest.approx((first, last))
    assert cost.microbatches == 4


def test_gradients_and_optimizer_are_those_of_the_rank_with_most_parameters() -> None:
    topology = Topology(4, pp=2, ep=2)
    stages = SHAPE.operators_of_stages(topology)
    most = max(sum(SHAPE.parameters[one] / (2 if one.is_expert else 1) for one in operators) for operators in stages)
    cost = times().cost(job(topology), ESTIMATED)
    assert cost.sync_s == pytest.approx(REDUCE.seconds(most))
    assert cost.update_s == pytest.approx(STEP.seconds(most))


def test_on_other_ranks_only_the_layers_count_as_measured() -> None:
    cost = times().cost(job(Topology(8, pp=2, ep=2)), ESTIMATED)
    assert cost.stage_s != ESTIMATED.stage_s
    assert (cost.sync_s, cost.update_s) == (ESTIMATED.sync_s, ESTIMATED.update_s)


@pytest.mark.parametrize("changes", [{"tp": 2}, {"ep": 1}, {"seq_length": 64}, {"shape": {"hidden_size": 65}}])
def test_other_layers_are_estimated(changes: dict[str, Any]) -> None:
    assert times(**changes).cost(job(Topology(4, pp=2, ep=2)), ESTIMATED) == ESTIMATED


def test_a_kind_of_layer_that_was_not_timed_is_refused() -> None:
    with pytest.raises(UsageError, match="no layer without experts"):
        times(dense=None).cost(job(Topology(4, pp=2, ep=2)), ESTIMATED)
