"""Windows by counts and by bytes: what they cover, their units, and bad input."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from window_cases import budgets, byte_aware_schedule, even_share_bytes, named, scheduled, some_sizes

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.checks import budget_bytes
from megatron.core.dist_checkpointing.moe.policy.window import Schedule, joint_schedules
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorSize, Part, expert
from moe_ckpt.simulator.paper_window import paper_schedule, paper_window

# What the paper publishes


def test_the_published_example_takes_three_iterations_and_its_first_snapshot_is_55_percent_smaller() -> None:
    sizes = named(*[(12, 2)] * 6)
    dense, budget = 6 * 12, 2 * 12 + 4 * 2
    assert paper_window(sizes, budget) == (3, 2)
    assert paper_window(sizes, 3 * 12 + 3 * 2) == (2, 3), "what fits exactly fits"
    for schedule in (paper_schedule(list(sizes), sizes, budget), scheduled(sizes, budget)):
        assert [len(group) for group in schedule.window.groups] == [2, 2, 2]
        assert schedule.window.groups[0] == (expert(0, 0), expert(0, 1))
        assert schedule.load_bytes == (32, 28, 24)
    assert 1 - 32 / dense == pytest.approx(0.55, abs=0.01)


@given(sizes=some_sizes(), budget=budgets)
@settings(max_examples=examples(100), deadline=None)
def test_find_window_size_takes_the_most_operators_whose_average_fits_but_never_less_than_two(
    sizes: dict[OperatorId, OperatorSize], budget: int
) -> None:
    total = len(sizes)
    full = Fraction(sum(size.full_bytes for size in sizes.values()), total)
    weights = Fraction(sum(size.weights_bytes for size in sizes.values()), total)
    fitting = [n for n in range(3, total + 1) if full * n + weights * (total - n) <= budget]
    window, active = paper_window(sizes, budget)
    assert active == max(fitting, default=min(total, 2))
    assert window == math.ceil(total / active)


def test_counting_overloads_the_last_iteration_where_large_operators_end_the_order_and_bytes_do_not() -> None:
    sizes = named(*[(12, 2)] * 12, (120, 20), (120, 20))
    budget = 200
    counted, weighed = paper_schedule(list(sizes), sizes, budget), scheduled(sizes, budget)
    assert not counted.fits
    assert paper_window(sizes, budget) == (3, 5)
    assert counted.load_bytes[-1] == 2 * 12 + 2 * 120
    assert weighed.fits


# Coverage


@given(sizes=some_sizes(), budget=budgets, data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_each_operator_is_full_once_and_gives_its_weights_until_then_and_nothing_is_empty(
    sizes: dict[OperatorId, OperatorSize], budget: int, data: st.DataObject
) -> None:
    window = data.draw(st.none() | st.integers(1, len(sizes)))
    schedule = byte_aware_schedule(list(sizes), sizes, budget, first_iteration=7, window=window)
    assert all(schedule.window.groups)
    assert window in (None, schedule.window.size)
    anchored: set[OperatorId] = set()
    for step in range(schedule.window.size):
        plan = schedule.window.plan(7 + step)
        full = {operator for operator, part in plan.parts.items() if part == Part.MASTER_AND_MOMENTS}
        weights = {operator for operator, part in plan.parts.items() if part == Part.COMPUTE}
        assert not anchored & full
        anchored |= full
        assert weights == set(sizes) - anchored
        assert schedule.load_bytes[step] == sum(sizes[operator].full_bytes for operator in full) + sum(
            sizes[operator].weights_bytes for operator in weights
        )
    assert anchored == set(sizes)


@given(sizes=some_sizes(), budget=budgets)
@settings(max_examples=examples(200), deadline=None)
def test_operators_of_equal_size_are_anchored_in_their_order(
    sizes: dict[OperatorId, OperatorSize], budget: int
) -> None:
    schedule = scheduled(sizes, budget)
    assume(schedule.window.size > 1)
    step_of = {operator: step for step, group in enumerate(schedule.window.groups) for operator in group}
    for size in set(sizes.values()):
        steps = [step_of[operator] for operator in sizes if sizes[operator] == size]
        assert steps == sorted(steps)


def test_the_order_is_kept_across_sizes_where_that_costs_nothing() -> None:
    sizes = named(*[(12, 2)] * 4, *[(24, 4)] * 2, *[(12, 2)] * 2, (48, 8))
    groups = scheduled(sizes, 10**6, window=3).window.groups
    assert [operator for group in groups for operator in group] == list(sizes)


@given(sizes=some_sizes(), budget=budgets, shuffled=st.randoms(use_true_random=False))
@settings(max_examples=examples(100), deadline=None)
def test_the_order_in_which_sizes_are_given_changes_nothing(
    sizes: dict[OperatorId, OperatorSize], budget: int, shuffled: random.Random
) -> None:
    items = list(sizes.items())
    shuffled.shuffle(items)
    assert byte_aware_schedule(list(sizes), dict(items), budget) == scheduled(sizes, budget)
    assert paper_schedule(list(sizes), dict(items), budget) == paper_schedule(list(sizes), sizes, budget)


@given(sizes=some_sizes(), data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_pinned_operators_stay_where_they_are_pinned(
    sizes: dict[OperatorId, OperatorSize], data: st.DataObject
) -> None:
    window = data.draw(st.integers(1, len(sizes)))
    pinned = data.draw(st.dictionaries(st.sampled_from(list(sizes)), st.integers(0, window - 1)))
    groups = byte_aware_schedule(list(sizes), sizes, data.draw(budgets), window=window, pinned=pinned).window.groups
    assert all(operator in groups[step] for operator, step in pinned.items())
    assert sorted(operator for group in groups for operator in group) == sorted(sizes)
    free_steps = window - len(set(pinned.values()))
    if len(sizes) - len(pinned) >= free_steps:
        assert all(groups)


def test_free_operators_fill_what_pinned_ones_leave_even() -> None:
    sizes = named((60, 10), *[(12, 2)] * 20)
    schedule = byte_aware_schedule(list(sizes), sizes, 10**6, window=4, pinned={expert(0, 0): 1})
    assert expert(0, 0) in schedule.window.groups[1]
    assert schedule.peak_bytes <= even_share_bytes(schedule) * 1.10


def test_free_operators_keep_their_weights_from_a_step_that_pinned_ones_fill() -> None:
    sizes = named((100, 10), *[(12, 2)] * 9)
    schedule = byte_aware_schedule(list(sizes), sizes, 10**6, window=4, pinned={expert(0, 0): 2})
    assert len(schedule.window.groups[3]) == 1
    assert schedule.peak_bytes == 100 + 2


# Units


def test_the_budget_is_what_a_link_copies_in_an_iteration() -> None:
    assert budget_bytes(25e9, 0.4) == 10_000_000_000


# Bad input


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_a_bandwidth_or_iteration_time_that_is_not_above_zero_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=f"bandwidth_bytes_per_s is {value}, but must be a finite number"):
        budget_bytes(value, 1)
    with pytest.raises(UsageError, match=f"iteration_time_s is {value}, but must be a finite number"):
        budget_bytes(1e9, value)


def test_a_bandwidth_that_copies_less_than_a_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="budget_bytes is 0, but must be a whole number of at least 1"):
        budget_bytes(1.0, 0.5)


def jointly(sizes: Mapping[OperatorId, OperatorSize], budget: int, window: int | None = None) -> Schedule:
    """The schedule of the only rank of a job."""
    (schedule,) = joint_schedules({(0,): list(sizes)}, sizes, budget, window=window).values()
    return schedule


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_below_one_byte_is_refused(budget: int) -> None:
    sizes = named((12, 2))
    for use in (jointly, paper_window):
        with pytest.raises(UsageError, match=f"budget_bytes is {budget}, but must be a whole number of at least 1"):
            use(sizes, budget)


@pytest.mark.parametrize("window", [0, -1, 4])
def test_a_window_with_more_iterations_than_operators_or_none_is_refused(window: int) -> None:
    with pytest.raises(
        UsageError, match=f"window is {window}, but must be from 1 to the number of operators of the largest lane, 3"
    ):
        jointly(named(*[(12, 2)] * 3), 100, window=window)


def test_operators_without_a_size_given_twice_or_not_at_all_are_refused() -> None:
    sizes = named((12, 2), (12, 2))
    for use in (byte_aware_schedule, paper_schedule):
        with pytest.raises(UsageError, match=r"sizes has no entry for layer0\.expert7"):
            use([expert(0, 0), expert(0, 7)], sizes, 100)
        with pytest.raises(UsageError, match=r"layer0\.expert1 occurs more than once"):
            use([expert(0, 1), expert(0, 0), expert(0, 1)], sizes, 100)
        with pytest.raises(UsageError, match="ordered names no operators"):
            use([], sizes, 100)
