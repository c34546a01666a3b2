"""Snapshot plans and windows: what they cover, and digests that tell any difference."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.types import (
    OperatorId,
    OperatorKind,
    Part,
    SnapshotPlan,
    Window,
    expert,
    full_plan,
)
from moe_ckpt.simulator.models import PRESETS

OPERATORS = PRESETS["GPT-125M-8E"].operators
HOLDING_MASTERS = (Part.MASTER, Part.MASTER_AND_MOMENTS, Part.EVERYTHING, Part.MASTER | Part.COMPUTE)
plans = st.builds(
    SnapshotPlan,
    st.integers(0, 1000),
    st.dictionaries(
        st.sampled_from(OPERATORS), st.sampled_from([*Part, Part.MASTER_AND_MOMENTS, Part.EVERYTHING]), max_size=8
    ),
)


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """All operators, in any order, in groups of which none is empty."""
    order = draw(st.permutations(OPERATORS))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=6)))
    groups = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True))
    return Window(draw(st.integers(0, 100)), groups)


# Windows


@settings(max_examples=examples(100), deadline=None)
@given(windows())
def test_every_operator_is_full_exactly_once_in_a_window(window: Window) -> None:
    iterations = range(window.first_iteration, window.last_iteration + 1)
    anchored = [operator for iteration in iterations for operator in window.plan(iteration).anchored]
    assert len(iterations) == window.size
    assert sorted(anchored) == list(OPERATORS)


@settings(max_examples=examples(100), deadline=None)
@given(windows())
def test_each_snapshot_has_the_weights_of_exactly_those_that_are_not_anchored_yet(window: Window) -> None:
    pending = set(OPERATORS)
    for iteration in range(window.first_iteration, window.last_iteration + 1):
        plan = window.plan(iteration)
        pending -= plan.anchored
        assert {operator for operator, part in plan.parts.items() if part is Part.COMPUTE} == pending
        assert plan.parts.keys() == plan.anchored | pending
    assert not pending


def test_the_window_of_moevement_figure_8() -> None:
    experts = [expert(0, index) for index in range(4)]
    gate, rest = OperatorId(0, OperatorKind.ROUTER), OperatorId(0, OperatorKind.NON_EXPERT)
    window = Window(10, (tuple(experts[:2]), tuple(experts[2:]), (gate, rest)))
    assert window.plan(10).giving(Part.COMPUTE) == {*experts, gate, rest}
    assert window.plan(11) == SnapshotPlan(
        11,
        {
            experts[2]: Part.MASTER_AND_MOMENTS,
            experts[3]: Part.MASTER_AND_MOMENTS,
            gate: Part.COMPUTE,
            rest: Part.COMPUTE,
        },
    )
    assert window.plan(12) == full_plan(12, [gate, rest])


@pytest.mark.parametrize("iteration", [9, 12])
def test_an_iteration_outside_of_the_window_has_no_plan(iteration: int) -> None:
    with pytest.raises(IndexError, match=rf"iteration {iteration} is not in the window 10\.\.11"):
        Window(10, (OPERATORS[:3], OPERATORS[3:])).plan(iteration)


@given(windows(), st.integers(0, 100))
@settings(max_examples=examples(50), deadline=None)
def test_a_window_begun_later_plans_the_same_later(window: Window, first: int) -> None:
    moved = Window(first, window.groups)
    for step in range(window.size):
        assert moved.plan(first + step).parts == window.plan(window.first_iteration + step).parts


@settings(max_examples=examples(100), deadline=None)
@given(windows(), st.data())
def test_the_digest_of_a_window_tells_any_difference(window: Window, data: st.DataObject) -> None:
    groups = [list(group) for group in window.groups]
    kind = data.draw(st.sampled_from(["first", "move", "swap", "drop"]))
    other = window
    if kind == "first":
        other = Window(window.first_iteration + 1, window.groups)
    elif kind == "drop":
        groups[-1].pop()
    elif kind == "move":
        groups.append([groups[0].pop()])
    else:
        groups[0][0], groups[-1][-1] = groups[-1][-1], groups[0][0]
    other = other if kind == "first" else replace(window, groups=tuple(map(tuple, groups)))
    assert other.digest() != window.digest()
    assert Window(window.first_iteration, window.groups).digest() == window.digest()


def test_the_digest_of_a_window_tells_where_a_group_ends() -> None:
    one, two, three = OPERATORS[:3]
    groupings = [((one, two, three),), ((one,), (two, three)), ((one, two), (three,)), ((one,), (two,), (three,))]
    assert len({Window(0, groups).digest() for groups in groupings}) == len(groupings)


# Plans


@settings(max_examples=examples(100), deadline=None)
@given(plans, st.randoms(use_true_random=False))
def test_the_order_of_operators_changes_neither_digest_nor_equality_nor_hash(
    plan: SnapshotPlan, shuffler: random.Random
) -> None:
    shuffled = SnapshotPlan(plan.iteration, dict(shuffler.sample(list(plan.parts.items()), len(plan.parts))))
    assert shuffled == plan
    assert hash(shuffled) == hash(plan)
    assert shuffled.digest() == plan.digest()


@settings(max_examples=examples(100), deadline=None)
@given(plans)
def test_the_digest_is_that_of_snapshots_that_are_stored_already(plan: SnapshotPlan) -> None:
    state = hashlib.blake2b(str(plan.iteration).encode(), digest_size=16)
    for one, part in sorted(plan.parts.items()):
        state.update(f";{one.layer},{one.kind.value},{one.expert},{part.value}".encode())
    assert plan.digest() == state.hexdigest()


@settings(max_examples=examples(200), deadline=None)
@given(plans, plans)
def test_digests_are_equal_exactly_when_plans_are(one: SnapshotPlan, other: SnapshotPlan) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@settings(max_examples=examples(100), deadline=None)
@given(plans.filter(lambda plan: plan.parts), st.data())
def test_the_digest_of_a_plan_tells_any_single_difference(plan: SnapshotPlan, data: st.DataObject) -> None:
    operator = data.draw(st.sampled_from(sorted(plan.parts)))
    rest = {other: part for other, part in plan.parts.items() if other != operator}
    changed = plan.parts[operator] ^ data.draw(st.sampled_from([Part.COMPUTE, Part.MASTER, Part.MOMENTS]))
    renamed = replace(operator, expert=operator.expert + 1000)
    others = [
        SnapshotPlan(plan.iteration + 1, plan.parts),
        SnapshotPlan(plan.iteration, rest),
        SnapshotPlan(plan.iteration, rest | {operator: changed}),
        SnapshotPlan(plan.iteration, rest | {renamed: plan.parts[operator]}),
    ]
    assert len({other.digest() for other in [plan, *others]}) == 5


@settings(max_examples=examples(100), deadline=None)
@given(plans)
def test_a_plan_gives_what_it_holds_and_compute_weights_as_the_cast_of_master_weights(plan: SnapshotPlan) -> None:
    for operator, part in plan.parts.items():
        assert (operator in plan.anchored) == (Part.MASTER in part and Part.MOMENTS in part)
        assert (operator in plan.giving(Part.MOMENTS)) == (Part.MOMENTS in part)
        assert (operator in plan.giving(Part.COMPUTE)) == (part in HOLDING_MASTERS or Part.COMPUTE in part)
    assert plan.giving(Part.MASTER_AND_MOMENTS) <= plan.parts.keys()


def test_a_dense_plan_has_the_same_part_of_every_operator() -> None:
    plan = full_plan(7, OPERATORS)
    assert plan.iteration == 7
    assert plan.anchored == set(OPERATORS)
    assert set(full_plan(7, OPERATORS, Part.EVERYTHING).parts.values()) == {Part.EVERYTHING}
