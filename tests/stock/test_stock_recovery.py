"""A job in the stock loop that is killed and started again comes to what it would have come to undisturbed."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from runs import differences, digest
from stock_jobs import ALONE, FOUR, FULL, HALF, ITERATIONS, KILLED, SCRIPT, SPARSE, TENSOR_PARALLEL, Records
from stock_recording import unprotected
from world import Outcome

from moe_ckpt.commands.main import commands

PEC = ("--moe-ckpt-strategy", "pec", "--moe-ckpt-pec-k-snapshot", "2", "--moe-ckpt-pec-k-persist", "1")
SELECTIVE = ("--moe-ckpt-strategy", "selective")
GLOBAL = (*SPARSE, "--moe-ckpt-recovery", "global")


def test_without_a_strategy_each_iteration_is_that_of_the_unwrapped_loop(new_job, undisturbed) -> None:
    job = new_job(FOUR)
    job.run("--moe-ckpt-strategy", "none")
    assert job.records() == undisturbed(FOUR)


@pytest.mark.parametrize(
    ("protection", "fault"),
    [
        pytest.param(FULL, "3@4:forward-backward", id="full-before-the-step"),
        pytest.param(FULL, "0@4:end", id="full-after-the-iteration", marks=pytest.mark.full),
        pytest.param(GLOBAL, "3@5:step", id="sparse-all-stages-replay"),
        pytest.param(SPARSE, "3@5:step", id="sparse-one-stage-replays"),
    ],
)
def test_a_killed_job_ends_as_the_undisturbed_one_to_the_last_bit(new_job, undisturbed, protection, fault) -> None:
    job = new_job(FOUR)
    job.run(*protection, "--moe-ckpt-inject-fault", fault, codes={KILLED, 1})
    job.run(*protection, "--moe-ckpt-inject-fault", fault)
    assert job.records() == undisturbed(FOUR)
    assert job.began_again() == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "protection"),
    [
        pytest.param(TENSOR_PARALLEL, SPARSE, id="tensor-parallel-sparse"),
        pytest.param(HALF, SPARSE, id="fp16-sparse"),
        pytest.param(TENSOR_PARALLEL, FULL, id="tensor-parallel-full"),
        pytest.param(HALF, FULL, id="fp16-full"),
    ],
)
def test_a_killed_job_of_another_layout_or_precision_ends_as_the_undisturbed_one(
    new_job, undisturbed, shape, protection
) -> None:
    """Interleaved stages are among the recipes."""
    job, fault = new_job(shape), ("--moe-ckpt-inject-fault", "3@5:step")
    job.run(*protection, *fault, codes={KILLED, 1})
    job.run(*protection, *fault)
    assert job.records() == undisturbed(shape)
    assert job.began_again() == []
    skipped = {record.get("skipped") for record in job.records().values()} - {None}
    assert skipped == ({True, False} if shape is HALF else {False})


@pytest.mark.ci
def test_a_script_of_a_users_own_ends_as_undisturbed_after_a_kill(new_job, undisturbed) -> None:
    job, fault = new_job(SCRIPT), ("--moe-ckpt-inject-fault", "0@4:step")
    job.run(*FULL, *fault, codes={KILLED})
    job.run(*FULL, *fault)
    assert job.ran(0) == [1, 2, 3, 4, 5, 6]
    assert job.records() == undisturbed(SCRIPT)


def test_only_the_struck_stage_replays(new_job) -> None:
    job, fault = new_job(FOUR), ("--moe-ckpt-inject-fault", "3@5:forward-backward")
    job.run(*SPARSE, *fault, codes={KILLED, 1})
    outcome = job.run(*SPARSE, *fault)
    assert any("local rollback" in line for line in outcome.lines), outcome.said
    waited, replayed = job.ran(0), job.ran(3)
    assert len(set(waited)) == len(waited), waited
    assert len(set(replayed)) < len(replayed), replayed


@contextlib.contextmanager
def sealed_snapshots(iteration: int) -> Iterator[None]:
    """The one after this iteration is sealed before the second iteration behind it begins, however busy the machine."""
    import megatron.training
    from megatron.training import training

    original = megatron.training.pretrain

    @functools.wraps(original)
    def pretrain(*arguments: Any, **options: Any) -> Any:
        step = training.train_step

        @functools.wraps(step)
        def train_step(*given: Any, **named: Any) -> Any:
            args, until_s = training.get_args(), time.monotonic() + 60
            while args.curr_iteration == iteration + 1 and time.monotonic() < until_s:
                if any(Path(args.moe_ckpt_memory_dir).rglob(f"*iter_{iteration:07d}*.json")):
                    break
                time.sleep(0.01)
            return step(*given, **named)

        with mock.patch.object(training, "train_step", train_step):
            return original(*arguments, **options)

    with mock.patch.object(megatron.training, "pretrain", pretrain):
        yield


def test_replayed_iterations_are_not_logged_again(new_job) -> None:
    job, fault = new_job(ALONE), ("--moe-ckpt-inject-fault", "0@5:step", "--log-interval", 1)
    job.run(*SPARSE, *fault, codes={KILLED}, hooks=[partial(sealed_snapshots, 3)])
    outcome = job.run(*SPARSE, *fault)
    logged = [int(line.split("iteration")[1].split("/")[0]) for line in outcome.lines if " iteration   " in line]
    assert logged == [5, 6], outcome.said


@pytest.mark.ci
def test_a_job_without_a_strategy_continues_from_its_checkpoint_where_core_alone_fails(
    new_job, undisturbed, tmp_path: Path
) -> None:
    """Without Transformer Engine core cannot load into an optimizer that has made no step yet."""

    def iterations(records: Records) -> Records:
        """Without the digest: in the stock loop each start draws seeds for data loaders, which nothing else uses."""
        return {at: record for at, record in records.items() if "end" not in at}

    job = new_job(FOUR)
    job.run("--save", tmp_path / "save", "--save-interval", 2, "--exit-interval", 2)
    job.run("--load", tmp_path / "save", codes={1}, hooks=[unprotected])
    job.run("--load", tmp_path / "save")
    assert job.ran(0) == list(range(1, ITERATIONS + 1))
    assert iterations(job.records()) == iterations(undisturbed(FOUR))


@pytest.mark.ci
@pytest.mark.parametrize(
    "protection", [pytest.param(FULL, id="full"), pytest.param(SPARSE, id="sparse", marks=pytest.mark.full)]
)
def test_a_killed_job_that_began_from_a_stock_checkpoint_ends_as_undisturbed(
    new_job, tmp_path: Path, protection
) -> None:
    save = tmp_path / "save"
    new_job(FOUR).run("--save", save, "--save-interval", 2, "--exit-interval", 2, hooks=[unprotected])
    alone = new_job(FOUR)
    alone.run("--load", save)
    job, fault = new_job(FOUR), ("--moe-ckpt-inject-fault", "3@5:forward-backward")
    job.run("--load", save, *protection, *fault, codes={KILLED, 1})
    job.run("--load", save, *protection, *fault)
    assert job.records() == alone.records()
    assert job.began_again() == []
    assert job.ran(0)[0] == 3
    assert job.ran(0)[-1] == ITERATIONS


@pytest.mark.ci
@pytest.mark.parametrize("off_s", [-86_400.0, pytest.param(1e8, marks=pytest.mark.full)], ids=["behind", "ahead"])
def test_a_start_whose_clock_is_off_continues_from_storage_and_so_does_the_one_after_it(
    new_job, undisturbed, tmp_path: Path, off_s: float
) -> None:
    job = new_job(ALONE)
    kept = (*FULL, "--moe-ckpt-persist-dir", tmp_path, "--moe-ckpt-persist-interval", 1, "--moe-ckpt-persist-keep", 9)
    for hooks, until in (([], 2), ([partial(clock_off, off_s)], 4), ([], ITERATIONS)):
        job.run(*kept, "--exit-interval", until, hooks=hooks)
        for left in job.memory.iterdir():
            shutil.rmtree(left)
    # Where storage is slow it may lack the last iteration of a start, but never all that the start before did not have.
    assert job.ran(0).count(3) == 1
    assert job.records() == undisturbed(ALONE)


@pytest.mark.full
@pytest.mark.parametrize("off_s", [-86_400.0, 1e8], ids=["behind", "ahead"])
@pytest.mark.parametrize("protection", [PEC, SELECTIVE, SPARSE], ids=lambda flags: flags[1])
def test_what_a_start_whose_clock_is_off_stored_is_kept_by_gc_and_taken_under_every_strategy(
    new_job, tmp_path: Path, protection: tuple[str, ...], off_s: float
) -> None:
    job = new_job(ALONE)
    kept = (
        *protection,
        "--moe-ckpt-persist-dir",
        tmp_path,
        "--moe-ckpt-persist-interval",
        1,
        "--moe-ckpt-persist-keep",
        9,
    )
    newest = 0
    for hooks, until in (([], 2), ([partial(clock_off, off_s)], 4), ([], ITERATIONS)):
        outcome = job.run(*kept, "--exit-interval", until, hooks=hooks)
        assert not newest or f"recovered iteration {newest} " in outcome.said
        for left in job.memory.iterdir():
            shutil.rmtree(left)
        stored = newest_stored(tmp_path)
        assert stored > newest
        newest = stored
        CliRunner().invoke(commands, ["gc", str(tmp_path), "--keep-last", "1", "--idle", "0s", "--apply"])
        assert newest_stored(tmp_path) == newest


def newest_stored(folder: Path) -> int:
    """The newest iteration that can be restored, as `moe-ckpt verify` says."""
    said = json.loads(CliRunner().invoke(commands, ["verify", str(folder), "--json"]).stdout)["newest_state"]
    return int(said.split()[-1])


@contextlib.contextmanager
def clock_off(seconds: float) -> Iterator[None]:
    """The clock of the day, of this process."""
    time_s, time_ns = time.time, time.time_ns

    def set_s() -> float:
        return time_s() + seconds

    def set_ns() -> int:
        return time_ns() + int(seconds * 1e9)

    with mock.patch.object(time, "time", set_s), mock.patch.object(time, "time_ns", set_ns):
        yield


@dataclass(frozen=True)
class MadeUp:
    """What the undisturbed loop and a killed job came to, and said; and where both saved."""

    whole: tuple[Records, list[str], Path]
    recovered: tuple[Records, list[str], Path]


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="evaluated-each-time"), pytest.param(5, id="evaluated-once", marks=pytest.mark.full)],
)
def made_up(new_job, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> MadeUp:
    """One rank dies behind its step of iteration 5, before it evaluates and saves; the others are put aside there."""
    flags, fault = ("--eval-iters", 2, "--save-interval", 5), ("--moe-ckpt-inject-fault", "3@5:step")
    whole, job, folder = new_job(FOUR), new_job(FOUR), tmp_path_factory.mktemp("saved")
    flags = (*flags, "--eval-interval", request.param)
    alone = whole.run(*flags, "--save", folder / "whole", hooks=[unprotected])
    attempts = [job.run(*SPARSE, *flags, "--save", folder / "job", *fault, codes={KILLED, 1})]
    assert not (folder / "job" / "iter_0000005").exists()
    attempts.append(job.run(*SPARSE, *flags, "--save", folder / "job", *fault))
    return MadeUp(
        (whole.records(), evaluations(alone), folder / "whole"),
        (job.records(), evaluations(*attempts), folder / "job"),
    )


def evaluations(*attempts: Outcome) -> list[str]:
    """What was said of validation data, in its order."""
    return [
        line for each in attempts for line in each.lines if re.search(r"validation loss at|on validation set", line)
    ]


@pytest.mark.ci
def test_an_evaluation_that_the_fault_kept_from_reads_what_the_undisturbed_one_reads(made_up: MadeUp) -> None:
    (records, evaluated, _), (recovered, made, _) = made_up.whole, made_up.recovered
    assert made == evaluated
    assert any("iteration 5 |" in line for line in made), made
    assert recovered == records


@pytest.mark.ci
def test_a_save_that_the_fault_kept_from_has_the_bits_of_the_undisturbed_one(made_up: MadeUp) -> None:
    (*_, whole), (*_, job) = made_up.whole, made_up.recovered
    assert not differences(digest(job, 5), digest(whole, 5))


def test_flags_that_would_change_a_replayed_iteration_are_refused_with_what_they_were(new_job, undisturbed) -> None:
    job, fault = new_job(ALONE), ("--moe-ckpt-inject-fault", "0@5:step")
    job.run(*SPARSE, *fault, codes={KILLED})
    outcome = job.run(*SPARSE, *fault, "--clip-grad", 0.25, codes={2})
    (said,) = [line for line in outcome.lines if "--clip-grad" in line]
    assert "run again as they were, but --clip-grad was 0.5 and is 0.25: start with the flags of before" in said
    job.run(*SPARSE, *fault)
    assert job.records() == undisturbed(ALONE)
    assert not job.began_again()


@contextlib.contextmanager
def on_a_host_called(name: str) -> Iterator[None]:
    with mock.patch.object(socket, "gethostname", return_value=name):
        yield


@pytest.mark.ci
def test_a_machine_that_has_another_name_after_the_fault_finds_its_memory(new_job) -> None:
    job, fault = new_job(ALONE), ("--moe-ckpt-inject-fault", "0@4:end")
    job.run(*FULL, *fault, hooks=[partial(on_a_host_called, "before")], codes={KILLED})
    back = job.run(*FULL, *fault, hooks=[partial(on_a_host_called, "after")])
    assert "recovered iteration" in back.said and "under the name before is that of after" in back.said
    assert not list(job.memory.glob("before"))
