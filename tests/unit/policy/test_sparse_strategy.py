"""`sparse`: windows that anchor everything once, on all ranks alike, within their room, whatever the news are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import (
    CONFIG,
    Rank,
    at_random,
    auto,
    bytes_per_step,
    job_of,
    operators,
    pace,
    peak,
    protected,
    shards_of,
    sizes_of,
)

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.tracking import Status
from megatron.core.dist_checkpointing.moe.strategies import Costs, Job, Throughput
from megatron.core.dist_checkpointing.moe.strategies.memory_report import memory_report
from megatron.core.dist_checkpointing.moe.strategies.sparse import Sparse
from megatron.core.dist_checkpointing.moe.strategies.sparse import windows as windows_module
from megatron.core.dist_checkpointing.moe.strategies.sparse.windows import (
    MEASURED,
    Budget,
    Popularity,
    Timetable,
    timetable,
)
from megatron.core.dist_checkpointing.moe.types import (
    Copy,
    Inventory,
    Level,
    Lost,
    OperatorId,
    OperatorSize,
    Part,
    RecoveryPlan,
    Scope,
    SnapshotPlan,
    Tier,
    Topology,
    expert,
)

EVEN = [[5, 5, 5, 5], [5, 5, 5, 5]]
SKEWED = [[1, 2, 3, 40], [40, 3, 2, 1]]
NOWHERE = RecoveryPlan(0, Scope.GLOBAL, (), ())
ANY_STATUS = st.sampled_from(sorted(Status))


def windows(rank: Rank) -> dict[range, list[SnapshotPlan]]:
    """The plans of each span that was begun."""
    found: dict[range, list[SnapshotPlan]] = {}
    for iteration, span in rank.spans.items():
        found.setdefault(span, []).append(rank.plans[iteration])
    return found


@pytest.mark.parametrize("window", ["1", "2", "3", "5"])
@pytest.mark.parametrize("experts", [4, 0])
def test_every_window_anchors_each_operator_once_and_has_the_weights_of_those_to_come(
    window: str, experts: int
) -> None:
    rank = Rank(job_of(replace(CONFIG, window=min(window, "3") if not experts else window), experts=experts))
    for _ in range(12):
        rank.step(protected)
    for span, plans in windows(rank).items():
        if len(plans) < len(span):
            continue
        anchored: set[OperatorId] = set()
        for plan in plans:
            assert not anchored & plan.anchored
            anchored |= plan.anchored
            weights = {operator for operator, part in plan.parts.items() if part is Part.COMPUTE}
            assert weights == set(rank.job.operators) - anchored
        assert anchored == set(rank.job.operators)


def test_windows_follow_one_another_without_a_gap_while_all_goes_well() -> None:
    rank = Rank(job_of())
    assert all(rank.step(protected) is not None for _ in range(30))
    assert sorted(windows(rank), key=lambda span: span[0])[:3] == [range(1, 4), range(4, 7), range(7, 10)]


@given(
    st.sampled_from(["1", "2", "3", "4"]),
    st.lists(st.lists(ANY_STATUS, min_size=12, max_size=12), min_size=1, max_size=40),
)
@settings(max_examples=examples(100), deadline=None)
def test_rooms_suffice_for_any_news_and_the_last_protected_window_is_never_freed(
    window: str, news: list[list[Status]]
) -> None:
    rank, newest = Rank(job_of(replace(CONFIG, window=window))), 0
    for row in news:
        rank.step(lambda at, row=row: row[at])  # type: ignore[misc]
        state = rank.tracker.protection
        if state.state.name == "PROTECTED":
            newest = max(newest, state.since_iteration)
        if newest:
            assert max(rank.restorable(), default=0) >= newest
        assert len(rank.tiers.memory) <= 3 * int(window)


@given(st.sampled_from(["1", "2", "3"]), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30), deadline=None)
def test_training_is_protected_again_as_soon_as_all_goes_well_again(window: str, seed: int) -> None:
    rank = Rank(job_of(replace(CONFIG, window=window)))
    bad = at_random(seed, {Status.FAILED: 2, Status.UNDER_REPLICATED: 2, Status.PENDING: 3, Status.SEALED: 3})
    for _ in range(25):
        rank.step(bad)
    for _ in range(6 * int(window) + 4):
        rank.step(protected)
    assert rank.tracker.protection.state.name == "PROTECTED"
    assert max(rank.restorable()) >= rank.iteration - 2 * int(window)


def test_replicas_of_the_only_window_stay_though_one_of_them_is_missing() -> None:
    rank = Rank(job_of())
    for status in (Status.PROTECTED, Status.PROTECTED, Status.UNDER_REPLICATED):
        rank.step(lambda _, status=status: status)  # type: ignore[misc]
    rank.step(lambda _: Status.PENDING)
    assert {1, 2} <= rank.tiers.replicas


def test_where_memory_cannot_grow_windows_continue_as_they_were() -> None:
    strategy = Sparse(job_of(replace(CONFIG, ordering="popularity")))
    strategy.plan(1)
    before = strategy.buffer_specs()
    strategy.on_token_counts(1, SKEWED)
    strategy.on_commit(strategy.plan(2), Level.SNAPSHOT, False)  # type: ignore[arg-type]
    assert strategy.order_changes == 0
    assert strategy.plan(3) is not None
    assert strategy.order_changes == 1
    assert strategy.buffer_specs() != before
    strategy.buffers_refused()
    assert strategy.buffer_specs() == before
    strategy.on_commit(SnapshotPlan(3, {}), Level.SNAPSHOT, False)
    assert strategy.plan(4) is not None
    assert strategy.buffer_specs() == before


def test_the_order_of_a_window_is_found_by_another_thread_while_the_one_before_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that trains would stand for 100 ms, and its GPU with it, at 1,000 ranks."""
    made: list[object] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(options)
        return timetable(*arguments, **options)

    monkeypatch.setattr(f"{Timetable.__module__}.timetable", noted)
    strategy = Sparse(job_of(replace(CONFIG, ordering="popularity", window="2")))
    before = strategy.plan(1)
    assert strategy.ahead() is None, "the window has another snapshot"
    strategy.on_token_counts(1, SKEWED)
    strategy.plan(2)
    work = strategy.ahead()
    assert work is not None and not made
    work()
    assert len(made) == 1
    strategy.on_token_counts(2, EVEN)
    assert strategy.plan(3) is not None and strategy.order_changes == 1
    assert len(made) == 1 and before is not None


