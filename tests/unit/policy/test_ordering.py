"""Orderings of operators in a window, and the trigger that works them out again."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.window import (
    ORDERINGS,
    capacity_aware,
    hard_count,
    layer_order,
    should_reorder,
    soft_count,
)
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, expert

EMBEDDING = OperatorId(-1, OperatorKind.EMBEDDING)
HEAD = OperatorId(2, OperatorKind.HEAD)
NON_EXPERTS = [OperatorId(layer, OperatorKind.NON_EXPERT) for layer in range(2)]
ROUTERS = [OperatorId(layer, OperatorKind.ROUTER) for layer in range(2)]
EXPERTS = [expert(layer, index) for layer in range(2) for index in range(4)]
MODEL = [EMBEDDING, *NON_EXPERTS, *ROUTERS, *EXPERTS, HEAD]

some_counts = st.dictionaries(st.sampled_from(MODEL), st.integers(0, 50))


def one_layer(*tokens: float) -> dict[OperatorId, float]:
    return {expert(0, index): count for index, count in enumerate(tokens)}


def test_the_published_example_anchors_experts_before_the_router_and_the_non_expert() -> None:
    gate, non_expert = ROUTERS[0], NON_EXPERTS[0]
    experts = [expert(0, index) for index in range(4)]
    order = hard_count([gate, non_expert, *experts], one_layer(10, 20, 30, 40))
    assert order[:4] == tuple(experts)
    assert set(order[4:]) == {gate, non_expert}


def test_popular_experts_are_deferred_whatever_their_layer() -> None:
    counts = {expert(0, 0): 7, expert(0, 1): 3, expert(1, 0): 5, expert(1, 1): 1}
    assert hard_count(counts, counts) == (expert(1, 1), expert(0, 1), expert(1, 0), expert(0, 0))


def test_embedding_and_head_come_last_of_all() -> None:
    assert hard_count(MODEL, {})[-2:] == (EMBEDDING, HEAD)


def test_an_expert_without_a_count_had_no_tokens() -> None:
    assert hard_count([expert(0, 0), expert(0, 1)], {expert(0, 0): 1}) == (expert(0, 1), expert(0, 0))


def test_counts_of_operators_that_are_no_experts_change_nothing() -> None:
    assert hard_count(MODEL, dict.fromkeys([*NON_EXPERTS, *ROUTERS, HEAD], 99)) == hard_count(MODEL, {})


def test_experts_with_equal_counts_are_ordered_by_their_ids() -> None:
    assert hard_count(reversed(EXPERTS), dict.fromkeys(EXPERTS, 5)) == tuple(EXPERTS)


def test_soft_counts_order_experts_that_hard_counts_cannot_tell_apart() -> None:
    assert soft_count(EXPERTS[:3], one_layer(0.75, 0.5, 0.625)) == (expert(0, 1), expert(0, 2), expert(0, 0))


def test_an_expert_with_twice_the_capacity_may_have_more_tokens_and_come_first() -> None:
    order = capacity_aware(EXPERTS[:2], one_layer(15, 10), {expert(0, 0): 2.0, expert(0, 1): 1.0})
    assert order == (expert(0, 0), expert(0, 1))


def test_utilizations_are_compared_exactly_where_floats_see_a_tie() -> None:
    many = 3 * 10**17
    counts = {expert(0, 0): many + 1, expert(0, 1): many, expert(0, 2): 1}
    capacities = {expert(0, 0): 3, expert(0, 1): 3, expert(0, 2): 1}
    assert (many + 1) / 3 == many / 3
    assert capacity_aware(counts, counts, capacities)[1:] == (expert(0, 1), expert(0, 0))


def test_without_capacities_only_the_tokens_count() -> None:
    counts = one_layer(3, 1, 2)
    assert capacity_aware(EXPERTS, counts) == hard_count(EXPERTS, counts)


def test_a_dense_model_is_anchored_from_its_back_to_its_front() -> None:
    order = layer_order([EMBEDDING, *NON_EXPERTS, HEAD], {})
    assert order == (HEAD, NON_EXPERTS[1], NON_EXPERTS[0], EMBEDDING)


def test_within_a_layer_the_layer_order_goes_by_popularity() -> None:
    layer = [NON_EXPERTS[0], ROUTERS[0], *EXPERTS[:3]]
    order = layer_order(layer, one_layer(3, 1, 2))
    assert order == (expert(0, 1), expert(0, 2), expert(0, 0), NON_EXPERTS[0], ROUTERS[0])


def test_the_registry_has_the_names_of_the_flag() -> None:
    assert set(ORDERINGS) == {"popularity", "soft-count", "time-decayed", "capacity-aware", "layer-order"}


@pytest.mark.parametrize("name", ORDERINGS)
@given(operators=st.permutations(MODEL), counts=some_counts, shuffled=st.randoms(use_true_random=False))
@settings(max_examples=examples(50), deadline=None)
def test_every_ordering_has_each_operator_once_and_ignores_the_order_of_its_input(
    name: str, operators: list[OperatorId], counts: dict[OperatorId, int], shuffled: object
) -> None:
    items = list(counts.items())
    shuffled.shuffle(items)  # type: ignore[attr-defined]
    order = ORDERINGS[name](operators, dict(items))
    assert sorted(order) == sorted(MODEL)
    assert order == ORDERINGS[name](MODEL, counts)


@given(counts=some_counts, capacities=st.dictionaries(st.sampled_from(EXPERTS), st.fractions(Fraction(1, 9), 9)))
@settings(max_examples=examples(100), deadline=None)
def test_no_expert_is_anchored_before_one_that_is_used_less(
    counts: dict[OperatorId, int], capacities: dict[OperatorId, Fraction]
) -> None:
    order = capacity_aware(EXPERTS, counts, capacities)
    used = [counts.get(operator, 0) / capacities.get(operator, Fraction(1)) for operator in order]
    assert used == sorted(used)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param((100, 100, 100, 100), (111, 89, 100, 100), True, id="half of them by 11 %"),
        pytest.param((100, 100, 100, 100), (110, 90, 100, 100), False, id="exactly 10 % is not over 10 %"),
        pytest.param((100, 100, 100, 100), (200, 200, 200, 200), False, id="a larger batch"),
        pytest.param((1000, 1000, 1000, 1000), (1120, 960, 960, 960), True, id="exactly a quarter of them"),
        pytest.param((1000,) * 5, (1120, 970, 970, 970, 970), False, id="a fifth of them"),
        pytest.param((0, 3000, 3000, 3000), (1, 3000, 3000, 3000), True, id="from no tokens to some"),
        pytest.param((0, 0, 0, 0), (0, 0, 0, 0), False, id="no tokens at all"),
        pytest.param((5, 5, 5, 5), (0, 0, 0, 0), True, id="a layer falls silent"),
    ],
)
def test_the_trigger_fires_when_shares_of_enough_experts_change_enough(
    before: tuple[int, ...], now: tuple[int, ...], expected: bool
) -> None:
    assert should_reorder(one_layer(*before), one_layer(*now)) is expected


def test_a_layer_that_gets_more_tokens_than_another_is_no_change() -> None:
    before = {expert(layer, index): 10 for layer in range(2) for index in range(4)}
    now = {operator: 10 + 90 * operator.layer for operator in before}
    assert not should_reorder(before, now)


def test_a_threshold_means_the_decimals_that_were_written() -> None:
    before, now = one_layer(10, 10), one_layer(13, 7)
    assert not should_reorder(before, now, threshold=0.3)
    assert should_reorder(before, now, threshold=0.2999)


def test_the_fraction_of_changed_experts_is_configurable() -> None:
    before, now = one_layer(*[100] * 10), one_layer(150, 50, *[100] * 8)
    assert should_reorder(before, now, fraction=0.2)
    assert not should_reorder(before, now, fraction=0.21)


def test_an_expert_that_either_mapping_lacks_counts_as_one_without_tokens() -> None:
    assert should_reorder({expert(0, 0): 5}, {expert(0, 1): 5}, fraction=1.0)


def test_routers_never_trigger_a_new_order() -> None:
    experts = one_layer(10, 10)
    assert not should_reorder(experts | {ROUTERS[0]: 1}, experts | {ROUTERS[0]: 100})
    assert not should_reorder({}, {ROUTERS[0]: 1})


@given(tokens=st.lists(st.integers(0, 99), min_size=1, max_size=8), factor=st.integers(1, 10**6))
@settings(max_examples=examples(100), deadline=None)
def test_the_same_shares_never_trigger_a_new_order(tokens: list[int], factor: int) -> None:
    assert not should_reorder(one_layer(*tokens), one_layer(*(count * factor for count in tokens)), threshold=0)


@pytest.mark.parametrize("count", [-1, -0.5, math.nan, math.inf])
@pytest.mark.parametrize(
    "use",
    [
        *(partial(ordering, EXPERTS) for ordering in ORDERINGS.values()),
        partial(should_reorder, {}),
        lambda counts: should_reorder(counts, {}),
    ],
)
def test_a_count_below_zero_or_not_finite_is_refused_by_name(use: object, count: float) -> None:
    with pytest.raises(UsageError, match=r"count of layer0\.expert1 is .*, but must be at least 0 and finite"):
        use({expert(0, 0): 1, expert(0, 1): count})  # type: ignore[operator]


@pytest.mark.parametrize("capacity", [0, -1, math.nan, math.inf])
def test_a_capacity_that_is_not_above_zero_is_refused(capacity: float) -> None:
    with pytest.raises(UsageError, match=r"capacity of layer0\.expert0 is .*, but must be above 0 and finite"):
        capacity_aware(EXPERTS, {}, {expert(0, 0): capacity})


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"threshold": -0.1}, "reorder threshold is -0.1"),
        ({"threshold": math.nan}, "reorder threshold is nan"),
        ({"fraction": 0.0}, "reorder fraction is 0.0"),
        ({"fraction": 1.01}, "reorder fraction is 1.01"),
    ],
)
def test_settings_of_the_trigger_out_of_range_are_refused(settings_: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        should_reorder({}, {}, **settings_)
