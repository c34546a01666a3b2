"""Which experts a partial checkpoint holds, which of their parts, and how many fit."""

from __future__ import annotations

from collections import Counter

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.partial import (
    BOTH,
    OPTIMIZER,
    PEC_SCOPES,
    WEIGHTS,
    PecScope,
    load_aware_selection,
    next_position,
    pec_plan,
    persist_selection,
    sequential_selection,
)
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    LOW_PRECISIONS,
    OperatorId,
    OperatorKind,
    Part,
    expert,
)
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.paper_sizes import TABLE_3_SCOPES, checkpoint_bytes

GPT_350M = PRESETS["GPT-350M-16E"]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """MoE layers, experts per layer, and an expert-parallel degree that divides them."""
    ep = draw(st.integers(1, 8))
    layers = draw(st.integers(1, 20))
    stride = draw(st.integers(1, 3))
    return tuple(range(1, 1 + stride * layers, stride)), ep * draw(st.integers(1, 4)), ep


def per_rank(selected: tuple[OperatorId, ...], num_experts: int, ep: int) -> list[int]:
    counts = Counter(operator.expert // (num_experts // ep) for operator in selected)
    return [counts[rank] for rank in range(ep)]


def per_layer(selected: tuple[OperatorId, ...]) -> Counter[int]:
    return Counter(operator.layer for operator in set(selected))


def test_both_checkpoints_of_the_published_figure_select_its_experts() -> None:
    first = sequential_selection((1, 3, 5, 7), 3, 1, 0, ep=3)
    second = sequential_selection((1, 3, 5, 7), 3, 1, next_position(0, 1, 3), ep=3)
    assert first == (expert(1, 0), expert(3, 1), expert(5, 2), expert(7, 0))
    assert second == (expert(1, 1), expert(3, 2), expert(5, 0), expert(7, 1))


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.data())
def test_sequential_selection_burdens_all_ranks_alike(layout: tuple[tuple[int, ...], int, int], data: st.DataObject):
    layers, num_experts, ep = layout
    k, position = data.draw(st.integers(1, num_experts)), data.draw(st.integers(0, 3 * num_experts))
    selected = sequential_selection(layers, num_experts, k, position, ep=ep)
    assert per_layer(selected) == dict.fromkeys(layers, k)
    counts = per_rank(selected, num_experts, ep)
    assert max(counts) - min(counts) <= 1


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.data())
def test_sequential_selection_covers_all_experts_in_the_least_number_of_checkpoints(
    layout: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    k, position = data.draw(st.integers(1, num_experts)), data.draw(st.integers(0, 3 * num_experts))
    saved: set[OperatorId] = set()
    for _ in range(-(-num_experts // k)):
        saved.update(sequential_selection(layers, num_experts, k, position, ep=ep))
        position = next_position(position, k, num_experts)
    assert saved == {expert(layer, index) for layer in layers for index in range(num_experts)}


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.data())
def test_sequential_selection_covers_all_experts_while_k_changes(
    layout: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    position, saved, total = data.draw(st.integers(0, num_experts)), Counter[OperatorId](), 0
    while total < num_experts:
        k = data.draw(st.integers(1, num_experts))
        saved.update(sequential_selection(layers, num_experts, k, position, ep=ep))
        position, total = next_position(position, k, num_experts), total + k
    assert len(saved) == len(layers) * num_experts
    assert max(saved.values()) <= -(-total // num_experts)


def test_load_aware_selection_takes_the_most_unsaved_tokens() -> None:
    selected = load_aware_selection((0, 1), [[9, 1, 5, 7], [2, 8, 8, 3]], 2, 1)
    assert selected == (expert(0, 0), expert(0, 3), expert(1, 1), expert(1, 2))


def test_equal_loads_go_by_expert() -> None:
    assert load_aware_selection((4,), [[3, 3, 3, 3]], 2, 1) == (expert(4, 0), expert(4, 1))


def test_load_aware_selection_serves_the_last_layer_first_until_a_rank_is_full() -> None:
    hot = [[9, 5, 1], [9, 5, 1], [9, 5, 1]]
    assert load_aware_selection((0, 1, 2), hot, 1, 3) == (expert(0, 2), expert(1, 1), expert(2, 0))


def test_load_aware_selection_still_saves_k_experts_when_too_few_ranks_have_capacity() -> None:
    hot = [[9, 5, 1], [9, 5, 1], [9, 5, 1]]
    selected = load_aware_selection((0, 1, 2), hot, 2, 3)
    assert selected == (expert(0, 0), expert(0, 2), expert(1, 0), expert(1, 1), expert(2, 0), expert(2, 1))
    assert per_rank(selected, 3, 3) == [3, 2, 1]


def test_missing_experts_come_from_the_rank_that_exceeds_its_capacity_least() -> None:
    # Layers 5 to 2 fill ranks 0 and 1; in layer 1 an overdue expert overfills rank 0; layer 0 lacks one expert.
    ages = [[9 if (layer, index) == (1, 0) else 0 for index in range(3)] for layer in range(6)]
    selected = load_aware_selection(range(6), [[9, 5, 1]] * 6, 2, 3, ages=ages, max_age=1)
    assert [operator.expert for operator in selected if operator.layer == 1] == [0, 2]
    assert [operator.expert for operator in selected if operator.layer == 0] == [1, 2]


@settings(max_examples=examples(200), deadline=None)
@given(layouts(), st.data())
def test_load_aware_selection_saves_k_per_layer_within_capacity_if_that_is_possible_greedily(
    layout: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    k = data.draw(st.integers(1, num_experts))
    row = st.lists(st.integers(0, 5), min_size=num_experts, max_size=num_experts)
    tokens = data.draw(st.lists(row, min_size=len(layers), max_size=len(layers)))
    selected = load_aware_selection(layers, tokens, k, ep)
    assert per_layer(selected) == dict.fromkeys(layers, k)
    capacity, size = [-(-len(layers) * k // ep)] * ep, num_experts // ep
    for layer, loads in reversed(list(zip(layers, tokens, strict=True))):
        chosen = [operator.expert for operator in selected if operator.layer == layer]
        possible = sum(min(size, max(0, free)) for free in capacity)
        taken = Counter(index // size for index in chosen)
        excess = sum(max(0, count - max(0, capacity[rank])) for rank, count in taken.items())
        assert excess == max(0, k - possible)
        for index in set(range(num_experts)) - set(chosen):
            if not excess and taken[index // size] < capacity[index // size]:
                assert loads[index] <= min(loads[other] for other in chosen)
        for rank, count in taken.items():
            capacity[rank] -= count


@settings(max_examples=examples(100), deadline=None)
@given(layouts(), st.data())
def test_no_expert_grows_older_than_its_bound_under_load_aware_selection(
    layout: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    k = data.draw(st.integers(1, num_experts))
    max_age = data.draw(st.none() | st.integers(1, 6))
    bound = (2 * -(-num_experts // k) if max_age is None else max_age) + -(-num_experts // k)
    hot = data.draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    unsaved, ages = [[0] * num_experts for _ in layers], [[0] * num_experts for _ in layers]
    for _ in range(min(3 * bound, 60)):
        ages = [[age + 1 for age in row] for row in ages]
        unsaved = [[old + new for old, new in zip(row, hot, strict=True)] for row in unsaved]
        assert max(map(max, ages)) <= bound
        for operator in load_aware_selection(layers, unsaved, k, ep, ages=ages, max_age=max_age):
            row = layers.index(operator.layer)
            unsaved[row][operator.expert] = ages[row][operator.expert] = 0


def test_an_expert_without_tokens_waits_for_ever_only_without_ages() -> None:
    def saved(with_ages: bool) -> set[int]:
        unsaved, ages, found = [0, 0, 0, 0], [0, 0, 0, 0], set()
        for _ in range(20):
            unsaved, ages = [old + new for old, new in zip(unsaved, (9, 9, 9, 0), strict=True)], [a + 1 for a in ages]
            (operator,) = load_aware_selection((0,), [unsaved], 1, 1, ages=[ages] if with_ages else None)
            found.add(operator.expert)
            unsaved[operator.expert] = ages[operator.expert] = 0
        return found

    assert saved(with_ages=False) == {0, 1, 2}
    assert saved(with_ages=True) == {0, 1, 2, 3}


@settings(max_examples=examples(100), deadline=None)
@given(layouts(), st.data())
def test_persisted_experts_rotate_over_all_experts(
    layout: tuple[tuple[int, ...], int, int], data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    layers = layers[:3]
    k_snapshot = data.draw(st.integers(1, num_experts))
    k_persist = data.draw(st.integers(1, k_snapshot))
    rotation = -(-num_experts // k_snapshot)
    rounds = -(-k_snapshot // k_persist) if num_experts % k_snapshot == 0 else -(-num_experts // k_persist)
    position = data.draw(st.integers(0, num_experts))
    start = data.draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    ages, persisted = [list(start) for _ in layers], set()
    for _ in range(rotation * rounds):
        ages = [[age + 1 for age in row] for row in ages]
        snapshot = sequential_selection(layers, num_experts, k_snapshot, position, ep=ep)
        position = next_position(position, k_snapshot, num_experts)
        chosen = persist_selection(layers, snapshot, k_persist, ages, ep)
        assert set(chosen) <= set(snapshot)
        assert per_layer(chosen) == dict.fromkeys(layers, k_persist)
        persisted.update(chosen)
        for operator in chosen:
            ages[layers.index(operator.layer)][operator.expert] = 0
    assert persisted == {expert(layer, index) for layer in layers for index in range(num_experts)}


def test_equally_old_experts_are_persisted_by_different_ranks() -> None:
    layers = tuple(range(4))
    everyone = sequential_selection(layers, 4, 4, 0, ep=4)
    assert per_rank(persist_selection(layers, everyone, 1, [[5] * 4] * 4, 4), 4, 4) == [1, 1, 1, 1]


@settings(max_examples=examples(100), deadline=None)
@given(layouts(), st.randoms(use_true_random=False), st.data())
def test_persisting_does_not_depend_on_the_order_of_the_snapshot(
    layout: tuple[tuple[int, ...], int, int], random: object, data: st.DataObject
) -> None:
    layers, num_experts, ep = layout
    k_snapshot = data.draw(st.integers(1, num_experts))
    ages = [[(layer * 7 + index * 5) % 4 for index in range(num_experts)] for layer in layers]
    snapshot = list(sequential_selection(layers, num_experts, k_snapshot, 0, ep=ep))
    shuffled = snapshot.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    k_persist = data.draw(st.integers(1, k_snapshot))
    assert persist_selection(layers, shuffled, k_persist, ages, ep) == persist_selection(
        layers, snapshot, k_persist, ages, ep
    )


@pytest.mark.parametrize(
    ("scope", "stored", "rest"),
    [
        (WEIGHTS, Part.EVERYTHING, Part.MOMENTS),
        (OPTIMIZER, Part.EVERYTHING, Part.COMPUTE | Part.MASTER),
        (BOTH, Part.EVERYTHING, None),
        (WEIGHTS, Part.MASTER_AND_MOMENTS, Part.MOMENTS),
        (OPTIMIZER, Part.MASTER_AND_MOMENTS, Part.MASTER),
        (BOTH, Part.MASTER_AND_MOMENTS, None),
        (PecScope("master", Part.MASTER), Part.MASTER_AND_MOMENTS, Part.MOMENTS),
    ],
)
def test_experts_that_are_not_selected_keep_what_the_scope_does_not_name(
    scope: PecScope, stored: Part, rest: Part | None
) -> None:
    router = OperatorId(1, OperatorKind.ROUTER)
    plan = pec_plan(7, [router, expert(1, 0), expert(1, 1)], [expert(1, 1)], scope, stored)
    assert (plan.iteration, plan.parts[router], plan.parts[expert(1, 1)]) == (7, stored, stored)
    assert plan.parts.get(expert(1, 0)) == rest


def test_a_plan_has_the_bytes_that_the_formula_gives() -> None:
    selected = sequential_selection(GPT_350M.moe_layers, 16, 3, 5, ep=8)
    for stored in (Part.MASTER_AND_MOMENTS, Part.EVERYTHING):
        for scope in PEC_SCOPES.values():
            for precision in (FP16_FP32, *LOW_PRECISIONS):
                plan = pec_plan(1, GPT_350M.operators, selected, scope, stored)
                planned_bytes = sum(
                    GPT_350M.parameters[operator] * precision.bytes_per_parameter(part)
                    for operator, part in plan.parts.items()
                )
                assert checkpoint_bytes(GPT_350M, precision, 3, scope, stored).total_bytes == planned_bytes


def test_the_checkpoint_of_gpt_350m_16e_is_composed_as_published() -> None:
    full = checkpoint_bytes(GPT_350M, FP16_FP32, 16)
    shares = [
        100 * part_bytes / full.total_bytes
        for part_bytes in (
            full.expert_weights_bytes,
            full.non_expert_weights_bytes,
            full.expert_optimizer_bytes,
            full.non_expert_optimizer_bytes,
        )
    ]
    assert shares == pytest.approx([12, 2, 74, 12], abs=1)


@pytest.mark.parametrize(
    ("scope", "published", "tolerance"),
    list(zip(TABLE_3_SCOPES, (0.88, 0.54, 0.42, 0.19), (0.01, 0.01, 0.01, 0.005), strict=True)),
    ids=[scope.name for scope in TABLE_3_SCOPES],
)
def test_one_expert_of_sixteen_shrinks_the_checkpoint_as_published(
    scope: PecScope, published: float, tolerance: float
) -> None:
    full_bytes = checkpoint_bytes(GPT_350M, FP16_FP32, 16, scope).total_bytes
    part_bytes = checkpoint_bytes(GPT_350M, FP16_FP32, 1, scope).total_bytes
    assert part_bytes / full_bytes == pytest.approx(published, abs=tolerance)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: sequential_selection((0,), 4, 5, 0), "k is 5, but must be from 1 to num_experts = 4"),
        (lambda: sequential_selection((0,), 4, 0, 0), "k is 0"),
        (lambda: sequential_selection((0,), 4, 1, -1), "position is -1"),
        (lambda: sequential_selection((0,), 4, 1, 0, ep=3), "ep is 3"),
        (lambda: sequential_selection((0,), 4, 1, 0, ep=0), "ep is 0"),
        (lambda: load_aware_selection((0,), [[1, 1]], 3, 1), "k is 3"),
        (lambda: load_aware_selection((0,), [[1, 1]], 1, 4), "ep is 4"),
        (lambda: load_aware_selection((0,), [[1, -1]], 1, 1), "unsaved_tokens has -1"),
        (lambda: load_aware_selection((0, 1), [[1, 1]], 1, 1), "unsaved_tokens must have 2 layers of 2 experts"),
        (lambda: load_aware_selection((0,), [[1, 1]], 1, 1, ages=[[1, -2]]), "ages has -2"),
        (lambda: load_aware_selection((0,), [[1, 1]], 1, 1, ages=[[1]]), "ages must have 1 layers of 2 experts"),
        (lambda: load_aware_selection((0,), [[1, 1]], 1, 1, max_age=0), "max_age is 0"),
        (lambda: load_aware_selection((), [], 1, 1), "k is 1, but must be from 1 to num_experts = 0"),
        (lambda: persist_selection((0,), [expert(0, 1)], 2, [[0, 0]]), "k_persist is 2"),
        (lambda: persist_selection((0,), [expert(0, 1)], 0, [[0, 0]]), "k_persist is 0"),
        (lambda: persist_selection((0,), [expert(0, 2)], 1, [[0, 0]]), "selected has layer0.expert2"),
        (lambda: persist_selection((0,), [expert(1, 1)], 1, [[0, 0]]), "selected has layer1.expert1"),
        (lambda: persist_selection((0,), [expert(0, 1)], 1, [[0, -1]]), "ages has -1"),
        (lambda: persist_selection((0,), [expert(0, 1)], 1, [[0, 0]], 3), "ep is 3"),
        (lambda: pec_plan(0, [expert(0, 0)], [expert(0, 1)], BOTH), "selected has layer0.expert1"),
        (lambda: checkpoint_bytes(GPT_350M, FP16_FP32, 17), "k is 17, but must be from 1 to num_experts = 16"),
        (lambda: checkpoint_bytes(GPT_350M, FP16_FP32, 0), "k is 0"),
    ],
)
def test_bad_input_is_named_with_its_range(act: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        act()  # type: ignore[operator]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
