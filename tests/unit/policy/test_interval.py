"""Intervals between dense checkpoints: CheckFreq, Young, Daly, the oracle, and MoC's overhead."""

from __future__ import annotations

import math

import pytest
from effort import examples
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


@settings(max_examples=examples(60))
@given(st.floats(0.5, 10), st.floats(0.01, 50), st.floats(60, 2_000))
def test_without_a_restart_the_oracle_agrees_with_young(iteration_time_s: float, cost_s: float, mtbf_s: float) -> None:
    estimate = young(cost_s, mtbf_s) / iteration_time_s
    oracle = gemini_oracle(iteration_time_s, cost_s, mtbf_s, math.ceil(estimate) + 20)
    assert abs(oracle - max(1.0, estimate)) <= 1


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
