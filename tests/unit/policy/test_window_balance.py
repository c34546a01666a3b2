"""How evenly windows by bytes are spread over whole models, and what happens where the budget is too small."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import assume, example, given, settings
from window_cases import (
    WINDOWS,
    alone_with_due_weights,
    budgets,
    byte_aware_schedule,
    even_budget,
    even_share_bytes,
    fluid_bound,
    is_even,
    named,
    scheduled,
    some_sizes,
    stalls,
)

from megatron.core.dist_checkpointing.moe.policy.window import ORDERINGS, hard_count
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    PRECISIONS,
    ModelShape,
    OperatorId,
    OperatorKind,
    OperatorSize,
    expert,
)
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.paper_window import paper_schedule

# Budget and evenness


@given(sizes=some_sizes(), budget=budgets)
@settings(max_examples=examples(200), deadline=None)
def test_the_budget_is_respected_or_the_stall_and_its_reason_are_given(
    sizes: dict[OperatorId, OperatorSize], budget: int
) -> None:
    schedule = scheduled(sizes, budget)
    assert schedule.fits == (schedule.peak_bytes <= budget) == (not schedule.why)
    assert schedule.budget_bytes == budget
    assert "\n" not in schedule.why
    if not schedule.fits:
        assert f"{sum(stalls(schedule))} bytes" in schedule.why


@given(sizes=some_sizes(), budget=budgets)
@settings(max_examples=examples(200), deadline=None)
def test_the_window_is_never_larger_than_by_counting_where_counting_respects_the_budget(
    sizes: dict[OperatorId, OperatorSize], budget: int
) -> None:
    counted = paper_schedule(list(sizes), sizes, budget)
    assume(counted.fits)
    schedule = scheduled(sizes, budget)
    assert schedule.fits
    assert schedule.window.size <= counted.window.size


WHOLE = {name: shape for name, shape in PRESETS.items() if "Llama" not in name and "untied" not in name}
"""Models without an operator that outweighs the others: a dense layer, or an output layer of its own in a small one."""


@pytest.mark.parametrize("ordering", ["popularity", pytest.param("layer-order", marks=pytest.mark.ci)])
@pytest.mark.parametrize("shape", WHOLE.values(), ids=WHOLE)
def test_whole_models_are_spread_evenly_in_windows_no_larger_than_the_papers(shape: ModelShape, ordering: str) -> None:
    source = random.Random(shape.name)
    order = ORDERINGS[ordering](shape.operators, {operator: source.randrange(9999) for operator in shape.operators})
    for precision in PRECISIONS.values() if len(order) < 1000 else (FP16_FP32,):
        sizes = shape.sizes(precision)
        for budget in (even_budget(sizes, order, window) for window in WINDOWS):
            schedule, counted = byte_aware_schedule(order, sizes, budget), paper_schedule(order, sizes, budget)
            assert is_even(schedule, sizes), (precision.name, budget)
            assert schedule.window.size <= counted.window.size, "also where counting overruns the budget"
            assert schedule.fits or not counted.fits
            if schedule.fits:
                bound = fluid_bound(list(sizes.values()), schedule.window.size)
                assert schedule.peak_bytes <= max(bound * Fraction(21, 20), alone_with_due_weights(schedule, sizes))


# When the budget is too small


def test_an_operator_larger_than_the_budget_is_anchored_alone_at_the_end_and_stalls_only_there() -> None:
    embedding = OperatorId(-1, OperatorKind.EMBEDDING)
    sizes = {embedding: OperatorSize(1200, 20), **named(*[(12, 2)] * 60)}
    schedule = scheduled(sizes, 300)
    assert schedule.window.groups[-1] == (embedding,)
    assert stalls(schedule) == (*[0] * (schedule.window.size - 1), 900)
    assert schedule.why.startswith("embedding alone has 1200 bytes, but an iteration copies 300")
    assert "waits for 900 bytes in 1 of" in schedule.why


def test_of_two_operators_larger_than_the_budget_the_larger_one_comes_last() -> None:
    sizes = named((900, 10), (1200, 20), *[(12, 2)] * 30)
    schedule = scheduled(sizes, 300)
    assert schedule.window.groups[-2:] == ((expert(0, 0),), (expert(0, 1),))
    assert sum(stalls(schedule)) == 900 + 20 - 300 + 1200 - 300


@pytest.mark.parametrize("budget", [5000, 5])
def test_weights_larger_than_the_budget_do_not_stretch_the_window_over_all_operators(budget: int) -> None:
    sizes = named(*[(12, 2)] * 5000)
    schedule = scheduled(sizes, budget)
    expected = (
        "the compute weights of all 5000 operators have 10000 bytes" if budget > 12 else "layer0.expert0 alone has 12"
    )
    assert schedule.why.startswith(expected)
    assert schedule.window.size == 14, "the smallest with (5/6)^W below 1/11: within 10 % of the weights of all"
    assert schedule.peak_bytes <= 11_000 + 12


def test_a_window_that_fits_is_found_however_long_it_is() -> None:
    schedule = scheduled(named(*[(1000, 1)] * 100), 1100)
    assert schedule.fits
    assert schedule.window.size == 100


@given(sizes=some_sizes())
@example(sizes=named((5, 1), (5, 5)))
@settings(max_examples=examples(200), deadline=None)
def test_however_small_the_budget_the_peak_is_near_the_least_of_any_window(
    sizes: dict[OperatorId, OperatorSize],
) -> None:
    # One operator an iteration, what adds least to the WEIGHTS first: no window has a smaller peak.
    due = least = 0
    for size in sorted(sizes.values(), key=lambda size: size.weights_bytes - size.full_bytes):
        least = max(least, due + size.full_bytes)
        due += size.weights_bytes
    schedule = scheduled(sizes, 1)
    assert least <= schedule.peak_bytes <= 1.21 * least + 2


def test_a_forced_window_that_is_too_small_says_so_and_is_as_even_as_can_be() -> None:
    sizes = named(*[(12, 2)] * 100)
    assert scheduled(sizes, 400).window.size == 4
    schedule = scheduled(sizes, 400, window=2)
    assert schedule.window.size == 2
    assert "no window of 2 iterations was found in which less than" in schedule.why
    assert schedule.peak_bytes <= 1.02 * even_share_bytes(schedule)


def test_a_forced_window_may_be_larger_than_needed_up_to_one_operator_an_iteration() -> None:
    sizes = named((60, 10), *[(12, 2)] * 9)
    schedule = scheduled(sizes, 10**6, window=10)
    assert [len(group) for group in schedule.window.groups] == [1] * 10
    assert schedule.window.groups[-1] == (expert(0, 0),), "the only step in which it adds nothing to the peak"


def test_operators_of_which_a_rank_owns_nothing_are_anchored_all_the_same() -> None:
    sizes = named((0, 0), (12, 2), (0, 0), (12, 2))
    schedule = scheduled(sizes, 14)
    assert schedule.window.size == 2
    assert schedule.load_bytes == (14, 12)


def test_a_rank_that_owns_nothing_has_a_window_of_one_iteration() -> None:
    assert scheduled(named((0, 0), (0, 0)), 1).window.size == 1


def test_the_largest_model_and_one_of_all_different_sizes_are_scheduled_without_delay() -> None:
    shape = PRESETS["DeepSeek-V3-671B"]
    sizes = shape.sizes(FP16_FP32)
    source = random.Random(3)
    different = named(*((weights * 6, weights) for weights in source.sample(range(1, 10**6), 15_000)))
    started = time.process_time()
    byte_aware_schedule(hard_count(shape.operators, {}), sizes, even_budget(sizes, sizes, 6))
    assert time.process_time() - started < 2, "a guard against quadratic loops: the figure is in the benchmark"
    scheduled(different, sum(size.full_bytes for size in different.values()) // 4)
    assert time.process_time() - started < 15
