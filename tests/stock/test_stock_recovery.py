"""A job in the stock loop that is killed and started again comes to what it would have come to undisturbed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from stock_jobs import ALONE, FOUR, ITERATIONS
from stock_recording import unprotected

KILLED = -signal.SIGKILL
FULL = ("--moe-ckpt-strategy", "full")
SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "2")
GLOBAL = (*SPARSE, "--moe-ckpt-recovery", "global")


def test_without_a_strategy_each_iteration_is_that_of_the_unwrapped_loop(new_job, undisturbed) -> None:
    job = new_job(FOUR)
    job.run("--moe-ckpt-strategy", "none")
    assert job.records() == undisturbed(FOUR)


@pytest.mark.parametrize(
    ("protection", "fault"),
    [
        pytest.param(FULL, "3@4:forward-backward", id="full-before-the-step"),
        pytest.param(FULL, "0@4:end", id="full-after-the-iteration"),
        pytest.param(GLOBAL, "3@5:step", id="sparse-all-stages-replay"),
        pytest.param(SPARSE, "3@5:step", id="sparse-one-stage-replays"),
    ],
)
def test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit(new_job, undisturbed, protection, fault) -> None:
    job = new_job(FOUR)
    job.run(*protection, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    job.run(*protection, "--moe-ckpt-inject-fault", fault)
    assert job.records() == undisturbed(FOUR)


def test_only_the_struck_stage_replays(new_job) -> None:
    job, fault = new_job(FOUR), ("--moe-ckpt-inject-fault", "3@5:forward-backward")
    job.run(*SPARSE, *fault, codes={KILLED, 1})
    outcome = job.run(*SPARSE, *fault)
    assert any("local rollback" in line for line in outcome.lines), outcome.said
    waited, replayed = job.ran(0), job.ran(3)
    assert len(set(waited)) == len(waited), waited
    assert len(set(replayed)) < len(replayed), replayed


def test_replayed_iterations_are_not_logged_again(new_job) -> None:
    job, fault = new_job(ALONE), ("--moe-ckpt-inject-fault", "0@5:step")
    job.run(*SPARSE, *fault, codes={KILLED})
    outcome = job.run(*SPARSE, *fault)
    logged = [int(line.split("iteration")[1].split("/")[0]) for line in outcome.lines if " iteration   " in line]
    assert logged == [5, 6], outcome.said


@pytest.mark.parametrize("protection", [FULL, SPARSE], ids=["full", "sparse"])
def test_a_killed_job_that_began_from_a_stock_checkpoint_ends_as_undisturbed(
    new_job, tmp_path: Path, protection
) -> None:
    save = tmp_path / "save"
    new_job(FOUR).run("--save", save, "--save-interval", 2, "--exit-interval", 2, hooks=[unprotected])
    alone = new_job(FOUR)
    # Not unprotected: without Transformer Engine core cannot load into an optimizer that has made no step yet.
    alone.run("--load", save, *FULL)
    job, fault = new_job(FOUR), ("--moe-ckpt-inject-fault", "3@5:forward-backward")
    job.run("--load", save, *protection, *fault, codes={KILLED, 1})
    job.run("--load", save, *protection, *fault)
    assert job.records() == alone.records()
    assert job.ran(0)[0] == 3
    assert job.ran(0)[-1] == ITERATIONS
