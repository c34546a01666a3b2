"""How jobs in the stock loop are refused, and how they end before their last iteration."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from runs import published
from stock_jobs import ALONE, FULL, ITERATIONS, KILLED, PAIR, SPARSE, StockJob
from stock_recording import as_version, under_a_launcher, without_seam, wrapped_by_another

REFUSED = {2}


def kept(job: StockJob) -> list[Path]:
    """Files of snapshots in memory."""
    return [path for path in job.memory.rglob("*") if path.is_file()]


@pytest.mark.ci
def test_a_job_that_ends_gives_its_memory_back(new_job, undisturbed) -> None:
    job = new_job(ALONE)
    job.run(*FULL)
    assert job.records() == undisturbed(ALONE)
    assert not kept(job)


@pytest.mark.ci
def test_a_job_that_is_killed_behind_its_last_checkpoint_ends_well_though_it_runs_iterations_again(
    new_job, undisturbed, tmp_path: Path
) -> None:
    flags = (*SPARSE, "--save", tmp_path, "--save-interval", 3, "--moe-ckpt-inject-fault", f"1@{ITERATIONS}:end")
    job = new_job(PAIR)
    job.run(*flags, codes={KILLED, 1})
    job.run(*flags)
    assert job.records() == undisturbed(PAIR)
    assert not job.began_again()


@pytest.mark.ci
def test_a_job_that_leaves_at_an_interval_says_so_and_continues_from_memory(
    new_job, undisturbed, tmp_path: Path
) -> None:
    job, launched = new_job(ALONE), partial(under_a_launcher, str(tmp_path))
    job.run(*FULL, "--exit-interval", 4, hooks=[launched])
    assert job.ran(0) == [1, 2, 3, 4]
    (tmp_path / "early").unlink()
    job.run(*FULL, "--exit-interval", 6, hooks=[launched])  # which is the last iteration
    assert job.ran(0)[4:] == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
    assert job.records() == undisturbed(ALONE)


def test_an_unprotected_job_that_leaves_at_an_interval_says_so(new_job, tmp_path: Path) -> None:
    new_job(ALONE).run("--exit-interval", 2, hooks=[partial(under_a_launcher, str(tmp_path))])
    assert (tmp_path / "early").is_file()


def test_a_job_that_finds_no_checkpoint_where_it_must_fails_in_one_line(new_job, tmp_path: Path) -> None:
    flags = (*FULL, "--load", tmp_path / "unmounted", "--exit-on-missing-checkpoint")
    outcome = new_job(ALONE).run(*flags, codes=REFUSED)
    (line,) = [line for line in outcome.lines if "nothing is trained without it" in line]
    assert f"--load {tmp_path}/unmounted: Megatron-LM found nothing there" in line
    assert "Traceback" not in outcome.said


@pytest.mark.full
def test_a_job_whose_replay_comes_to_where_it_had_to_leave_leaves_there(new_job, undisturbed, tmp_path: Path) -> None:
    """A stage that was parked stands behind it, and one that replays decides nothing."""
    job, fault, save = new_job(PAIR), ("--moe-ckpt-inject-fault", "1@5:step"), tmp_path / "save"
    flags = (*SPARSE, "--exit-interval", 5, "--save", save, "--save-interval", 1000, *fault)
    job.run(*flags, codes={KILLED, 1})
    outcome = job.run(*flags, hooks=[partial(under_a_launcher, str(tmp_path))])
    assert any("local rollback" in line for line in outcome.lines), outcome.said
    assert {job.ran(rank)[-1] for rank in range(2)} == {5}
    assert (save / "iter_0000005").is_dir() and (tmp_path / "early").is_file()
    job.run(*flags, "--load", save)
    assert job.records() == undisturbed(PAIR)


def test_a_job_that_is_told_to_end_continues_from_memory(new_job, undisturbed) -> None:
    job = new_job(ALONE)
    running = job.start(*FULL, "--exit-signal-handler")
    log = job.folder / "rank-0.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2)
    os.kill(running.process_id(0), signal.SIGTERM)
    outcome = running.wait()
    assert outcome.codes == (0,), outcome.said
    assert len(job.ran(0)) < ITERATIONS, "the signal came too late to show anything"
    job.run(*FULL)
    assert sorted(set(job.ran(0))) == job.ran(0), "no iteration ran twice"
    assert job.records() == undisturbed(ALONE)


@pytest.mark.ci
def test_a_signal_to_one_rank_makes_all_ranks_save_and_leave(new_job, tmp_path: Path) -> None:
    job = new_job(PAIR)
    saving = ("--save", tmp_path, "--save-interval", 1000)
    running = job.start(*FULL, *saving, "--exit-signal-handler", "--train-iters", 1000)
    log = job.folder / "rank-1.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2)
    os.kill(running.process_id(1), signal.SIGTERM)
    outcome = running.wait()
    assert outcome.codes == (0, 0), outcome.said
    last = job.ran(0)[-1]
    assert job.ran(1)[-1] == last < 1000
    assert published(tmp_path) == [last]


@pytest.mark.ci
def test_what_a_job_leaves_in_a_checkpoint_is_not_kept_in_memory(new_job, tmp_path: Path) -> None:
    job = new_job(ALONE)
    job.run(*FULL, "--exit-interval", 2, "--save", tmp_path, "--save-interval", 2)
    assert not kept(job)


@pytest.mark.full
def test_an_evaluation_in_the_killed_iteration_reads_its_samples_once(new_job) -> None:
    flags = ("--eval-iters", 2, "--eval-interval", 2)
    job, whole = new_job(ALONE), new_job(ALONE)
    whole.run(*FULL, *flags)
    fault = ("--moe-ckpt-inject-fault", "0@4:step")
    job.run(*FULL, *flags, *fault, codes={KILLED})
    job.run(*FULL, *flags, *fault)
    assert job.records() == whole.records()


@pytest.mark.parametrize("name", ["train_step", "training_log"])
def test_a_function_that_somebody_wrapped_first_is_refused_by_name(new_job, name: str) -> None:
    outcome = new_job(ALONE).run(*FULL, hooks=[partial(wrapped_by_another, name)], codes=REFUSED)
    assert f"megatron.training.training.{name} was replaced by" in outcome.said


def test_an_unknown_release_is_refused_before_anything_is_built(new_job) -> None:
    job = new_job(ALONE)
    outcome = job.run(*SPARSE, hooks=[partial(as_version, "0.99.0")], codes=REFUSED)
    assert "Megatron-Core 0.99.0 was never tested with" in outcome.said
    assert "number of parameters" not in outcome.said
    assert not kept(job)


def test_a_flag_that_breaks_the_promise_is_refused_before_anything_is_built(new_job) -> None:
    outcome = new_job(ALONE).run(*FULL, "--iterations-to-skip", 3, codes=REFUSED)
    assert "--iterations-to-skip 3 does not go with --moe-ckpt-strategy full" in outcome.said
    assert "number of parameters" not in outcome.said


def test_gloo_takes_the_interface_of_the_flag_or_refuses_it_in_one_line(new_job) -> None:
    refused = new_job(ALONE).run(*FULL, "--moe-ckpt-interface", "eth77", codes=REFUSED)
    (line,) = [line for line in refused.lines if "eth77" in line and "....." not in line]
    assert "rank 0: --moe-ckpt-interface eth77: this machine has no such interface" in line
    done = new_job(ALONE).run(*FULL, "--moe-ckpt-interface", "lo", "--moe-ckpt-transport", "process-group")
    assert "gloo uses interface lo (--moe-ckpt-interface)" in done.said
    assert "transport: process groups of gloo, staged on cpu" in done.said


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(("--seq-length", 64), "max_position_embeddings (32) must be greater", id="as-they-are-parsed"),
        pytest.param(("--moe-router-group-topk", 1), "moe_router_num_groups must be specified", id="with-the-model"),
    ],
)
def test_a_flag_that_megatron_refuses_is_told_in_one_line(new_job, flags, told: str) -> None:
    outcome = new_job(ALONE).run(*FULL, *flags, codes=REFUSED)
    (said,) = [line for line in outcome.lines if "invalid Megatron-LM arguments: " in line]
    assert told in said
    assert "Traceback" not in outcome.said


@pytest.mark.parametrize("name", ["train", pytest.param("checkpoint_and_decide_exit", marks=pytest.mark.full)])
def test_without_a_seam_a_killed_job_does_not_end_as_the_undisturbed_one(new_job, undisturbed, name: str) -> None:
    job, hooks = new_job(ALONE), [partial(without_seam, name)]
    job.start(*FULL, "--moe-ckpt-inject-fault", "0@5:forward-backward", hooks=hooks).wait_or_restart()
    outcome = job.start(*FULL, "--moe-ckpt-inject-fault", "0@5:forward-backward", hooks=hooks).wait_or_restart()
    assert job.ran(0).count(4) > 1 or set(outcome.codes) == {0}, outcome.said
    assert job.records() != undisturbed(ALONE)


def wait_until(happened, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)