def test_a_window_of_another_size_is_found_ahead_of_its_first_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of ranks it takes seconds to find."""
    made: list[object] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(options)
        return timetable(*arguments, **options)

    monkeypatch.setattr(f"{Timetable.__module__}.timetable", noted)
    strategy = Sparse(job_of(auto()))
    for iteration in range(1, 6):
        assert strategy.plan(iteration) is None
        work = strategy.ahead()
        strategy.throughput_measured(Throughput(1.0, 1e6))
    assert work is not None and not made
    work()
    assert len(made) == 1
    assert strategy.plan(6) is not None and strategy.buffer_specs()[0].own == 3 and len(made) == 1
    for _ in range(16):
        strategy.throughput_measured(Throughput(1.0, 100.0))
    work = strategy.ahead()
    assert work is not None and len(made) == 1
    work()
    assert len(made) == 2
    assert strategy.plan(7) is not None and strategy.buffer_specs()[0].own > 3
    assert len(made) == 2


@pytest.mark.parametrize("window", ["2", "auto"])
def test_plans_are_the_same_whether_another_thread_was_in_time_or_not(window: str) -> None:
    """All ranks have to plan alike, and on some of them it will not be."""
    strategies = [Sparse(job_of(replace(CONFIG, ordering="popularity", window=window))) for _ in range(2)]
    plans: list[list[SnapshotPlan | None]] = [[], []]
    for iteration in range(1, 26):
        for one, found in zip(strategies, plans, strict=True):
            found.append(one.plan(iteration))
            work = one.ahead()
            if work is not None and one is strategies[0]:
                work()
            one.on_token_counts(iteration, SKEWED if iteration // 3 % 2 else EVEN)
            one.throughput_measured(Throughput(1.0, 100.0 * (2 + iteration % 5)))
    assert plans[0] == plans[1]
    assert len({one.buffer_specs() for one in strategies}) == 1
    assert strategies[0].order_changes == strategies[1].order_changes > 2


def test_a_window_of_one_iteration_has_no_order_that_could_change() -> None:
    strategy = Sparse(job_of(replace(CONFIG, ordering="popularity", window="1")))
    strategy.plan(1)
    before = strategy.buffer_specs()
    for iteration, counts in ((2, SKEWED), (3, EVEN)):
        strategy.on_token_counts(iteration - 1, counts)
        assert strategy.plan(iteration) is not None
    assert strategy.order_changes == 0 and strategy.buffer_specs() is before


def test_slower_replicas_call_for_a_window_once_and_not_for_ever_longer_ones() -> None:
    budget = Budget(is_started=True)
    for _ in range(MEASURED):
        budget = budget.throughput_measured(Throughput(1.0, 1000.0))
    slow, found = Costs(1.0, 0.0, 2.0), []
    for _ in range(20):
        peak_bytes = budget.decided_bytes or 1000
        budget = budget.on_costs(replace(slow, round_s=peak_bytes / 400), peak_bytes)
        wanted = budget.calls_for_another()
        if wanted is not None:
            budget = budget.decided(wanted)
            found.append(wanted)
    assert found == [320]


def test_passes_of_which_nobody_knows_how_long_they_took_do_not_count() -> None:
    """All ranks get 0 seconds until the device of each has finished an iteration."""
    budget = Budget()
    for seconds in (0.0, 0.0, 9.0, 0.0, 1.0, 1.0, 0.0):
        budget = budget.throughput_measured(Throughput(seconds, 1000.0))
    assert budget.bytes_now() is None
    budget = budget.throughput_measured(Throughput(1.0, 1000.0))
    assert budget.bytes_now() == 800 and budget.passes_s == (1.0,) * 3, "the first passes of a start count neither"


@given(
    passes_s=st.floats(0.05, 30.0),
    bandwidth=st.floats(1e3, 1e12),
    slowdown=st.floats(0.0, 0.2),
    replicated=st.floats(0.01, 4.0),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_budget_never_feeds_on_the_stall_of_its_own_window(
    passes_s: float, bandwidth: float, slowdown: float, replicated: float
) -> None:
    """Each window is as large as it was allowed, so each copy takes what it takes: passes become longer by a share of
    it, and beyond them training waits. However long that continues, copies stay within the passes."""
    budget, copied_s = Budget(is_started=True), 0.0
    for _ in range(60):
        measured_s = passes_s + slowdown * copied_s
        stall_s = max(0.0, copied_s - measured_s)
        budget = budget.throughput_measured(Throughput(measured_s, bandwidth))
        if copied_s:
            costs = Costs(measured_s + stall_s, stall_s, copied_s * replicated)
            budget = budget.on_costs(costs, budget.decided_bytes)
        wanted = budget.calls_for_another()
        if wanted is not None:
            budget = budget.decided(wanted)
        copied_s = budget.decided_bytes / bandwidth
        assert copied_s <= passes_s + 1 / bandwidth
        assert stall_s == 0.0


def test_a_failed_snapshot_ends_its_window_and_the_next_one_begins_at_once() -> None:
    rank = Rank(job_of())
    for _ in range(4):
        rank.step(protected)
    rank.step(lambda _: Status.FAILED)
    assert rank.spans[5] == range(4, 7)
    assert 4 not in rank.tiers.memory
    rank.step(protected)
    assert rank.spans[6] == range(6, 9)
    assert {1, 2, 3} <= rank.tiers.memory, "the last whole window stays"


def test_what_is_sealed_later_of_a_window_that_was_given_up_is_freed() -> None:
    rank = Rank(job_of())
    rank.step(lambda _: Status.PENDING)
    rank.step(lambda at: Status.FAILED if at == 0 else Status.PENDING)
    rank.step(lambda at: Status.PROTECTED)
    assert rank.tiers.memory == {3}


def test_a_third_window_waits_until_the_first_one_has_settled() -> None:
    rank = Rank(job_of(replace(CONFIG, window="2")))
    for _ in range(6):
        rank.step(lambda at: Status.PENDING)
    assert sorted(rank.plans) == [1, 2, 3, 4]
    for _ in range(2):
        rank.step(protected)
    assert sorted(rank.plans) == [1, 2, 3, 4, 8]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["popularity", "time-decayed", "soft-count", "layer-order"]))
@settings(max_examples=examples(20), deadline=None)
def test_ranks_that_are_told_the_same_plan_the_same(seed: int, ordering: str) -> None:
    job = job_of(auto(ordering=ordering))
    one, other = Sparse(job), Sparse(job)
    source = at_random(seed, {Status.PROTECTED: 6, Status.FAILED: 1, Status.SEALED: 2})
    draw = at_random(seed + 1, {Status(value): 1 for value in Status})
    for iteration in range(1, 40):
        plans = one.plan(iteration), other.plan(iteration)
        assert plans[0] == plans[1]
        rows = [[int(draw(0)) * 7 + int(draw(0)) for _ in range(4)] for _ in range(2)]
        ok = source(0) is not Status.FAILED
        bandwidth = 100.0 + 300 * int(draw(0)) if iteration % 9 == 0 else 400.0
        for strategy in (one, other):
            if strategy.counts_tokens:
                strategy.on_token_counts(iteration, rows)
            strategy.throughput_measured(Throughput(1.0, bandwidth))
            if plans[0] is not None:
                strategy.on_commit(plans[0], Level.SNAPSHOT, ok)
                strategy.on_costs(Costs(1.0, 0.0, 0.5))
        assert one.to_data() == other.to_data()
        assert one.buffer_specs() == other.buffer_specs()


def test_a_new_order_takes_effect_between_windows_only() -> None:
    rank = Rank(job_of())
    rank.step(protected, EVEN)
    groups = [rank.plans[1].anchored]
    rank.step(protected, SKEWED)
    rank.step(protected, SKEWED)
    assert frozenset().union(*(rank.plans[at].anchored for at in (1, 2, 3))) == set(rank.job.operators)
    rank.step(protected, SKEWED)
    assert rank.spans[4] == range(4, 7)
    assert rank.plans[4].anchored != groups[0]


def test_what_is_used_most_is_anchored_after_what_is_used_less() -> None:
    rank = Rank(job_of(replace(CONFIG, window="4"), ranks=1))
    for _ in range(8):
        rank.step(protected, SKEWED)
    step_of = {one: at for at in range(5, 9) for one in rank.plans[at].anchored}
    assert step_of[expert(0, 0)] < step_of[expert(0, 3)]
    assert step_of[expert(1, 3)] < step_of[expert(1, 0)]


def test_small_changes_of_popularity_change_no_order() -> None:
    rank = Rank(job_of(replace(CONFIG, reorder_threshold=0.5)))
    for at in range(30):
        rank.step(protected, [[100 + at % 3, 200, 300, 400], [400, 300, 200, 100 - at % 3]])
    starts = [rank.plans[span[0]].anchored for span in sorted(windows(rank), key=lambda span: span[0])]
    assert len(set(starts[1:])) == 1


def test_a_change_of_popularity_is_followed_soon_however_long_it_was_the_same() -> None:
    before = [[100, 200, 300, 400], [100, 200, 300, 400]]
    after = [[400, 300, 200, 100], [400, 300, 200, 100]]
    waited = []
    for iterations in (60, 600):
        rank, waits = Rank(job_of(replace(CONFIG, window="3"))), 0
        for _ in range(iterations):
            rank.step(protected, before)
        changes = rank.strategy.order_changes
        while rank.strategy.order_changes == changes and waits < 100:
            rank.step(protected, after)
            waits += 1
        waited.append(waits)
    assert max(waited) <= 3 * 6, "some windows"


def test_an_order_that_found_no_room_stays_known_where_another_size_finds_none_either() -> None:
    before = Popularity((0,)).on_token_counts([[1, 2]])
    tried = before.reordered(before)
    refused = tried.refusing(before)
    assert (refused.ordered_by, refused.refused) == ((), ((1, 2),))
    later = refused.on_token_counts([[1, 2]]).faded()
    assert later.refusing(refused).refused == ((1, 2),)
    assert not later.has_changed(0.1, 0.25)


def anchored_order(counts: list[list[list[int]]], **settings: Any) -> list[list[int]]:
    """Experts of layer 0 by the step of the second window in which they are anchored."""
    rank = Rank(job_of(replace(CONFIG, window="4", reorder_threshold=0.0, reorder_fraction=0.01, **settings), ranks=1))
    for at in range(9):
        rank.step(protected, counts[min(at, len(counts) - 1)])
    return [
        sorted(one.expert for one in rank.plans[at].anchored if one.is_expert and one.layer == 0) for at in range(5, 9)
    ]


def test_experts_are_ordered_by_tokens_over_their_capacity() -> None:
    counts = [[[100, 200, 300, 400], [100, 200, 300, 400]]]
    by_tokens = anchored_order(counts, ordering="popularity")
    by_capacity = anchored_order(counts, ordering="capacity-aware", ordering_capacities=(0.1, 1.0, 1.0, 100.0))
    assert by_tokens != by_capacity
    place = {expert: at for at, experts in enumerate(by_capacity) for expert in experts}
    assert place[3] <= place[1] <= place[2] <= place[0]


def test_how_fast_a_moving_average_forgets_is_that_of_the_flag() -> None:
    early, late = [[800, 10, 10, 10], [10] * 4], [[10, 10, 10, 100], [10] * 4]
    slow = anchored_order([early, late], ordering="time-decayed", ordering_decay=0.99)
    fast = anchored_order([early, late], ordering="time-decayed", ordering_decay=0.0)
    assert slow != fast


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ordering": "capacity-aware"}, "needs --moe-ckpt-ordering-capacities"),
        ({"ordering": "capacity-aware", "ordering_capacities": (1.0, 1.0, 1.0, 1.0)}, "with equal capacities it is"),
        ({"ordering": "capacity-aware", "ordering_capacities": (1.0, 2.0)}, "one number above 0 for each of the 4"),
        ({"ordering_capacities": (1.0, 2.0, 1.0, 1.0)}, "only with --moe-ckpt-ordering capacity-aware"),
        ({"ordering_decay": 0.5}, "only with --moe-ckpt-ordering time-decayed"),
        ({"ordering": "layer-order", "reorder_fraction": 0.5}, "have no effect with --moe-ckpt-ordering layer-order"),
        ({"ordering": "time-decayed", "ordering_decay": 1.0}, "must be below 1"),
    ],
)
def test_settings_of_an_ordering_without_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sparse(job_of(replace(CONFIG, **settings)))


CAPACITIES = {"capacity-aware": (1.0, 2.0, 1.0, 1.0)}


@pytest.mark.parametrize("ordering", ["popularity", "soft-count", "time-decayed", "capacity-aware"])
def test_what_orders_by_use_wants_counts_where_there_are_experts(ordering: str) -> None:
    capacities = CAPACITIES.get(ordering, ())
    moe = Sparse(job_of(replace(CONFIG, ordering=ordering, ordering_capacities=capacities)))
    dense = Sparse(job_of(replace(CONFIG), experts=0))
    assert moe.counts_tokens
    assert moe.counts_gates == (ordering == "soft-count")
    assert not dense.counts_tokens


def test_layers_of_dense_models_are_anchored_from_the_back_to_the_front() -> None:
    rank = Rank(job_of(replace(CONFIG, window="4"), experts=0, ranks=1))
    for _ in range(4):
        rank.step(protected)
    layers = [max(one.layer for one in rank.plans[at].anchored) for at in range(1, 5)]
    assert layers == sorted(layers, reverse=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_iterations_copy_the_same_number_of_bytes_to_within_a_tenth_on_every_rank(ranks: int, window: int) -> None:
    model = operators(layers=8, experts=16)
    sizes = sizes_of(model, ranks)
    table = timetable(Job(CONFIG, model, Topology(ranks, ep=ranks), 64, 10, sizes=sizes), {}, window=window)
    for own in sizes.values():
        loads = bytes_per_step(table, own)
        assert max(loads) <= 1.1 * sum(loads) / len(loads)


@given(st.integers(2, 6), st.lists(st.integers(20, 60), min_size=40, max_size=60))
@settings(max_examples=examples(60), deadline=None)
def test_bytes_are_even_as_long_as_no_operator_is_too_large(window: int, numbers: list[int]) -> None:
    own = {expert(0, index): OperatorSize(6 * number, number) for index, number in enumerate(numbers)}
    table = timetable(Job(CONFIG, tuple(own), Topology(1), 64, 10, sizes={0: own}), {}, window=window)
    loads = bytes_per_step(table, own)
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("window", [2, 3, 4])
def test_bytes_are_even_where_the_distributed_optimizer_cuts_operators_anywhere(world: int, window: int) -> None:
    model = operators(layers=8, experts=16)
    sizes = shards_of(model, world)
    table = timetable(Job(CONFIG, model, Topology(world, ep=2), 64, 10, sizes=sizes), {}, window=window)
    for own in sizes.values():
        loads = bytes_per_step(table, own)
        assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_nothing_is_snapshotted_before_the_window_is_known() -> None:
    strategy = Sparse(job_of(auto()))
    assert strategy.plan(1) is None
    assert not strategy.due(2)
    assert [(room.own, room.largest.parts) for room in strategy.buffer_specs()] == [(1, {})]


def test_three_iterations_after_the_first_decide_the_window() -> None:
    strategy = Sparse(job_of(auto()))
    for iteration in range(1, 6):
        assert (strategy.plan(iteration) is not None) == (iteration == 5)
        strategy.throughput_measured(Throughput(1.0, 1e6))
    assert strategy.buffer_specs()[0].own == 3, "an iteration has time for everything"


def test_the_first_iteration_of_a_start_is_not_measured() -> None:
    slow, usual = Sparse(job_of(auto())), Sparse(job_of(auto()))
    for strategy, first in ((slow, 1000.0), (usual, 1.0)):
        strategy.throughput_measured(Throughput(first, 500.0))
        for _ in range(3):
            strategy.throughput_measured(Throughput(1.0, 500.0))
        strategy.plan(5)
    assert slow.buffer_specs() == usual.buffer_specs()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_window_is_the_smallest_whose_snapshots_fit_an_iteration(window: int) -> None:
    job = job_of(auto())
    strategy = Sparse(job)
    pace(strategy, (peak(window) + 1) / 0.8)
    strategy.plan(5)
    assert strategy.buffer_specs()[0].own == 3 * window


def test_slower_copies_take_a_larger_window_from_the_next_one_on() -> None:
    rank = Rank(job_of(auto()))
    pace(rank.strategy, (peak(2) + 1) / 0.8)
    rank.step(protected)
    assert rank.spans[1] == range(1, 3)
    pace(rank.strategy, peak(4) / 0.8, times=16)
    rank.step(protected)
    assert rank.spans[2] == range(1, 3), "a window that was begun is brought to its end"
    rank.step(protected)
    assert len(rank.spans[3]) > 2


@given(st.integers(1, 4), st.integers(1, 2000))
@settings(max_examples=examples(40), deadline=None)
def test_a_window_that_is_taken_for_the_one_that_is_needed_is_it(window: int, budget_bytes: int) -> None:
    job = job_of()
    if timetable(job, {}, window=window).is_needed(budget_bytes):
        assert timetable(job, {}, budget_bytes=budget_bytes).size == window


def test_slow_replication_takes_a_larger_window_too() -> None:
    strategy = Sparse(job_of(auto()))
    pace(strategy, 1e6)
    strategy.plan(5)
    assert strategy.buffer_specs()[0].own == 3
    for _ in range(16):
        strategy.on_costs(Costs(iteration_s=1.0, stall_s=0.0, round_s=1.9))
    strategy.on_commit(SnapshotPlan(5, {}), Level.SNAPSHOT, True)
    strategy.plan(6)
    assert strategy.buffer_specs()[0].own > 3


def test_a_budget_that_wavers_changes_no_window() -> None:
    strategy = Sparse(job_of(auto()))
    pace(strategy, (peak(2) + 1) / 0.8)
    strategy.plan(5)
    rooms = strategy.buffer_specs()
    for iteration in range(6, 40):
        pace(strategy, peak(2) * (1 + 0.1 * (iteration % 3 - 1)) / 0.8, times=3)
        strategy.plan(iteration)
        assert strategy.buffer_specs() is rooms


def test_a_whole_window_goes_to_storage_when_its_last_snapshot_has_settled() -> None:
    rank = Rank(job_of())
    for _ in range(8):
        rank.step(protected)
    assert rank.tiers.storage == set()
    rank.step(protected)
    rank.step(protected)
    assert rank.tiers.storage == {7, 8, 9}


def test_the_newest_windows_in_storage_stay_whole() -> None:
    rank = Rank(job_of(replace(CONFIG, persist_keep=2)))
    for _ in range(60):
        rank.step(protected)
    assert sorted(rank.tiers.storage) == [49, 50, 51, 55, 56, 57] or len(rank.tiers.storage) == 6
    spans = {rank.spans[iteration] for iteration in rank.tiers.storage}
    assert rank.tiers.storage == {iteration for span in spans for iteration in span}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=examples(20), deadline=None)
def test_what_is_being_persisted_stays_in_memory_until_that_has_ended(seed: int) -> None:
    rank = Rank(job_of(replace(CONFIG, persist_interval=3)))
    news = at_random(seed, {Status.PROTECTED: 5, Status.PENDING: 4, Status.SEALED: 2, Status.FAILED: 1})
    for _ in range(40):
        rank.step(news)  # Tiers.persist looks
        writing = {one.plan.iteration for one in rank.tracker.rounds.open if one.level is Level.PERSIST}
        for last in writing:
            assert rank.tiers.memory.issuperset(rank.spans[last])


def test_a_resumed_strategy_orders_and_sizes_windows_as_before() -> None:
    job = job_of(auto())
    before = Sparse(job)
    pace(before, (peak(3) + 1) / 0.8)
    for iteration in range(5, 20):
        plan = before.plan(iteration)
        assert plan is not None
        before.on_token_counts(iteration, SKEWED)
        before.on_commit(plan, Level.SNAPSHOT, True)
    data = json.loads(json.dumps(before.to_data()))
    after = Sparse(job)
    after.resumed(NOWHERE, data, 19)
    assert after.to_data() == data
    assert after.buffer_specs() == before.buffer_specs()
    assert after.plan(20) == before.plan(20)


def test_a_chosen_window_shrinks_to_what_ranks_own_that_are_more_than_before() -> None:
    few, many = job_of(auto(), ranks=1), job_of(auto(), ranks=4)
    before, after = (max(map(len, job.changing_sizes.values())) for job in (few, many))
    assert after < before
    grown = Sparse(many)
    grown.resumed(NOWHERE, Sparse(few).to_data() | {"window": before}, 19)
    plan = grown.plan(20)
    assert plan is not None and grown.pieces(plan)[0].span == range(20, 20 + after)


def test_other_flags_hold_from_a_restart_on() -> None:
    before, after = Sparse(job_of()), Sparse(job_of(replace(CONFIG, window="2", ordering="layer-order")))
    before.plan(1)
    after.resumed(NOWHERE, before.to_data(), 1)
    assert after.buffer_specs()[0].own == 6


def test_a_resumed_strategy_does_not_continue_with_a_window_that_the_fault_has_cut() -> None:
    before = Sparse(job_of())
    for iteration in (1, 2, 3, 4):
        before.plan(iteration)
    after = Sparse(job_of())
    after.resumed(NOWHERE, before.to_data(), 4)
    plan = after.plan(5)
    assert plan is not None
    (piece,) = after.pieces(plan)
    assert piece.span == range(5, 8)


def test_a_window_restores_the_state_of_its_last_iteration_by_a_replay() -> None:
    rank = Rank(job_of())
    for _ in range(5):
        rank.step(protected)
    required = {number: frozenset(sizes) for number, sizes in rank.job.sizes.items()}
    copies = {
        number: tuple(Copy(number, rank.plans[at], Tier.OWN_MEMORY, number) for at in sorted(rank.tiers.memory))
        for number in required
    }
    inventory = Inventory(required, copies, journal=frozenset(range(1, 6)))
    plan = rank.strategy.recover(inventory, Lost(), rank.job.topology)
    (segment,) = plan.segments
    assert (segment.base, segment.target) == (1, 3)
    assert [len(frozen) for frozen in segment.frozen] == sorted(map(len, segment.frozen), reverse=True)


def test_the_account_of_memory_counts_the_weights_that_wait_for_their_full_state() -> None:
    job = job_of()
    strategy = Sparse(job)
    account = memory_report(strategy.buffer_specs(), job.sizes[0], owners=1)
    table = timetable(job, {}, window=3)
    assert account.window == 3
    assert account.checkpoint_bytes == sum(bytes_per_step(table, job.sizes[0]))
    assert account.dense_bytes == sum(size.full_bytes for size in job.sizes[0].values()) < account.checkpoint_bytes
    assert account.own_bytes == 9 * max(bytes_per_step(table, job.sizes[0]))
    assert account.replica_bytes == account.own_bytes


@pytest.mark.parametrize("window", ["0", "-1", "1.5", "many", ""])
def test_a_window_that_is_no_number_of_iterations_is_refused(window: str) -> None:
    with pytest.raises(UsageError, match=f"invalid --moe-ckpt-window {window} .expected auto or a number"):
        Sparse(job_of(replace(CONFIG, window=window)))


def test_a_window_of_more_iterations_than_operators_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="--moe-ckpt-window 40 is more than the 10 operators"):
        Sparse(job_of(replace(CONFIG, window="40")))


def test_what_is_remembered_of_a_moment_is_added_up_when_asked_for_and_stays_whatever_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added: list[int] = []
    monkeypatch.setattr(windows_module, "add", lambda a, b: added.append(b) or a + b)
    strategy = Sparse(job_of())
    for count in range(1, 4):
        strategy.plan(count)
        strategy.on_token_counts(count, [[count] * 4] * 2)
    remembered, now = strategy.remembered(), strategy.to_data()
    before = len(added)
    for count in range(4, 10):
        strategy.on_token_counts(count, [[count] * 4] * 2)
    assert len(added) == before, "the thread that trains has added something up"
    assert json.dumps(remembered()) == json.dumps(now)
    assert now["popularity"]["counts"] == [[6] * 4] * 2
    for count in range(10, 24):  # where nobody asks for long, they do not pile up
        strategy.on_token_counts(count, [[count] * 4] * 2)
    assert len(added) > before
    assert strategy.to_data()["popularity"]["counts"] == [[sum(range(24))] * 4] * 2


def test_windows_of_one_order_share_their_plans_and_their_operators() -> None:
    job = job_of()
    table, reordered = timetable(job, {}, window=2), timetable(job, {expert(1, 0): 9}, window=2)
    one, other = table.window.beginning(4), table.window.beginning(6)
    assert one.plan(4).parts is other.plan(6).parts and (one.plan(5).iteration, other.plan(7).iteration) == (5, 7)
    assert one.plan(4).operators is other.plan(6).operators == frozenset(one.plan(4).parts)
    assert reordered.groups != table.groups and reordered.window.plan(0).operators is one.plan(4).operators
