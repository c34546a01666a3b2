"""Intervals between dense checkpoints: CheckFreq, Young, Daly, the oracle, and MoC's overhead."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.policy.interval import checkfreq_interval, daly, in_iterations, young
from moe_ckpt.simulator.ettr import (
    TrainingRun,
    ettr,
    expected_recovery_s,
    gemini_oracle,
    moc_overhead_s,
    moc_save_overhead_s,
)

NAN, INF = math.nan, math.inf
SECONDS = st.floats(0.001, 1e5)
RUN = TrainingRun(iterations=1000, iteration_time_s=2.0, faults_per_iteration=0.01, restart_s=60.0)


def test_an_interval_costs_exactly_the_overhead_that_is_allowed() -> None:
    assert checkfreq_interval(1.0, 0.3, 0.0) == 10
    assert checkfreq_interval(1.0, 0.301, 0.0) == 11


def test_a_slow_persist_makes_the_interval_longer_than_the_overhead_asks() -> None:
    assert checkfreq_interval(2.0, 0.6, 100.0) == 50
    assert checkfreq_interval(2.0, 0.6, 100.1) == 51


def test_a_checkpoint_without_cost_is_taken_in_every_iteration() -> None:
    assert checkfreq_interval(1.0, 0.0, 0.0) == 1
    assert in_iterations(young(0.0, 3600.0), 1.0) == 1
    assert in_iterations(daly(0.0, 3600.0), 1.0) == 1
    assert gemini_oracle(1.0, 0.0, 3600.0, 50) == 1


@given(SECONDS, SECONDS, SECONDS, st.floats(0.001, 1.0))
def test_checkfreq_takes_the_smallest_interval_that_keeps_both_promises(
    iteration_time_s: float, stall_s: float, persist_time_s: float, max_overhead: float
) -> None:
    interval = checkfreq_interval(iteration_time_s, stall_s, persist_time_s, max_overhead)

    def keeps(interval: int, slack: float) -> bool:
        overhead = stall_s / (interval * iteration_time_s)
        return overhead <= max_overhead * slack and persist_time_s <= interval * iteration_time_s * slack

    assert keeps(interval, 1 + 1e-9)
    assert interval == 1 or not keeps(interval - 1, 1 - 1e-9)


@pytest.mark.parametrize(("cost_s", "mtbf_s", "seconds"), [(50.0, 3600.0, 600.0), (2.0, 400.0, 40.0)])
def test_young_is_the_root_of_twice_the_cost_times_the_mtbf(cost_s: float, mtbf_s: float, seconds: float) -> None:
    assert young(cost_s, mtbf_s) == pytest.approx(seconds)


def test_daly_corrects_young_as_published() -> None:
    # C = 50, M = 3600: C / 2M = 1 / 144, so 600 x (1 + 1/36 + 1/1296) - 50.
    assert daly(50.0, 3600.0) == pytest.approx(600 * (1 + 1 / 36 + 1 / 1296) - 50)


def test_daly_gives_the_mtbf_where_a_checkpoint_costs_twice_as_much() -> None:
    assert daly(200.0, 100.0) == 100.0
    assert daly(1e6, 100.0) == 100.0
    assert daly(199.999999, 100.0) == pytest.approx(100 * 8 / 9)


@given(SECONDS, SECONDS, st.floats(1.0, 100.0))
def test_rarer_failures_never_shorten_the_interval_of_young(cost_s: float, mtbf_s: float, factor: float) -> None:
    assert young(cost_s, mtbf_s * factor) >= young(cost_s, mtbf_s)


@given(SECONDS, SECONDS, st.floats(1.01, 100.0))
def test_rarer_failures_never_shorten_the_interval_of_daly_on_one_side_of_its_limit(
    cost_s: float, mtbf_s: float, factor: float
) -> None:
    assume((cost_s < 2 * mtbf_s) == (cost_s < 2 * mtbf_s * factor))
    assert daly(cost_s, mtbf_s * factor) >= daly(cost_s, mtbf_s) > 0


@pytest.mark.parametrize(("seconds", "iterations"), [(0.0, 1), (0.4, 1), (3.0, 1), (3.01, 2), (5.0, 2), (6.0, 3)])
def test_an_interval_in_iterations_is_the_nearest_one(seconds: float, iterations: int) -> None:
    assert in_iterations(seconds, 2.0) == iterations


def test_half_an_interval_is_run_again() -> None:
    assert expected_recovery_s(2.0, 10) == 10.0
    assert expected_recovery_s(2.0, 10, restart_s=30.0) == 40.0


def test_ettr_multiplies_runtime_and_recovery_overhead() -> None:
    # 25 % overhead while training, and a quarter of the time between failures is spent recovering.
    assert ettr(2.0, 5.0, 10, 150.0, 600.0) == pytest.approx(0.8 * 0.8)
    assert ettr(2.0, 0.0, 1, 0.0, 600.0) == 1.0


@given(SECONDS, st.floats(0, 1e5), st.integers(1, 10_000), st.floats(0, 1e5), SECONDS)
def test_ettr_is_a_share_that_grows_with_the_mtbf_and_shrinks_with_either_cost(
    iteration_time_s: float, overhead_s: float, interval: int, recovery_s: float, mtbf_s: float
) -> None:
    value = ettr(iteration_time_s, overhead_s, interval, recovery_s, mtbf_s)
    assert 0 < value <= 1
    assert ettr(iteration_time_s, overhead_s, interval, recovery_s, 2 * mtbf_s) >= value
    assert ettr(iteration_time_s, overhead_s + 10, interval, recovery_s, mtbf_s) < value
    assert ettr(iteration_time_s, overhead_s, interval, recovery_s + 10, mtbf_s) < value


@pytest.mark.parametrize(
    ("mtbf_s", "overhead_s_per_iteration", "published"),
    [(7200, 0.07, 92), (3600, 0.09, 70), (1800, 0.19, 54), (600, 0.38, 31)],
)
def test_the_oracle_comes_within_a_third_of_the_intervals_published_for_gemini_and_deepseek_moe(
    mtbf_s: int, overhead_s_per_iteration: float, published: int
) -> None:
    # MoEvement Table 3; MoC's 13.65 s at 470 % give the iteration time. The measured overheads are rounded, and the
    # restart is not published.
    iteration_time_s = 13.65 / 4.70
    interval = gemini_oracle(iteration_time_s, overhead_s_per_iteration * published, mtbf_s, 1000)
    assert published / 1.34 <= interval <= published * 1.34


def test_the_oracle_takes_shorter_intervals_and_reaches_less_as_failures_become_frequent() -> None:
    intervals = [gemini_oracle(2.9, 6.4, mtbf_s, 1000) for mtbf_s in (600, 1200, 1800, 3600, 7200)]
    assert intervals == sorted(set(intervals))
    reached = [
        ettr(2.9, 6.4, interval, expected_recovery_s(2.9, interval), mtbf_s)
        for interval, mtbf_s in zip(intervals, (600, 1200, 1800, 3600, 7200), strict=True)
    ]
    assert reached == sorted(reached)


@settings(max_examples=60)
@given(st.floats(0.1, 10), st.floats(0.01, 100), st.floats(60, 10_000), st.integers(1, 300), st.floats(0, 600))
def test_no_interval_of_the_sweep_beats_the_oracle_and_none_before_it_equals_it(
    iteration_time_s: float, cost_s: float, mtbf_s: float, max_interval: int, restart_s: float
) -> None:
    best = gemini_oracle(iteration_time_s, cost_s, mtbf_s, max_interval, restart_s)
    qualities = [
        ettr(iteration_time_s, cost_s, interval, restart_s + interval * iteration_time_s / 2, mtbf_s)
        for interval in range(1, max_interval + 1)
    ]
    assert qualities.index(max(qualities)) == best - 1


def test_of_equally_good_intervals_the_oracle_takes_the_smallest() -> None:
    assert ettr(1.0, 1.0, 1, 0.5, 1.0) == ettr(1.0, 1.0, 2, 1.0, 1.0)
    assert gemini_oracle(1.0, 1.0, 1.0, 10) == 1


@settings(max_examples=60)
@given(st.floats(0.5, 10), st.floats(0.01, 50), st.floats(60, 2_000))
def test_without_a_restart_the_oracle_agrees_with_young(iteration_time_s: float, cost_s: float, mtbf_s: float) -> None:
    estimate = young(cost_s, mtbf_s) / iteration_time_s
    oracle = gemini_oracle(iteration_time_s, cost_s, mtbf_s, math.ceil(estimate) + 20)
    assert abs(oracle - max(1.0, estimate)) <= 1


@settings(max_examples=60)
@given(st.floats(0.5, 10), st.floats(0.01, 50), st.floats(60, 2_000), st.floats(1.1, 4))
def test_rarer_failures_never_shorten_the_interval_of_the_oracle(
    iteration_time_s: float, cost_s: float, mtbf_s: float, factor: float
) -> None:
    more = gemini_oracle(iteration_time_s, cost_s, mtbf_s * factor, 500)
    assert more >= gemini_oracle(iteration_time_s, cost_s, mtbf_s, 500)


@pytest.mark.parametrize(("snapshot_s", "beside_s", "overhead_s"), [(5.0, 3.0, 2.0), (3.0, 5.0, 0.0), (4.0, 4.0, 0.0)])
def test_saving_costs_what_outlasts_the_forward_and_backward_passes(
    snapshot_s: float, beside_s: float, overhead_s: float
) -> None:
    assert moc_save_overhead_s(snapshot_s, beside_s) == overhead_s


def test_the_overhead_of_a_run_sums_saving_restarts_and_lost_progress() -> None:
    assert RUN.expected_faults == 10.0
    # 50 checkpoints of 3 s; 10 faults, each with a restart and 10 lost iterations of 2 s.
    assert moc_overhead_s(3.0, 20, RUN) == 50 * 3.0 + 10 * (60.0 + 10 * 2.0)


@given(st.floats(0, 50), st.integers(1, 100), st.floats(0, 50), st.integers(1, 100), st.floats(0, 1000))
def test_restarts_and_length_of_the_run_never_decide_between_two_strategies(
    one_s: float, one_interval: int, other_s: float, other_interval: int, restart_s: float
) -> None:
    def per_iteration(save_s: float, interval: int) -> float:
        return save_s / interval + 0.01 * interval / 2 * 2.0  # MoC eq. 16, in seconds

    difference = per_iteration(one_s, one_interval) - per_iteration(other_s, other_interval)
    assume(abs(difference) > 1e-6)
    run = TrainingRun(iterations=500, iteration_time_s=2.0, faults_per_iteration=0.01, restart_s=restart_s)
    overheads = moc_overhead_s(one_s, one_interval, run), moc_overhead_s(other_s, other_interval, run)
    assert (overheads[0] > overheads[1]) == (difference > 0)


@pytest.mark.parametrize("bad", [-1.0, 0.0, NAN, INF, -INF])
def test_times_that_must_be_positive_are_refused_by_name(bad: float) -> None:
    for name, call in {
        "iteration_time_s": lambda: checkfreq_interval(bad, 1.0, 1.0),
        "max_overhead": lambda: checkfreq_interval(1.0, 1.0, 1.0, bad),
        "mtbf_s": lambda: young(1.0, bad),
    }.items():
        with pytest.raises(UsageError, match=rf"^{name} is {bad}, but must be a finite number greater than 0$"):
            call()
    for call in (
        lambda: daly(1.0, bad),
        lambda: in_iterations(1.0, bad),
        lambda: expected_recovery_s(bad, 1),
        lambda: ettr(bad, 1.0, 1, 1.0, 1.0),
        lambda: ettr(1.0, 1.0, 1, 1.0, bad),
        lambda: gemini_oracle(1.0, 1.0, bad, 5),
        lambda: TrainingRun(1, bad, 0.1, 1.0),
    ):
        with pytest.raises(UsageError, match="greater than 0"):
            call()


@pytest.mark.parametrize("bad", [-1.0, NAN, INF, -INF])
def test_times_that_may_be_zero_are_refused_by_name_when_negative_or_not_finite(bad: float) -> None:
    for name, call in {
        "stall_s": lambda: checkfreq_interval(1.0, bad, 1.0),
        "persist_time_s": lambda: checkfreq_interval(1.0, 1.0, bad),
        "checkpoint_cost_s": lambda: daly(bad, 1.0),
        "interval_s": lambda: in_iterations(bad, 1.0),
        "restart_s": lambda: expected_recovery_s(1.0, 1, bad),
        "checkpoint_overhead_s": lambda: ettr(1.0, bad, 1, 1.0, 1.0),
        "expected_recovery_s": lambda: ettr(1.0, 1.0, 1, bad, 1.0),
        "snapshot_s": lambda: moc_save_overhead_s(bad, 1.0),
        "forward_backward_s": lambda: moc_save_overhead_s(1.0, bad),
        "save_s": lambda: moc_overhead_s(bad, 1, RUN),
        "faults_per_iteration": lambda: TrainingRun(1, 1.0, bad, 1.0),
    }.items():
        with pytest.raises(UsageError, match=rf"^{name} is {bad}, but must be a finite number of at least 0$"):
            call()
    for call in (
        lambda: gemini_oracle(1.0, bad, 1.0, 5),
        lambda: gemini_oracle(1.0, 1.0, 1.0, 5, bad),
        lambda: TrainingRun(1, 1.0, 0.1, bad),
    ):
        with pytest.raises(UsageError, match="at least 0"):
            call()


@pytest.mark.parametrize("bad", [0, -3, 1.5, NAN])
def test_intervals_that_are_no_positive_whole_number_are_refused(bad: int) -> None:
    for name, call in {
        "interval": lambda: ettr(1.0, 1.0, bad, 1.0, 1.0),
        "max_interval": lambda: gemini_oracle(1.0, 1.0, 1.0, bad),
    }.items():
        with pytest.raises(UsageError, match=rf"^{name} is {bad}, but must be a whole number of at least 1$"):
            call()
    for call in (
        lambda: expected_recovery_s(1.0, bad),
        lambda: moc_overhead_s(1.0, bad, RUN),
    ):
        with pytest.raises(UsageError, match="whole number"):
            call()
