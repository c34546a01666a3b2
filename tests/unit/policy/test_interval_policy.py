"""When snapshots are due."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig, add_flags
from megatron.core.dist_checkpointing.moe.contradictions import contradictions
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


def test_a_resumed_run_continues_in_the_rhythm_of_the_one_before() -> None:
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


AUTO = IntervalPolicy.of(MoECheckpointConfig(strategy="full", interval="auto"))


def after(policy: IntervalPolicy, *measured: Costs) -> IntervalPolicy:
    for costs in measured:
        policy = policy.on_costs(costs)
    return policy


@pytest.mark.parametrize(
    ("costs", "interval"),
    [
        (Costs(1.0, 0.0, 0.1), 1),
        (Costs(1.0, 0.004, 0.1, slowed_s=0.005), 1),
        (Costs(1.0, 0.006, 0.1, slowed_s=0.006), 2),
        (Costs(1.0, 0.0, 0.1, slowed_s=0.08), 8),
        (Costs(0.5, 0.03, 0.1), 6),
        (Costs(1.0, 0.0, 3.2), 4),
    ],
)
def test_auto_takes_the_smallest_interval_that_costs_one_percent_and_lets_replicas_arrive(
    costs: Costs, interval: int
) -> None:
    assert after(AUTO, *[costs] * 5).interval == interval


def test_auto_leaves_iterations_without_a_copy_until_it_knows_what_copies_cost() -> None:
    assert due_iterations(after(AUTO, *[Costs(1.0, 0.0, 0.1)] * 4), range(1, 9)) == [2, 4, 6, 8]
    before = after(AUTO, *[Costs(1.0, 0.0, 0.1)] * 5)
    assert before.interval == 1
    resumed = AUTO.from_data(json.loads(json.dumps(before.to_data())))
    assert resumed.interval == 2, "a new process has measured no pass without a copy"
    assert AUTO.from_data(IntervalPolicy(9).to_data()).interval == 9


def test_one_slow_iteration_does_not_change_what_auto_chooses_and_neither_does_a_little_less_cost() -> None:
    usual, slow = Costs(1.0, 0.0, 0.1, slowed_s=0.04), Costs(1.0, 2.0, 9.0, slowed_s=3.0)
    policy = after(AUTO, usual, slow, usual, slow, usual)
    assert policy.interval == 4
    assert after(policy, *[replace(usual, slowed_s=0.03)] * 5).interval == 4
    assert after(policy, *[replace(usual, slowed_s=0.02)] * 5).interval == 2
    assert after(policy, *[replace(usual, slowed_s=0.05)] * 5).interval == 5


def test_auto_tells_each_choice_once() -> None:
    policy, said = AUTO, []
    for slowed_s in [0.04] * 10 + [0.09] * 5:
        line, policy = policy.on_costs(Costs(1.0, 0.001, 0.25, slowed_s=slowed_s)).taken()
        said += [line] if line else []
    assert said == [
        "interval: 5 (auto; iteration=1 s stall=1 ms slowdown=40 ms replication=0.25 s overhead=0.82%)",
        "interval: 10 (auto; iteration=1 s stall=1 ms slowdown=90 ms replication=0.25 s overhead=0.91%)",
    ]


def test_the_interval_on_the_command_line_is_a_number_or_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert MoECheckpointConfig.from_argv(["--moe-ckpt-interval", "auto"]).interval == "auto"
    assert MoECheckpointConfig.from_argv(["--moe-ckpt-interval", "7"]).interval == 7
    parser = argparse.ArgumentParser()
    add_flags(parser, MoECheckpointConfig, "checkpoints", prefix=MoECheckpointConfig.PREFIX)
    with pytest.raises(SystemExit):
        parser.parse_args(["--moe-ckpt-interval", "often"])
    assert "argument --moe-ckpt-interval: invalid auto|int value: 'often'" in capsys.readouterr().err


def refused(**settings: Any) -> str:
    config = MoECheckpointConfig(**settings)
    return "; ".join(contradictions(config, world_size=4, num_experts=8, use_distributed_optimizer=False, stages=1))


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"interval_policy": "checkfreq"}, "both choose the interval"),
        ({"elastic": "1:2"}, "needs a fixed interval: give --moe-ckpt-interval N"),
        ({"strategy": "sparse"}, "--moe-ckpt-interval auto has no meaning with --moe-ckpt-strategy sparse"),
        (
            {"replicate": "gradients", "replicas": 1},
            "needs a snapshot after each step, but has --moe-ckpt-interval auto",
        ),
    ],
)
def test_auto_is_refused_where_the_interval_is_not_free(others: dict[str, Any], said: str) -> None:
    assert said in refused(**{"strategy": "full", "interval": "auto", **others})


@pytest.mark.parametrize("policy", ["checkfreq", "young", "daly"])
def test_an_elastic_job_needs_an_interval_that_stays(policy: str) -> None:
    said = f"--moe-ckpt-elastic 1:2 needs a fixed interval: give --moe-ckpt-interval-policy fixed, not {policy}"
    assert said in refused(strategy="full", elastic="1:2", interval_policy=policy, mtbf_s=3600.0)
    assert "fixed" not in refused(strategy="full", elastic="1:2", interval=7)
