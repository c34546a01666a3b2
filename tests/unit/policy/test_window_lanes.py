"""One window for ranks that own different operators."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from window_cases import byte_aware_schedule

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.packing import Items, partition
from megatron.core.dist_checkpointing.moe.policy.window import (
    Lane,
    Schedule,
    hard_count,
    joint_schedules,
    merge,
)
from megatron.core.dist_checkpointing.moe.types import (
    FP16_FP32,
    OperatorId,
    OperatorKind,
    OperatorSize,
    Topology,
    expert,
)
from moe_ckpt.simulator.models import PRESETS
from moe_ckpt.simulator.shards import owned_operators, shard_sizes

Lanes = dict[Lane, tuple[OperatorId, ...]]
Job = tuple[Lanes, dict[OperatorId, OperatorSize]]


def job_of(name: str, seed: int = 0, **degrees: int) -> Job:
    """A model's lanes, each ordered by popularity with random counts, and bytes per rank."""
    shape, topology, source = PRESETS[name], Topology(**degrees), random.Random(seed)
    counts = {operator: source.randrange(10_000) for operator in shape.operators}
    owned = owned_operators(shape, topology)
    lanes = {lane: hard_count(operators, counts) for lane, operators in owned.items()}
    return lanes, shard_sizes(shape, topology, FP16_FP32)


def budget_for(job: Job, window: int) -> int:
    """Bytes with which the largest lane needs a window of about this size."""
    lanes, sizes = job
    totals = [sum(sizes[operator].full_bytes for operator in operators) for operators in lanes.values()]
    return int(max(totals) / 6 / (1 - (5 / 6) ** window) * 1.06)


def steps_of(schedule: Schedule) -> dict[OperatorId, int]:
    return {operator: step for step, group in enumerate(schedule.window.groups) for operator in group}


DEGREES = {
    "GPT-350M-16E": {"world_size": 64, "ep": 16, "pp": 2},
    "Mixtral-8x7B": {"world_size": 32, "ep": 4, "pp": 2},
    "QWen-MoE": {"world_size": 96, "pp": 6, "ep": 4},
    "DeepSeek-MoE": {"world_size": 96, "pp": 12, "ep": 8},
}


@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("name", DEGREES)
def test_all_lanes_have_one_window_and_anchor_what_they_share_together(name: str, window: int) -> None:
    job = lanes, sizes = job_of(name, **DEGREES[name])
    budget = budget_for(job, window)
    schedules = joint_schedules(lanes, sizes, budget, first_iteration=40)
    whole = merge(schedules)
    assert whole.first_iteration == 40
    assert sorted(operator for group in whole.groups for operator in group) == sorted(PRESETS[name].operators)
    step_of = {operator: step for step, group in enumerate(whole.groups) for operator in group}
    for lane, schedule in schedules.items():
        assert steps_of(schedule) == {operator: step_of[operator] for operator in lanes[lane]}
        for step, load in enumerate(schedule.load_bytes):
            anchored = sum(sizes[operator].full_bytes for operator in lanes[lane] if step_of[operator] == step)
            assert load == anchored + sum(sizes[op].weights_bytes for op in lanes[lane] if step_of[op] > step)


@pytest.mark.parametrize("window", [2, 4, 8])
@pytest.mark.parametrize("name", DEGREES)
def test_the_window_is_the_largest_that_any_lane_needs_and_all_fit_that_can(name: str, window: int) -> None:
    job = lanes, sizes = job_of(name, **DEGREES[name])
    budget = budget_for(job, window)
    alone = {lane: byte_aware_schedule(operators, sizes, budget) for lane, operators in lanes.items()}
    schedules = joint_schedules(lanes, sizes, budget)
    assert {schedule.window.size for schedule in schedules.values()} == {max(s.window.size for s in alone.values())}
    assert [lane for lane in lanes if schedules[lane].fits] == [lane for lane in lanes if alone[lane].fits]
    assert all(group for schedule in schedules.values() for group in schedule.window.groups)


@pytest.mark.parametrize("name", DEGREES)
def test_sharing_operators_costs_a_lane_hardly_any_evenness(name: str) -> None:
    job = lanes, sizes = job_of(name, **DEGREES[name])
    schedules = joint_schedules(lanes, sizes, budget_for(job, 4))
    for lane, schedule in schedules.items():
        alone = byte_aware_schedule(lanes[lane], sizes, schedule.budget_bytes, window=schedule.window.size)
        assert schedule.peak_bytes <= 1.05 * alone.peak_bytes


