"""When snapshots are due."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.strategies import Costs
from megatron.core.dist_checkpointing.moe.strategies.interval_policy import IntervalPolicy


def due_iterations(interval_policy: IntervalPolicy, asked: range) -> list[int]:
    found = []
    for iteration in asked:
        due, interval_policy = interval_policy.due(iteration)
        found += [iteration] if due else []
    return found


def test_a_fixed_interval_falls_on_its_multiples() -> None:
    assert due_iterations(IntervalPolicy(3), range(1, 10)) == [3, 6, 9]


def test_a_snapshot_that_had_to_wait_is_taken_late_and_the_next_one_in_time() -> None:
    interval_policy = IntervalPolicy(3)
    assert [iteration for iteration in due_iterations(interval_policy, range(5, 10))] == [5, 6, 9]


def test_persistent_snapshots_have_an_interval_of_their_own() -> None:
    interval_policy, found = IntervalPolicy(2, persist_interval=5), []
    for iteration in range(2, 21, 2):
        due, interval_policy = interval_policy.persist_due(iteration)
        found += [iteration] if due else []
    assert found == [6, 10, 16, 20]


def test_without_a_folder_nothing_becomes_persistent() -> None:
    interval_policy = IntervalPolicy.of(MoECheckpointConfig(strategy="full", persist_interval=1))
    assert not interval_policy.persist_due(100)[0]


def test_checkfreq_keeps_the_stall_at_three_percent() -> None:
    interval_policy = IntervalPolicy(1, adapting="checkfreq").on_costs(Costs(iteration_s=1.0, stall_s=0.3, round_s=0.5))
    assert interval_policy.interval == 10


def test_no_snapshot_is_due_before_the_round_of_the_one_before_can_end() -> None:
    costs = Costs(iteration_s=1.0, stall_s=0.0, round_s=7.5)
    assert IntervalPolicy(1, adapting="young", mtbf_s=100.0).on_costs(costs).interval == 8
    assert IntervalPolicy(1, adapting="checkfreq").on_costs(costs).interval == 8


@pytest.mark.parametrize(("rule", "interval"), [("young", 20), ("daly", 20)])
def test_young_and_daly_weigh_the_stall_against_the_failures(rule: str, interval: int) -> None:
    # sqrt(2 x 0.2 x 1000) = 20 s of training, less than a second apart in both estimates
    interval_policy = IntervalPolicy(1, adapting=rule, mtbf_s=1000.0).on_costs(
        Costs(iteration_s=1.0, stall_s=0.2, round_s=0.0)
    )
    assert interval_policy.interval == interval


def test_a_fixed_interval_stays_whatever_it_costs() -> None:
    assert IntervalPolicy(3).on_costs(Costs(1.0, 9.0, 9.0)).interval == 3


def test_a_resumed_run_goes_on_in_the_rhythm_of_the_one_before() -> None:
    _, before = IntervalPolicy(4, persist_interval=8, adapting="checkfreq", last=12).due(16)
    after = IntervalPolicy(1, persist_interval=8, adapting="checkfreq").from_data(before.to_data())
    assert after == before
    assert IntervalPolicy(7).from_data(before.to_data()).interval == 7, "a fixed interval is that of the flags"


def test_with_checkfreq_storage_gets_a_snapshot_as_soon_as_the_write_before_has_ended() -> None:
    policy = IntervalPolicy.of(MoECheckpointConfig(interval_policy="checkfreq", persist_dir="/x", persist_interval=50))
    assert policy.on_costs(Costs(1.0, 0.0, 0.1)).persist_interval == 50, "nothing has been written yet"
    measured = policy.on_costs(Costs(1.0, 0.0, 0.1, persist_s=6.5))
    assert (measured.interval, measured.persist_interval) == (1, 7)
    written = replace(measured, last_persistent=50)
    assert [written.persist_due(iteration)[0] for iteration in (56, 57)] == [False, True]
    resumed = policy.from_data(json.loads(json.dumps(written.to_data())))
    assert resumed == written


def test_a_fixed_rhythm_of_storage_stays_whatever_writes_take() -> None:
    policy = IntervalPolicy.of(MoECheckpointConfig(persist_dir="/x", persist_interval=50))
    assert policy.on_costs(Costs(1.0, 0.0, 0.1, persist_s=6.5)) == policy
