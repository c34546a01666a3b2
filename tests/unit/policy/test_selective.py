"""Selective experts: budgets, shares of layers, choices, and capacity for what was lost."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.extensions.lossy.selection import (
    Budgets,
    allocate,
    capacity_boost,
    select,
    selective_plan,
    total_experts,
)
from megatron.core.dist_checkpointing.moe.policy.checks import budget_bytes
from megatron.core.dist_checkpointing.moe.types import OperatorId, OperatorKind, OperatorSize, Part, expert

NAN, INF = math.nan, math.inf
NON_EXPERT, ROUTER = OperatorId(0, OperatorKind.NON_EXPERT), OperatorId(0, OperatorKind.ROUTER)


def lane(layers: int, experts: int, non_expert_bytes: int, expert_bytes: int) -> dict[OperatorId, OperatorSize]:
    """Shards of one rank: all non-experts in one operator per layer, and all experts of each layer."""
    sizes = {
        OperatorId(layer, OperatorKind.NON_EXPERT): OperatorSize(non_expert_bytes, non_expert_bytes // 6)
        for layer in range(layers)
    }
    for layer in range(layers):
        for index in range(experts):
            sizes[expert(layer, index)] = OperatorSize(expert_bytes, expert_bytes // 6)
    return sizes


@st.composite
def allocations(draw: st.DrawFn) -> tuple[dict[int, int], int, dict[int, int]]:
    """Risk per layer, a total that the experts can take, experts per layer."""
    experts = draw(st.dictionaries(st.integers(0, 60), st.integers(0, 16), max_size=8))
    risk = draw(st.fixed_dictionaries({layer: st.integers(0, 10**6) | st.just(0) for layer in experts}))
    return risk, draw(st.integers(0, sum(experts.values()))), experts


@st.composite
def lanes(draw: st.DrawFn):
    """Sizes, tokens since copied and since sent, and budgets that hold anything from nothing to all."""
    sizes = lane(draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(0, 50)), draw(st.integers(1, 50)))
    experts = [operator for operator in sizes if operator.is_expert]
    tokens = st.dictionaries(st.sampled_from(experts), st.integers(0, 1000))
    budgets = Budgets(draw(st.integers(1, 1500)), draw(st.integers(1, 1500)), 1.0)
    return sizes, draw(tokens), draw(tokens), budgets


@st.composite
def boosts(draw: st.DrawFn):
    """Lost tokens, base capacities and routed tokens of up to three layers."""
    experts = [expert(layer, index) for layer in range(draw(st.integers(1, 3))) for index in range(4)]
    capacity = draw(st.fixed_dictionaries(dict.fromkeys(experts, st.integers(0, 200))))
    lost = draw(st.dictionaries(st.sampled_from(experts), st.integers(0, 300)))
    routed = draw(st.dictionaries(st.sampled_from(experts), st.integers(0, 400)))
    return lost, capacity, routed, draw(st.integers(1, 30))


def shuffled(random, mapping):
    return dict(random.sample(sorted(mapping.items()), len(mapping)))


def exact_shares(weights: dict[int, int], total: int, limits: dict[int, int]) -> dict[int, Fraction]:
    """min(limit, factor x weight) of each layer, with the factor at which they sum to the total."""
    found, weight_left = {}, sum(weights.values())
    for layer in sorted(weights, key=lambda layer: Fraction(limits[layer], weights[layer])):
        share = min(Fraction(limits[layer]), Fraction(weights[layer]) * total / weight_left)
        found[layer], total, weight_left = share, total - share, weight_left - weights[layer]
    return found


def test_a_budget_is_what_the_link_carries_during_an_iteration() -> None:
    assert budget_bytes(25e9, 4.36) == 109_000_000_000  # MOETION 4.2: about 109 GB
    assert budget_bytes(10, 0.29) == 2
    assert budget_bytes(100, 0.29) == 29  # as people multiply, not as binary numbers do


def test_six_of_64_experts_shrink_a_snapshot_of_587_gb_to_61_gb() -> None:
    # MOETION 7.2: 1.6 B parameters with one expert per layer, 58.7 B with 64; 10 bytes each.
    expert_parameters = (58_700_000_000 - 1_600_000_000) // 63
    layers = 24
    expert_bytes = 10 * expert_parameters // layers
    non_expert_bytes = 10 * (1_600_000_000 - expert_parameters) // layers
    sizes = lane(layers, 64, non_expert_bytes, expert_bytes)
    assert sum(size.full_bytes for size in sizes.values()) == pytest.approx(587e9, rel=0.001)
    plan = selective_plan(1, sizes, {}, {}, Budgets(61.4e9, 61.4e9, 1.0))
    assert set(plan.local.experts_per_layer.values()) == {6}
    assert plan.local.snapshot_bytes == pytest.approx(61e9, rel=0.01)


def test_non_experts_leave_less_of_the_budget_for_experts_than_the_paper_counts() -> None:
    assert total_experts(100, 40, 10, 64) == 6
    assert total_experts(100, 0, 10, 64) == 10  # S_total = B / C_expert, as published
    assert total_experts(109, 40, 10, 64) == 6


def test_a_budget_never_holds_fewer_than_no_experts_or_more_than_there_are() -> None:
    assert total_experts(30, 40, 10, 64) == 0
    assert total_experts(10_000, 40, 10, 64) == 64


def test_layers_share_in_proportion_to_their_risk() -> None:
    assert allocate({0: 100, 1: 300, 2: 200}, 6, {0: 8, 1: 8, 2: 8}) == {0: 1, 1: 3, 2: 2}


def test_what_rounding_down_leaves_goes_to_the_largest_remainders_and_the_lower_layers() -> None:
    assert allocate({0: 10, 1: 15, 2: 15}, 9, {0: 8, 1: 8, 2: 8}) == {0: 2, 1: 4, 2: 3}  # 2.25, 3.375, 3.375
    assert allocate({0: 1, 1: 1, 2: 1}, 4, {0: 8, 1: 8, 2: 8}) == {0: 2, 1: 1, 2: 1}


def test_a_layer_that_is_full_passes_its_overflow_on_in_proportion() -> None:
    assert allocate({0: 1000, 1: 20, 2: 10}, 7, {0: 4, 1: 4, 2: 4}) == {0: 4, 1: 2, 2: 1}


def test_a_layer_without_risk_gets_experts_only_when_all_at_risk_are_saved() -> None:
    assert allocate({0: 5, 1: 0}, 4, {0: 4, 1: 4}) == {0: 4, 1: 0}
    assert allocate({0: 5}, 6, {0: 4, 1: 4}) == {0: 4, 1: 2}


def test_without_any_risk_layers_share_evenly() -> None:
    assert allocate({}, 6, {0: 8, 1: 8, 2: 8}) == {0: 2, 1: 2, 2: 2}
    assert allocate({0: 0, 1: 0}, 5, {0: 1, 1: 8}) == {0: 1, 1: 4}
    assert allocate({}, 0, {}) == {}


@settings(max_examples=examples(200))
@given(allocations())
def test_the_shares_of_layers_sum_to_the_total_and_none_exceeds_its_experts(case) -> None:
    risk, total, experts = case
    shares = allocate(risk, total, experts)
    assert shares.keys() == experts.keys()
    assert sum(shares.values()) == total
    assert all(0 <= share <= experts[layer] for layer, share in shares.items())


@settings(max_examples=examples(200))
@given(allocations())
def test_each_layer_gets_its_exact_share_rounded_down_or_up(case) -> None:
    risk, total, experts = case
    at_risk = {layer: risk[layer] for layer in experts if risk[layer]}
    left = max(0, total - sum(experts[layer] for layer in at_risk))
    exact = exact_shares(at_risk, total - left, experts)
    exact |= exact_shares({layer: 1 for layer in experts if layer not in at_risk}, left, experts)
    for layer, share in allocate(risk, total, experts).items():
        assert math.floor(exact[layer]) <= share <= math.ceil(exact[layer])


@settings(max_examples=examples(150))
@given(allocations(), st.randoms(use_true_random=False))
def test_the_order_in_which_layers_are_given_does_not_matter(case, random) -> None:
    risk, total, experts = case
    again = allocate(shuffled(random, risk), total, shuffled(random, experts))
    assert list(again.items()) == list(allocate(risk, total, experts).items())


def test_the_experts_with_most_unsaved_tokens_are_chosen_and_ties_go_to_the_lower_id() -> None:
    tokens = {expert(0, 0): 5, expert(0, 1): 9, expert(0, 2): 5, expert(1, 0): 0, expert(1, 1): 7}
    assert select(tokens, {0: 2, 1: 1}) == (expert(0, 0), expert(0, 1), expert(1, 1))
    assert select(tokens, {0: 0}) == ()


@settings(max_examples=examples(150))
@given(lanes())
def test_no_expert_that_is_left_out_has_more_unsaved_tokens_than_one_of_its_layer_that_is_chosen(case) -> None:
    sizes, unsaved, _, budgets = case
    plan = selective_plan(7, sizes, unsaved, {}, budgets).local.plan
    for operator in sizes:
        for rival in sizes:
            if operator.is_expert and rival.is_expert and operator.layer == rival.layer:
                ranks = [(-unsaved.get(op, 0), op.expert) for op in (operator, rival)]
                assert not (operator in plan.parts and rival not in plan.parts and ranks[1] < ranks[0])


@settings(max_examples=examples(150))
@given(lanes())
def test_a_plan_keeps_its_budgets_or_says_by_how_much_it_cannot(case) -> None:
    sizes, unsaved_local, unsaved_remote, budgets = case
    plan = selective_plan(7, sizes, unsaved_local, unsaved_remote, budgets)
    non_expert_bytes = sum(size.full_bytes for operator, size in sizes.items() if not operator.is_expert)
    for selection, budget, late_s in (
        (plan.local, budgets.local_bytes, plan.stall_s),
        (plan.remote, budgets.remote_bytes, plan.lag_s),
    ):
        assert selection.snapshot_bytes == sum(sizes[operator].full_bytes for operator in selection.plan.parts)
        assert selection.excess_bytes == max(0, non_expert_bytes - budget)
        assert late_s == pytest.approx(selection.excess_bytes / budget)
        assert selection.snapshot_bytes <= budget + selection.excess_bytes
    assert plan.fits == (plan.stall_s == plan.lag_s == 0)


@settings(max_examples=examples(150))
@given(lanes())
def test_a_plan_leaves_no_room_for_another_expert_of_its_candidates(case) -> None:
    sizes, unsaved_local, unsaved_remote, budgets = case
    plan = selective_plan(7, sizes, unsaved_local, unsaved_remote, budgets)
    experts = {operator for operator in sizes if operator.is_expert}
    copied, sent = experts & plan.local.plan.anchored, experts & plan.remote.plan.anchored
    expert_bytes = sizes[min(experts)].full_bytes
    assert copied == experts or plan.local.snapshot_bytes + expert_bytes > budgets.local_bytes
    assert sent == copied or plan.remote.snapshot_bytes + expert_bytes > budgets.remote_bytes


@settings(max_examples=examples(150))
@given(lanes())
def test_non_experts_are_always_copied_and_sent_in_full_and_nothing_is_sent_that_was_not_copied(case) -> None:
    sizes, unsaved_local, unsaved_remote, budgets = case
    plan = selective_plan(7, sizes, unsaved_local, unsaved_remote, budgets)
    local, remote = plan.local.plan, plan.remote.plan
    assert local.iteration == remote.iteration == 7
    assert set(local.parts.values()) | set(remote.parts.values()) <= {Part.MASTER_AND_MOMENTS}
    assert {operator for operator in sizes if not operator.is_expert} <= remote.parts.keys() <= local.parts.keys()
    for selection in (plan.local, plan.remote):
        for layer, count in selection.experts_per_layer.items():
            assert count == sum(operator.layer == layer for operator in selection.plan.parts if operator.is_expert)


@settings(max_examples=examples(100))
@given(lanes(), st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_its_inputs(case, random) -> None:
    sizes, unsaved_local, unsaved_remote, budgets = case
    plan = selective_plan(7, sizes, unsaved_local, unsaved_remote, budgets)
    again = selective_plan(
        7,
        dict(random.sample(list(sizes.items()), len(sizes))),
        shuffled(random, unsaved_local),
        shuffled(random, unsaved_remote),
        budgets,
    )
    assert plan == again
    assert list(plan.remote.plan.parts) == list(again.remote.plan.parts)


def test_what_is_sent_is_ranked_by_the_tokens_since_it_was_last_sent() -> None:
    sizes = lane(1, 4, 10, 10)
    copied_last = {expert(0, 0): 9, expert(0, 1): 8, expert(0, 2): 1, expert(0, 3): 0}
    sent_last = {expert(0, 0): 1, expert(0, 1): 2, expert(0, 3): 99}
    plan = selective_plan(1, sizes, copied_last, sent_last, Budgets(30, 20, 1.0))
    assert plan.local.plan.parts.keys() == {NON_EXPERT, expert(0, 0), expert(0, 1)}
    assert plan.remote.plan.parts.keys() == {NON_EXPERT, expert(0, 1)}


def test_every_expert_is_saved_sooner_or_later_while_it_gets_tokens() -> None:
    sizes = lane(2, 8, 10, 10)
    arriving = {operator: 1 + operator.expert for operator in sizes if operator.is_expert}
    unsaved = dict.fromkeys(arriving, 0)
    never = set(arriving)
    for iteration in range(40):
        unsaved = {operator: unsaved[operator] + tokens for operator, tokens in arriving.items()}
        chosen = selective_plan(iteration, sizes, unsaved, {}, Budgets(40, 20, 1.0)).local.plan.parts.keys()
        unsaved |= {operator: 0 for operator in chosen if operator.is_expert}
        never -= chosen
    assert not never


def test_non_experts_above_the_budget_stall_by_a_known_time_and_no_expert_is_added() -> None:
    plan = selective_plan(3, lane(2, 4, 60, 10), {}, {}, Budgets(50, 20, 2.0))
    assert plan.local.experts_per_layer == plan.remote.experts_per_layer | {0: 0, 1: 0} == {0: 0, 1: 0}
    assert (plan.local.excess_bytes, plan.stall_s) == (20, 0.4)
    assert (plan.remote.excess_bytes, plan.lag_s) == (80, 4.0)
    assert not plan.fits


def test_a_lane_without_experts_saves_its_non_experts() -> None:
    plan = selective_plan(3, {NON_EXPERT: OperatorSize(60, 10)}, {}, {}, Budgets(100, 100, 1.0))
    assert plan.local.plan == plan.remote.plan
    assert (plan.local.snapshot_bytes, plan.fits) == (60, True)


def test_unequal_experts_are_counted_as_the_largest_so_that_the_budget_holds() -> None:
    sizes = {expert(0, 0): OperatorSize(10, 1), expert(0, 1): OperatorSize(30, 3), expert(0, 2): OperatorSize(30, 3)}
    plan = selective_plan(3, sizes, {expert(0, 1): 1, expert(0, 2): 1}, {}, Budgets(65, 65, 1.0))
    assert plan.local.plan.parts.keys() == {expert(0, 1), expert(0, 2)}
    assert plan.fits


def test_tokens_of_other_ranks_experts_change_nothing() -> None:
    sizes, budgets = lane(1, 4, 10, 10), Budgets(30, 30, 1.0)
    own = {expert(0, 3): 5}
    assert selective_plan(1, sizes, own | {expert(0, 77): 900}, own, budgets) == selective_plan(
        1, sizes, own, own, budgets
    )


def test_a_recovering_expert_gets_a_tenth_more_from_what_another_leaves_unused() -> None:
    capacity = {expert(0, index): 100 for index in range(3)}
    routed = {expert(0, 0): 150, expert(0, 1): 40, expert(0, 2): 100}
    boost = capacity_boost({expert(0, 0): 25}, capacity, routed)
    assert boost.capacity == {expert(0, 0): 110, expert(0, 1): 90, expert(0, 2): 100}
    assert boost.debt == {expert(0, 0): 15}


def test_a_debt_is_paid_in_full_and_then_forgotten() -> None:
    capacity = {expert(0, 0): 100, expert(0, 1): 100}
    routed = {expert(0, 0): 200, expert(0, 1): 0}
    debt, given_tokens = {expert(0, 0): 25}, []
    while debt:
        boost = capacity_boost(debt, capacity, routed)
        debt = boost.debt
        given_tokens.append(boost.capacity[expert(0, 0)] - 100)
    assert given_tokens == [10, 10, 5]


def test_recovering_experts_share_what_is_unused_and_busy_layers_lend_nothing() -> None:
    capacity = {expert(layer, index): 100 for layer in range(2) for index in range(3)}
    routed = {expert(0, 0): 200, expert(0, 1): 200, expert(0, 2): 91, expert(1, 0): 200, expert(1, 1): 100}
    routed |= {expert(1, 2): 100}
    lost = {expert(0, 0): 50, expert(0, 1): 5, expert(1, 0): 50}
    boost = capacity_boost(lost, capacity, routed)
    assert boost.capacity == capacity | {expert(0, 0): 106, expert(0, 1): 103, expert(0, 2): 91}
    assert boost.debt == {expert(0, 0): 44, expert(0, 1): 2, expert(1, 0): 50}


def test_an_expert_with_room_to_spare_keeps_its_debt_and_lends() -> None:
    capacity = {expert(0, 0): 100, expert(0, 1): 100}
    boost = capacity_boost({expert(0, 0): 30}, capacity, {expert(0, 0): 60, expert(0, 1): 100})
    assert (boost.capacity, boost.debt) == (capacity, {expert(0, 0): 30})


def test_a_small_capacity_is_boosted_by_at_least_one_token() -> None:
    capacity = {expert(0, 0): 4, expert(0, 1): 4}
    assert capacity_boost({expert(0, 0): 3}, capacity, {expert(0, 0): 9}).capacity[expert(0, 0)] == 5


@settings(max_examples=examples(200))
@given(boosts())
def test_capacity_is_conserved_in_each_layer_and_taken_only_from_what_is_unused(case) -> None:
    lost, capacity, routed, percent = case
    boosted = capacity_boost(lost, capacity, routed, percent).capacity
    for layer in {operator.layer for operator in capacity}:
        there = [operator for operator in capacity if operator.layer == layer]
        assert sum(boosted[operator] for operator in there) == sum(capacity[operator] for operator in there)
    for operator, base in capacity.items():
        assert boosted[operator] >= min(base, routed.get(operator, 0))
        assert boosted[operator] <= base + math.ceil(Fraction(base * percent, 100))


@settings(max_examples=examples(200))
@given(boosts())
def test_a_debt_shrinks_by_exactly_the_tokens_processed_beyond_the_base_capacity(case) -> None:
    lost, capacity, routed, percent = case
    boost = capacity_boost(lost, capacity, routed, percent)
    for operator, base in capacity.items():
        beyond = max(0, min(routed.get(operator, 0), boost.capacity[operator]) - base)
        assert boost.debt.get(operator, 0) == lost.get(operator, 0) - beyond >= 0


@settings(max_examples=examples(200))
@given(boosts())
def test_no_unused_token_is_kept_from_an_expert_that_could_use_it(case) -> None:
    lost, capacity, routed, percent = case
    boost = capacity_boost(lost, capacity, routed, percent)
    for layer in {operator.layer for operator in capacity}:
        there = [operator for operator in capacity if operator.layer == layer]
        unused = sum(max(0, boost.capacity[operator] - routed.get(operator, 0)) for operator in there)
        wanting = [
            operator
            for operator in there
            if boost.debt.get(operator, 0)
            and routed.get(operator, 0) > boost.capacity[operator]
            and boost.capacity[operator] < capacity[operator] + math.ceil(Fraction(capacity[operator] * percent, 100))
        ]
        assert not (unused and wanting)


@settings(max_examples=examples(100))
@given(boosts(), st.randoms(use_true_random=False))
def test_a_boost_does_not_depend_on_the_order_of_its_inputs(case, random) -> None:
    lost, capacity, routed, percent = case
    again = capacity_boost(shuffled(random, lost), shuffled(random, capacity), shuffled(random, routed), percent)
    assert again == capacity_boost(lost, capacity, routed, percent)


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF])
def test_absent_negative_or_infinite_bandwidths_are_refused_by_name(bad: float) -> None:
    with pytest.raises(UsageError, match=rf"^bandwidth_bytes_per_s is {bad}, but must be a finite number greater than"):
        budget_bytes(bad, 1.0)
    with pytest.raises(UsageError, match=rf"^iteration_time_s is {bad}, "):
        budget_bytes(1.0, bad)
    for name in ("local_bytes_per_s", "remote_bytes_per_s", "iteration_time_s"):
        values = {"local_bytes_per_s": 1.0, "remote_bytes_per_s": 1.0, "iteration_time_s": 1.0} | {name: bad}
        with pytest.raises(UsageError, match=rf"^{name} is {bad}, "):
            Budgets(**values)


@pytest.mark.parametrize("field", ["available_bytes", "non_expert_bytes", "expert_bytes", "experts"])
@pytest.mark.parametrize("bad", [-1, 1.5, NAN])
def test_a_number_of_experts_from_impossible_bytes_is_refused(field: str, bad: int) -> None:
    values = {"available_bytes": 10, "non_expert_bytes": 1, "expert_bytes": 1, "experts": 1} | {field: bad}
    with pytest.raises(UsageError, match=rf"^{field} is {bad}, but must be a whole number of at least [01]$"):
        total_experts(**values)


def test_an_expert_of_no_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^expert_bytes is 0, but must be a whole number of at least 1$"):
        total_experts(10, 1, 0, 1)


def test_impossible_shares_are_refused_with_the_range_that_works() -> None:
    with pytest.raises(UsageError, match=r"^total is 9, but must be from 0 to the 8 experts there are$"):
        allocate({0: 1}, 9, {0: 4, 1: 4})
    with pytest.raises(UsageError, match=r"^total is -1, "):
        allocate({0: 1}, -1, {0: 4})
    with pytest.raises(UsageError, match=r"^risk_per_layer of layer 0 is -5, "):
        allocate({0: -5}, 1, {0: 4})
    with pytest.raises(UsageError, match=r"^risk_per_layer of layer 0 is nan, "):
        allocate({0: NAN}, 1, {0: 4})
    with pytest.raises(UsageError, match=r"^experts_per_layer of layer 0 is -4, "):
        allocate({}, 0, {0: -4})
    with pytest.raises(UsageError, match=r"^risk_per_layer names layer 3, which has no experts: \[0\]$"):
        allocate({3: 5}, 1, {0: 4})


def test_impossible_choices_are_refused_with_the_range_that_works() -> None:
    with pytest.raises(UsageError, match=r"^allocation of layer 0 is 3, but must be from 0 to its 2 experts$"):
        select({expert(0, 0): 1, expert(0, 1): 1}, {0: 3})
    with pytest.raises(UsageError, match=r"^allocation of layer 4 is 1, but must be from 0 to its 0 experts$"):
        select({expert(0, 0): 1}, {4: 1})
    with pytest.raises(UsageError, match=r"^allocation of layer 0 is -1, "):
        select({expert(0, 0): 1}, {0: -1})
    with pytest.raises(
        UsageError, match=r"^tokens of layer0\.expert0 is -1, but must be a whole number of at least 0$"
    ):
        select({expert(0, 0): -1}, {0: 1})
    with pytest.raises(UsageError, match=r"^layer0\.router is no routed expert"):
        select({ROUTER: 1}, {})


def test_impossible_boosts_are_refused_by_name() -> None:
    one, two = expert(0, 0), expert(0, 1)
    with pytest.raises(UsageError, match=r"^lost_tokens names layer0\.expert1, which has no base capacity"):
        capacity_boost({two: 1}, {one: 1}, {})
    with pytest.raises(UsageError, match=r"^routed_tokens of layer0\.expert0 is -1, "):
        capacity_boost({}, {one: 1}, {one: -1})
    with pytest.raises(UsageError, match=r"^capacity of layer0\.expert0 is -1, "):
        capacity_boost({}, {one: -1}, {})
    with pytest.raises(UsageError, match=r"^layer0\.router is no routed expert"):
        capacity_boost({}, {ROUTER: 1}, {})
    with pytest.raises(UsageError, match=r"^boost_percent is 0, but must be a whole number of at least 1$"):
        capacity_boost({}, {}, {}, 0)