def test_the_lane_with_the_most_bytes_anchors_shared_operators_as_it_would_alone() -> None:
    shared = tuple(OperatorId(layer, OperatorKind.NON_EXPERT) for layer in range(4))
    lanes = {(0, 0): (expert(0, 0), *shared), (0, 1): (*(expert(1, index) for index in range(12)), *shared)}
    sizes = {operator: OperatorSize(60, 10) for operators in lanes.values() for operator in operators}
    sizes |= dict.fromkeys(shared, OperatorSize(42, 7))
    schedules = joint_schedules(lanes, sizes, 300)
    assert schedules[0, 1] == byte_aware_schedule(lanes[0, 1], sizes, 300)


def test_lanes_of_equal_sizes_may_share_an_operator_that_has_another_place_in_each_order() -> None:
    shared = OperatorId(0, OperatorKind.ROUTER)
    lanes = {(0, 0): (shared, expert(0, 0), expert(0, 1)), (0, 1): (expert(0, 2), expert(0, 3), shared)}
    sizes = dict.fromkeys(set().union(*lanes.values()), OperatorSize(12, 2))
    schedules = joint_schedules(lanes, sizes, 100, window=3)
    assert [steps_of(schedule)[shared] for schedule in schedules.values()] == [0, 0]


def test_each_lane_defers_its_own_popular_experts() -> None:
    job = lanes, sizes = job_of("DeepSeek-MoE", **DEGREES["DeepSeek-MoE"])
    schedules = joint_schedules(lanes, sizes, budget_for(job, 4))
    for lane, operators in lanes.items():
        steps = [steps_of(schedules[lane])[operator] for operator in operators if operator.is_expert]
        assert steps == sorted(steps)
        assert steps[0] < steps[-1]


def test_the_order_in_which_lanes_and_sizes_are_given_changes_nothing() -> None:
    job = lanes, sizes = job_of("Mixtral-8x7B", **DEGREES["Mixtral-8x7B"])
    budget = budget_for(job, 4)
    shuffled = (
        random.Random(1).sample(list(lanes.items()), len(lanes)),
        random.Random(2).sample(list(sizes.items()), len(sizes)),
    )
    first, second = joint_schedules(lanes, sizes, budget), joint_schedules(dict(shuffled[0]), dict(shuffled[1]), budget)
    assert list(first.items()) == list(second.items())
    assert list(first) == sorted(lanes)
    assert merge(first).digest() == merge(dict(reversed(second.items()))).digest()


def test_a_forced_window_holds_for_every_lane() -> None:
    job = lanes, sizes = job_of("GPT-350M-16E", **DEGREES["GPT-350M-16E"])
    schedules = joint_schedules(lanes, sizes, budget_for(job, 2), window=9)
    assert {schedule.window.size for schedule in schedules.values()} == {9}


def test_a_lane_with_fewer_operators_than_iterations_has_empty_steps_but_the_job_has_none() -> None:
    router = OperatorId(0, OperatorKind.ROUTER)
    large = tuple(expert(1, index) for index in range(30))
    lanes = {(0, 0): (expert(0, 0), router), (1, 0): large}
    sizes = dict.fromkeys((*large, expert(0, 0), router), OperatorSize(12, 2))
    schedules = joint_schedules(lanes, sizes, 90)
    assert schedules[0, 0].window.size == schedules[1, 0].window.size > 2
    assert all(merge(schedules).groups)


