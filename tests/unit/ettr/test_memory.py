"""Host memory: the published footprints, and what they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.dist_checkpointing.moe.policy.window import joint_schedules, merge
from megatron.core.dist_checkpointing.moe.types import PRECISIONS
from moe_ckpt.simulator.memory import logged_iterations, memory_of
from moe_ckpt.simulator.shards import owned_operators, shard_sizes
from reproduce.evaluation import windows_by_count
from reproduce.jobs import azure_job

# What two replicas of a snapshot may take of a rank's share of the network, in the part of an iteration that is left.
BUDGET = {"MoE-LLaVa": 270_000_000, "GPT-MoE": 450_000_000, "DeepSeek-MoE": 810_000_000}


@pytest.mark.parametrize(
    ("model", "gemini_gb", "total_gb"),
    [("MoE-LLaVa", 75.4, 83.1), ("GPT-MoE", 189.8, 209.4), ("DeepSeek-MoE", 426.4, 499.8)],
)
def test_the_published_footprints_are_met_within_five_per_cent(model: str, gemini_gb: float, total_gb: float) -> None:
    job = azure_job(model)
    use = memory_of(job, windows_by_count(job, BUDGET[model]))
    assert use.gemini_bytes / 1e9 == pytest.approx(gemini_gb, rel=0.025)
    assert use.total_bytes / 1e9 == pytest.approx(total_gb, rel=0.05)


def test_a_dense_checkpoint_has_twelve_bytes_per_parameter_twice_and_two_once() -> None:
    job = azure_job("DeepSeek-MoE")
    whole = memory_of(job, windows_by_count(job, 10**12))
    assert whole.gemini_bytes == 26 * job.shape.total_parameters
    assert whole.sparse_bytes == whole.gemini_bytes


def test_a_longer_window_holds_more_weights_and_more_logs() -> None:
    job = azure_job("DeepSeek-MoE")
    short, long = (memory_of(job, windows_by_count(job, budget)) for budget in (1_500_000_000, 810_000_000))
    assert long.sparse_bytes > short.sparse_bytes
    assert long.log_bytes > short.log_bytes


def test_narrow_states_take_less() -> None:
    job = azure_job("DeepSeek-MoE")
    narrow = replace(job, precision=PRECISIONS["fp8-fp8"])
    assert (
        memory_of(narrow, windows_by_count(narrow, 810_000_000)).gemini_bytes
        == (2 * 4 + 1) * job.shape.total_parameters
    )


def test_logs_reach_back_to_the_first_snapshot_of_the_window_before() -> None:
    assert [logged_iterations(size) for size in (1, 3, 6)] == [1, 5, 11]


def test_a_rank_logs_what_it_sends_in_both_directions() -> None:
    job = azure_job("DeepSeek-MoE")
    use = memory_of(job, windows_by_count(job, 10**12))
    tensor = 4 * 2048 * 2048 * 2
    assert use.log_bytes == 2 * 16 * tensor


def test_one_window_of_the_whole_job_counts_as_those_of_its_lanes() -> None:
    job = azure_job("DeepSeek-MoE")
    sizes = shard_sizes(job.shape, job.topology, job.precision)
    lanes = joint_schedules(owned_operators(job.shape, job.topology), sizes, int(0.81e9))
    by_lane = memory_of(job, {lane: schedule.window for lane, schedule in lanes.items()})
    assert memory_of(job, merge(lanes)) == by_lane
