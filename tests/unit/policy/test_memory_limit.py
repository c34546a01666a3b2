"""What checkpoints may take of a node, and what is given up, step by step, where that is too little."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from sparse_cases import CONFIG, auto, job_of, pace, peak

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.strategies import STRATEGIES, Job, Strategy
from megatron.core.dist_checkpointing.moe.strategies.base import NO_BUFFERS
from megatron.core.dist_checkpointing.moe.strategies.full import Full
from megatron.core.dist_checkpointing.moe.strategies.memory_report import MemoryLimit, memory_report
from megatron.core.dist_checkpointing.moe.strategies.sparse import Sparse
from megatron.core.dist_checkpointing.moe.types import OperatorSize, RecoveryPlan, Scope, Topology

LIMITS = {
    "200GiB": MemoryLimit(200 * 2**30),
    "180GB": MemoryLimit(180 * 10**9),
    "1.5 TB": MemoryLimit(1_500_000_000_000),
    "4096": MemoryLimit(4096),
    "512B": MemoryLimit(512),
    "70%": MemoryLimit(share=Fraction(7, 10)),
    "12.5%": MemoryLimit(share=Fraction(1, 8)),
}


@pytest.mark.parametrize("text", LIMITS)
def test_a_limit_is_a_number_of_bytes_or_a_share(text: str) -> None:
    assert MemoryLimit.parse(text) == LIMITS[text]


@pytest.mark.parametrize("text", ["", "much", "0", "0%", "101%", "-3GB", "12 parsecs", "1e9", "20GiBs"])
def test_anything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 200GiB, .*such as 70%"):
        MemoryLimit.parse(text)


def test_a_share_is_of_the_memory_of_the_node() -> None:
    assert MemoryLimit.parse("25%").of_node(1000) == 250
    assert MemoryLimit.parse("9KB").of_node(1000) == 9000


def piped(config: MoECheckpointConfig = CONFIG) -> Job:
    """A job of two pipeline stages, of which faults can roll back one."""
    return replace(job_of(config), topology=Topology(2, pp=2, ranks_per_node=2))


def taken(strategy: Strategy, job: Job) -> int:
    report = memory_report(strategy.buffer_specs(), job.sizes[0], owners=1)
    return report.own_bytes + report.replica_bytes


def steps(strategy: Strategy, job: Job) -> list[tuple[int, int, int]]:
    """Segments' bytes, iterations whose logs are kept, and iterations of a window, after each refusal."""
    found = [(taken(strategy, job), strategy.logged, strategy.lookback // 3)]
    while strategy.buffers_refused():
        found.append((taken(strategy, job), strategy.logged, strategy.lookback // 3))
    return found


def test_logs_go_first_a_window_at_a_time_then_the_window_then_protection() -> None:
    job = piped()
    strategy = Sparse(job)
    found = steps(strategy, job)
    assert [logged for _, logged, _ in found] == [9, 6, 3, 0, 0, 0]
    assert [window for _, _, window in found] == [3, 3, 3, 3, 1, 0]
    assert strategy.gave_up and strategy.plan(9) is None and not strategy.due(9)
    assert strategy.buffer_specs() == NO_BUFFERS


def test_what_is_asked_for_never_grows_on_the_way() -> None:
    job = piped()
    found = [nbytes + logged for nbytes, logged, _ in steps(Sparse(job), job)]
    assert found == sorted(found, reverse=True)


def test_everything_at_once_takes_no_more_than_the_strategy_full() -> None:
    job = job_of()
    strategy = Sparse(job)
    assert strategy.buffers_refused() == "everything is snapshotted at once, as with --moe-ckpt-strategy full"
    plan = strategy.plan(1)
    assert plan is not None and set(plan.parts) == set(job.operators)
    assert taken(strategy, job) <= taken(Full(job), job) * 33 // 32


def test_without_local_recovery_there_are_no_logs_to_give_up() -> None:
    strategy = Sparse(piped(replace(CONFIG, recovery="global")))
    assert "at once" in strategy.buffers_refused()


def test_a_larger_window_is_taken_where_it_needs_less() -> None:
    """Three operators as large as one another do not fit two iterations evenly."""
    job = job_of(replace(CONFIG, window="2"), ranks=1)
    whole = job.operators[:3]
    equal = replace(job, operators=whole, sizes={0: dict.fromkeys(whole, OperatorSize(1200, 1))})
    strategy = Sparse(equal)
    before = taken(strategy, equal)
    assert strategy.buffers_refused() == "the window has 3 iterations in place of 2"
    assert taken(strategy, equal) < before


def test_a_window_that_cannot_grow_stays_and_its_snapshot_is_planned_again() -> None:
    strategy = Sparse(piped(auto()))
    pace(strategy, (peak(2) + 1) / 0.8)
    assert strategy.plan(1) is not None and strategy.plan(2) is not None
    former, changes = strategy.buffer_specs(), strategy.order_changes
    pace(strategy, peak(4) / 0.8, times=16)
    assert strategy.plan(3) is not None
    said = []
    while strategy.buffer_specs() != former:
        said.append(strategy.buffers_refused())
    assert said[-1] == "the window stays at 2 iterations, with boundary logs of 6"
    assert strategy.logged == 6 and strategy.keeps_logs and strategy.order_changes == changes
    again = strategy.plan(3)
    assert again is not None and strategy.pieces(again)[0].span == range(3, 5)


def test_an_order_that_finds_no_room_is_neither_asked_for_again_nor_what_a_restart_begins_with() -> None:
    skewed = [[1, 2, 3, 40], [40, 3, 2, 1]]
    strategy, restarted = (Sparse(job_of(replace(CONFIG, window="2"), ranks=1)) for _ in range(2))
    for iteration in (1, 2):
        former = strategy.plan(iteration)
        strategy.on_token_counts(iteration, skewed)
    assert strategy.plan(3) is not None and strategy.order_changes == 1
    assert "the window stays at 2 iterations" in strategy.buffers_refused()
    assert strategy.order_changes == 0
    plans = []
    for iteration in range(3, 9):
        plans.append(strategy.plan(iteration))
        strategy.on_token_counts(iteration, skewed)
    assert strategy.order_changes == 0
    restarted.resumed(RecoveryPlan(8, Scope.GLOBAL, (), ()), strategy.to_data(), 8)
    wanted = [plan.anchored for plan in plans if plan is not None][:2]
    begun = [plan.anchored for plan in (restarted.plan(9), restarted.plan(10)) if plan is not None]
    assert begun == wanted
    assert former is not None and former.anchored == wanted[1]


@pytest.mark.parametrize(("window", "logged"), [("auto", 2), ("2", 6)])
def test_after_a_fault_an_automatic_window_asks_for_no_more_logs_than_there_was_room_for(
    window: str, logged: int
) -> None:
    """Of a fixed one the start has found that out."""
    before, after = (Sparse(piped(auto() if window == "auto" else replace(CONFIG, window=window))) for _ in range(2))
    pace(before, (peak(2) + 1) / 0.8)
    assert before.plan(1) is not None and before.lookback == 6
    before.buffers_refused(), before.buffers_refused()
    after.resumed(RecoveryPlan(0, Scope.GLOBAL, (), ()), before.to_data(), 1)
    assert (before.logged, after.logged) == (2, logged)


def test_a_strategy_that_gave_up_takes_no_snapshots_after_a_recovery_either() -> None:
    before, after = Sparse(job_of()), Sparse(job_of())
    while after.buffers_refused():
        pass
    assert before.plan(1) is not None
    after.resumed(RecoveryPlan(0, Scope.GLOBAL, (), ()), before.to_data(), 1)
    assert after.gave_up and not after.due(2) and after.plan(2) is None
    assert after.buffer_specs() == NO_BUFFERS


@pytest.mark.parametrize("name", ["full", "pec"])
def test_other_strategies_take_no_snapshots_where_there_is_no_room(name: str) -> None:
    strategy = STRATEGIES[name](job_of(MoECheckpointConfig(strategy=name)))
    assert strategy.plan(1) is not None
    assert "not protected" in strategy.buffers_refused()
    assert strategy.plan(2) is None and not strategy.due(3)
    assert strategy.buffer_specs() == NO_BUFFERS
    assert strategy.buffers_refused() == ""