def test_the_window_grows_where_shared_operators_keep_a_lane_from_fitting() -> None:
    source, grown = random.Random(5), 0
    for _ in range(200):
        shared = tuple(OperatorId(layer, OperatorKind.NON_EXPERT) for layer in range(3))
        own = {(0, ep): tuple(expert(ep, index) for index in range(source.randint(1, 6))) for ep in range(3)}
        lanes = {lane: (*experts, *shared) for lane, experts in own.items()}
        sizes = {op: OperatorSize(6 * w, w) for ops in lanes.values() for op in ops for w in [source.randint(1, 40)]}
        budget = budget_for((lanes, sizes), source.randint(2, 4))
        alone = {lane: byte_aware_schedule(operators, sizes, budget) for lane, operators in lanes.items()}
        schedules = joint_schedules(lanes, sizes, budget)
        needed = max(schedule.window.size for schedule in alone.values())
        size = schedules[0, 0].window.size
        if size > needed:
            grown += 1
            assert all(schedules[lane].fits for lane in lanes if alone[lane].fits)
    assert grown, "the case occurs"


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_lanes_of_any_shape_agree_and_cover_everything(data: st.DataObject) -> None:
    size = st.integers(0, 2).flatmap(lambda digits: st.integers(1, 10**digits)).map(lambda w: OperatorSize(6 * w, w))
    pool = [expert(0, index) for index in range(12)]
    members = st.lists(st.sampled_from(pool), min_size=1, max_size=12, unique=True)
    lanes = {(0, ep): tuple(data.draw(members)) for ep in range(data.draw(st.integers(1, 4)))}
    sizes = {operator: data.draw(size) for operator in pool}
    schedules = joint_schedules(lanes, sizes, data.draw(st.integers(1, 2000)))
    assert {lane: sorted(steps_of(schedule)) for lane, schedule in schedules.items()} == {
        lane: sorted(operators) for lane, operators in lanes.items()
    }
    merged = [operator for group in merge(schedules).groups for operator in group]
    assert sorted(merged) == sorted(set().union(*lanes.values()))


def test_a_thousand_lanes_are_scheduled_without_delay() -> None:
    job = lanes, sizes = job_of("DeepSeek-V3-671B", world_size=2048, pp=16, ep=64)
    assert len(lanes) == 1024
    started = time.process_time()
    merge(joint_schedules(lanes, sizes, budget_for(job, 4)))
    assert time.process_time() - started < 5, "a guard against quadratic loops"


def cut(stages: int, groups: int, ranks: int) -> dict[tuple[int, ...], dict[OperatorId, OperatorSize]]:
    """Each rank has a part of some experts of its group, and of one of the layers of its stage, cut elsewhere."""
    source, lanes = random.Random(7), {}
    for stage, group, rank in product(range(stages), range(groups), range(ranks)):
        experts = [expert(2 * stage + at % 2, 4 * group + at // 2) for at in range(8)]
        layer = OperatorId(2 * stage + rank % 2, OperatorKind.NON_EXPERT)
        weights = {one: source.randint(50, 100) for one in (*source.sample(experts, 6), layer)}
        lanes[stage, group, rank] = {one: OperatorSize(6 * count, count) for one, count in weights.items()}
    return lanes


def test_most_ranks_that_own_parts_of_the_same_operators_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, packed = cut(stages=4, groups=4, ranks=8), list[int]()

    def counted(load: Items, *rest: Any) -> Any:
        packed.append(len(load))
        return partition(load, *rest)

    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.policy.window.partition", counted)
    lanes = {lane: tuple(own) for lane, own in sizes.items()}
    schedules = joint_schedules(lanes, sizes, 1400)
    # Each lane once alone, and again for each size that is tried, would be 640.
    assert len(lanes) == 128 > len(packed), len(packed)
    needed = max(byte_aware_schedule(lanes[lane], sizes[lane], 1400).window.size for lane in lanes)
    assert needed < schedules[0, 0, 0].window.size, "some sizes were tried"
    assert all(schedule.fits for schedule in schedules.values())


def test_no_lanes_an_empty_lane_and_a_budget_below_one_are_refused() -> None:
    with pytest.raises(UsageError, match="lanes names none"):
        joint_schedules({}, {}, 1)
    with pytest.raises(UsageError, match="ordered names no operators"):
        joint_schedules({(0, 0): ()}, {}, 1)
    with pytest.raises(UsageError, match="budget_bytes is -1"):
        joint_schedules({(0, 0): (expert(0, 0),)}, {expert(0, 0): OperatorSize(12, 2)}, -1)


def test_schedules_that_were_not_made_together_are_not_merged() -> None:
    operators = (expert(0, 0), expert(0, 1))
    sizes = dict.fromkeys(operators, OperatorSize(12, 2))
    one = byte_aware_schedule(operators, sizes, 14)
    other = byte_aware_schedule(operators[::-1], sizes, 14)
    with pytest.raises(UsageError, match=r"layer0\.expert1 is anchored in steps 1 and 0: schedule jointly"):
        merge({(0, 0): one, (0, 1): other})
    with pytest.raises(UsageError, match="must have one in common"):
        merge({(0, 0): one, (0, 1): byte_aware_schedule(operators, sizes, 24)})
    with pytest.raises(UsageError, match="must have one in common"):
        merge({})
