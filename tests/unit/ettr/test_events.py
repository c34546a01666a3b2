"""Runs as sequences of events: what adds up, what overlaps, and what chance does to the formula."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.types import FP16_FP32, Topology
from moe_ckpt.simulator.behaviour import Behaviour, Nodes, RecoveryCost
from moe_ckpt.simulator.closed_form import ettr
from moe_ckpt.simulator.constants import THIS_PROJECT
from moe_ckpt.simulator.events import Estimate, estimate, simulate
from moe_ckpt.simulator.faults import Fault, load_trace, poisson
from moe_ckpt.simulator.inputs import Cluster, IterationCost, TrainingJob
from moe_ckpt.simulator.models import preset
from moe_ckpt.simulator.systems import SYSTEMS
from moe_ckpt.simulator.systems.links import SystemSetting
from reproduce.fig10 import SIX_HOURS

AZURE = Cluster("azure", 8, {2: 312e12}, 25e9, 300e9, 1.25e9, 5e9, 880_000_000_000, "MoEvement 5.1")
SMALL = TrainingJob(preset("GPT-MoE"), Topology(96, pp=3, ep=8), FP16_FP32, 512, 4, 2048)
SMALL_COST = IterationCost((0.3,) * 3, 4, 1, 0.3, 0.0, 1.2)
NAMES = ("checkfreq", "gemini", "moc", "moetion", "moevement")


@cache
def system(name: str, mtbf_s: float = 1800) -> Behaviour:
    return SYSTEMS[name].behaviour(SystemSetting(SMALL, SMALL_COST, AZURE, THIS_PROJECT), mtbf_s)


def at(at_s: float, *nodes: int) -> Fault:
    return Fault(at_s, frozenset(nodes))


def simple(*, local: bool = False, storage_iterations: int | None = None, overhead_s: float = 0.0) -> Behaviour:
    """Iterations of 1 s, a checkpoint after every 10, 20 s down after a fault."""

    def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
        if storage_iterations is not None and len(down) > 1:
            return RecoveryCost(0.0, 20.0, 0.0, 0.0, min(storage_iterations, iteration), from_storage=True)
        return RecoveryCost(0.0, 20.0, 0.0, iteration % 10, iteration % 10, refill_s=5.0)

    joint = (lambda ongoing, nodes: bool(ongoing & nodes)) if local else None
    return Behaviour("simple", 1.0, 10, 1, overhead_s, 25.0, recover, joint)


def repeated(behaviour: Behaviour, mtbf_s: float, duration_s: float, seeds: range) -> Estimate:
    """ETTR over one run for each seed, on 12 nodes."""
    return estimate([simulate(behaviour, poisson(mtbf_s, duration_s, 12, seed), duration_s).ettr for seed in seeds])


@given(
    st.sampled_from((*NAMES, "none", "torch_dist")),
    st.integers(0, 10_000),
    st.floats(300, 20_000),
    st.floats(1, 30_000),
)
@settings(max_examples=examples(40), deadline=None)
def test_useful_overhead_and_recovery_add_up_to_the_wall_clock(
    name: str, seed: int, mtbf_s: float, duration_s: float
) -> None:
    run = simulate(system(name), poisson(mtbf_s, duration_s, 12, seed), duration_s)
    assert run.useful_s + run.overhead_s + run.recovery_s == pytest.approx(duration_s)
    assert min(run.useful_s, run.overhead_s, run.recovery_s) >= -1e-6
    assert run.useful_s == pytest.approx(run.iterations * system(name).iteration_s)


@given(st.integers(0, 10_000))
@example(684)  # a fault right after a recovery
@settings(max_examples=examples(20), deadline=None)
def test_time_never_runs_backwards_in_a_timeline(seed: int) -> None:
    run = simulate(system("moc", 600), poisson(600, 20_000, 12, seed), 20_000)
    times = [moment.at_s for moment in run.timeline]
    assert times == sorted(times)
    assert all(moment.goodput == 0 or 0 < moment.goodput <= 1 for moment in run.timeline)


def test_without_faults_only_overhead_is_lost() -> None:
    run = simulate(simple(overhead_s=0.25), (), 1000)
    assert (run.iterations, run.useful_s, run.overhead_s, run.recovery_s) == pytest.approx((800, 800, 200, 0))
    assert run.ettr == pytest.approx(0.8)


def test_a_fault_costs_its_recovery_and_the_iteration_that_it_cuts_off() -> None:
    run = simulate(simple(), [at(103.5, 0)], 1000)
    assert run.recovery_s == pytest.approx(20 + 3 + 0.5)
    assert run.iterations == pytest.approx(1000 - 23.5)


def test_a_fault_during_a_recovery_begins_it_again() -> None:
    once = simulate(simple(), [at(100, 0)], 1000)
    twice = simulate(simple(), [at(100, 0), at(112, 1)], 1000)
    assert twice.recovery_s == pytest.approx(once.recovery_s + 12)


def test_recoveries_that_are_apart_continue_side_by_side() -> None:
    run = simulate(simple(local=True), [at(100, 0), at(112, 1)], 1000)
    assert run.recovery_s == pytest.approx(32)
    joined = simulate(simple(local=True), [at(100, 0), at(112, 0)], 1000)
    assert joined.recovery_s == pytest.approx(32)


def test_the_slowest_of_recoveries_side_by_side_counts() -> None:
    def recover(iteration: int, nodes: Nodes, down: Nodes) -> RecoveryCost:
        return RecoveryCost(0.0, 100.0 if 0 in nodes else 10.0, 0.0, 0.0, 0)

    apart = Behaviour("apart", 1.0, 10, 1, 0.0, 0.0, recover, lambda ongoing, nodes: False)
    together = Behaviour("together", 1.0, 10, 1, 0.0, 0.0, recover)
    faults = [at(100, 0), at(150, 1)]
    assert simulate(apart, faults, 1000).recovery_s == pytest.approx(100)
    assert simulate(together, faults, 1000).recovery_s == pytest.approx(150)


def test_a_recovery_that_outlasts_the_run_counts_as_far_as_the_run_goes() -> None:
    run = simulate(simple(), [at(990, 0)], 1000)
    assert run.recovery_s == pytest.approx(10)
    assert run.iterations == pytest.approx(990)


def test_faults_after_the_end_are_not_met() -> None:
    assert simulate(simple(), [at(1000, 0), at(2000, 1)], 1000).faults == 0


def test_a_recovery_from_storage_undoes_iterations_that_were_done() -> None:
    run = simulate(simple(storage_iterations=300), [at(400, 0, 1)], 1000)
    assert run.from_storage == 1
    assert run.recovery_s == pytest.approx(300 + 20)
    assert run.iterations == pytest.approx(680)


def test_a_state_that_was_read_from_storage_is_there_for_the_next_fault() -> None:
    found = simulate(simple(storage_iterations=50), [at(100, 1, 2), at(130, 3, 4)], 200)
    assert (found.from_storage, found.iterations) == (2, 50 + 50)  # 20 s down twice, 10 s trained between


def test_a_node_counts_as_lost_until_its_memory_is_filled_again() -> None:
    soon = simulate(simple(storage_iterations=300), [at(400, 0), at(403, 1)], 1000)
    later = simulate(simple(storage_iterations=300), [at(400, 0), at(406, 1)], 1000)
    assert (soon.from_storage, later.from_storage) == (1, 0)


def test_the_timeline_shows_k_and_lost_tokens_as_faults_change_them() -> None:
    six_hours = replace(THIS_PROJECT, planned_s=21_600.0)
    moc = SYSTEMS["moc"].behaviour(SystemSetting(SMALL, SMALL_COST, AZURE, six_hours), 900)
    run = simulate(moc, load_trace(SIX_HOURS), 21_600)
    shares = [moment.k_share for moment in run.timeline]
    lost = [moment.lost_tokens for moment in run.timeline]
    assert (shares[0], shares[-1]) == (1 / 8, 1)
    assert shares == sorted(shares)
    assert lost == sorted(lost)
    assert lost[-1] == run.lost_tokens > 0


def test_a_simulation_leaves_the_behaviour_that_it_was_given_as_it_was() -> None:
    moc = system("moc", 600)
    faults = poisson(600, 20_000, 12, 1)
    assert simulate(moc, faults, 20_000) == simulate(moc, faults, 20_000)
    assert moc.lost_tokens == 0


@pytest.mark.parametrize("name", NAMES)
def test_chance_agrees_with_the_formula_where_recoveries_seldom_meet_faults(name: str) -> None:
    mtbf_s, duration_s = 20_000.0, 600_000.0
    found = SYSTEMS[name].behaviour(
        SystemSetting(SMALL, SMALL_COST, AZURE, THIS_PROJECT), 1e9 if name == "moc" else mtbf_s
    )
    chance = repeated(found, mtbf_s, duration_s, range(5))
    assert chance.mean == pytest.approx(ettr(found, mtbf_s, duration_s), abs=max(0.004, 2 * chance.half_width))


@pytest.mark.parametrize("name", ["checkfreq", "gemini", "moevement"])
def test_more_faults_leave_less_training(name: str) -> None:
    ratios = [repeated(system(name, mtbf_s), mtbf_s, 43_200, range(8)).mean for mtbf_s in (600, 1800, 7200)]
    assert ratios == sorted(ratios)


def test_students_interval_of_known_values() -> None:
    few = estimate([1.0, 2.0, 3.0])
    assert (few.mean, few.runs) == (2.0, 3)
    assert few.half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    many = estimate([0.0, 1.0] * 15)
    assert many.half_width == pytest.approx(2.0452 * (7.5 / 29) ** 0.5 / 30**0.5, rel=1e-3)
    assert estimate([0.5]).half_width == 0


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    chance = random.Random(0)
    covered = 0
    for _ in range(400):
        found = estimate([chance.gauss(0.0, 1.0) for _ in range(12)])
        covered += abs(found.mean) <= found.half_width
    assert 0.91 < covered / 400 < 0.99


def test_faults_that_are_not_in_order_are_refused() -> None:
    with pytest.raises(UsageError, match="order"):
        simulate(simple(), [at(200, 0), at(100, 0)], 1000)


def test_no_seeds_are_refused() -> None:
    with pytest.raises(UsageError, match="seeds"):
        estimate([])


def test_sixteen_thousand_ranks_take_no_longer_per_fault_than_a_hundred() -> None:
    """Events cost what faults cost, not what ranks do: a run on 170 times as many takes at most 20 times as long."""
    large = TrainingJob(preset("DeepSeek-V3-671B"), Topology(16_384, pp=32, ep=8), FP16_FP32, 8192, 64, 2048)
    cost = IterationCost((0.1,) * 32, 64, 1, 0.5, 0.1, 1.0)
    seconds = []
    for job, its_cost in ((SMALL, SMALL_COST), (large, cost)):
        found = SYSTEMS["moevement"].behaviour(SystemSetting(job, its_cost, AZURE, THIS_PROJECT), 600)
        nodes = len(job.topology.ranks_by_node)
        faults = [poisson(600, 43_200, nodes, seed) for seed in range(6)]
        simulate(found, faults[0], 43_200)
        began = time.process_time()
        for one in faults[1:]:
            simulate(found, one, 43_200)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 20 * seconds[0]


def test_a_slow_node_costs_what_was_not_trained_meanwhile_at_most_since_training_continued() -> None:
    usual = simulate(simple(), (at(100.0, 0),), 200.0)
    slow = simulate(simple(), (Fault(100.0, frozenset((0,)), slow_s=40.0, slowdown=1.0),), 200.0)
    assert usual.useful_s - slow.useful_s == pytest.approx(20.0)
    assert slow.useful_s + slow.recovery_s == pytest.approx(200.0)
    longer = simulate(simple(), (Fault(100.0, frozenset((0,)), slow_s=1e6, slowdown=1.0),), 200.0)
    assert usual.useful_s - longer.useful_s == pytest.approx(50.0)


def test_an_estimate_is_told_with_half_of_its_interval_which_a_single_run_has_not() -> None:
    assert f"{Estimate(0.5, 0.25, 3):+.2f}" == "+0.50 ± 0.25"
    assert f"{Estimate(-0.5, 0.25, 3):.1%}" == "-50.0% ± 25.0%"
    assert f"{Estimate(0.5, 0.0, 1):.2f}" == "0.50"


def test_an_interval_leaves_out_what_is_further_from_the_mean_than_half_of_it() -> None:
    found = Estimate(1.5, 0.25, 3)
    assert found.is_beyond() and found.is_beyond(1.2)
    assert not found.is_beyond(1.25) and not found.is_beyond(1.75)
    assert not Estimate(1.5, 0.0, 1).is_beyond()
