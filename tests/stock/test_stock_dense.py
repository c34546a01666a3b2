"""Checkpoints that the stock loop saves while it is protected: published whole, and loaded only as they were saved."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from effort import cases
from runs import differences, digest
from stock_jobs import ALONE, FOUR, FULL, KILLED, PAIR, Records, Shape
from stock_recording import (
    forked_writer,
    full_disk,
    killed_while_it_saves,
    no_access_to_folder,
    no_memory_to_stage,
    unprotected,
    written_late,
)
from world import Hook, Outcome

from megatron.core.dist_checkpointing.moe.storage.lease_files import LEASE
from megatron.core.dist_checkpointing.moe.storage.manifest import KEYED, use_secret
from moe_ckpt.commands.main import commands
from moe_ckpt.dense.integrity import NAME, check, seal
from moe_ckpt.dense.names import TRACKER

ASYNC = ("--async-save", "--async-strategy", "mcore")
SPREAD = Shape(ranks=2, pp=1, ep=2)
OVERLAPPED = Shape(ranks=2, pp=1, ep=2, more=("--bf16", "--overlap-grad-reduce", "--overlap-param-gather"))
SECRET = b"the secret of this job, which nobody else knows"


@pytest.fixture(scope="module")
def original(new_job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of iterations 2 and 4 of a job of one rank."""
    folder = tmp_path_factory.mktemp("original")
    new_job(ALONE).run(*FULL, "--save", folder, "--save-interval", 2, "--exit-interval", 4)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy of `original` to damage."""
    return shutil.copytree(original, tmp_path / "saved")


@pytest.fixture(scope="module")
def resumed(new_job, original: Path) -> Records:
    """What a job comes to that resumes from iteration 2 by name."""
    job = new_job(ALONE)
    job.run(*FULL, "--load", original, "--ckpt-step", 2)
    return job.records()


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    yield file
    use_secret(None)


def published(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir() if path.name != LEASE)


def shard(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def verified(*arguments: object) -> str:
    result = CliRunner().invoke(commands, ["verify", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refusal(outcome: Outcome) -> str:
    """The one line that says that a checkpoint was refused."""
    (line,) = [line for line in outcome.lines if "refused" in line or "no usable checkpoint" in line]
    assert "Traceback" not in outcome.said
    return line


@pytest.mark.ci
def test_what_is_saved_has_sums_of_all_its_files_and_is_that_of_the_unprotected_loop(new_job, tmp_path: Path) -> None:
    plain, save = tmp_path / "plain", tmp_path / "save"
    flags = ("--save-interval", 2, "--exit-interval", 4, "--ckpt-fully-parallel-save", "--verify-integrity")
    new_job(SPREAD).run(*flags, "--save", plain, hooks=[unprotected])
    new_job(SPREAD).run(*flags, "--save", save, *FULL)
    assert_saved_as(plain, save)
    folder = save / "iter_0000004"
    hashed = json.loads((folder / "integrity.json").read_text())["files"]
    assert {*hashed, "integrity.json", NAME} == {path.name for path in folder.iterdir()}


@pytest.mark.ci
def test_a_background_save_holds_the_step_it_was_asked_for_though_training_continued(new_job, tmp_path: Path) -> None:
    plain, save, unprotected_job, job = tmp_path / "plain", tmp_path / "save", new_job(OVERLAPPED), new_job(OVERLAPPED)
    flags = ("--save-interval", 2, "--exit-interval", 4, "--ckpt-fully-parallel-save")
    unprotected_job.run(*flags, "--save", plain, hooks=[unprotected])
    job.run(*flags, *ASYNC, "--save", save, *FULL, hooks=[forked_writer, partial(written_late, str(job.folder), 2)])
    assert_saved_as(plain, save)
    assert job.records() == unprotected_job.records()


def assert_saved_as(plain: Path, save: Path) -> None:
    """Iterations 2 and 4 were saved with their sums, and hold what the unprotected loop saved."""
    assert published(save) == ["iter_0000002", "iter_0000004", TRACKER]
    for iteration in (2, 4):
        folder = save / f"iter_{iteration:07d}"
        assert check(folder) == ()
        assert {path.name for path in folder.iterdir()} == {path.name for path in plain.glob("iter_0000004/*")} | {NAME}
        assert differences(digest(plain, iteration), digest(save, iteration)) == []
    assert "iter_0000004" in verified(save)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit-flipped": lambda folder: flip(shard(folder)),
    "torn": lambda folder: truncate(shard(folder)),
    "shard-missing": lambda folder: shard(folder).unlink(),
    "index-flipped": lambda folder: flip(folder / ".metadata"),
    "format-missing": lambda folder: (folder / "metadata.json").unlink(),
    "sums-missing": lambda folder: (folder / NAME).unlink(),
    "sums-flipped": lambda folder: flip(folder / NAME),
    "folder-missing": shutil.rmtree,
}
ALIKE = ("shard-missing", "format-missing", "sums-flipped")
"""Found as a folder that is missing and a shard that is flipped are; `test_integrity.py` has each file."""


@pytest.mark.parametrize("damage", cases(DAMAGE, fast=("bit-flipped", "torn"), full=ALIKE))
def test_a_damaged_checkpoint_is_refused_by_file_name_and_the_one_before_is_loaded(
    damage: str, new_job, saved: Path, resumed: Records
) -> None:
    folder = saved / "iter_0000004"
    before = set(folder.iterdir())
    DAMAGE[damage](folder)
    gone = before - set(folder.iterdir()) if folder.exists() else {folder}
    job = new_job(ALONE)
    line = refusal(job.run(*FULL, "--load", saved))
    assert f"loading {saved / 'iter_0000002'} in its place; refused iter_0000004: {folder}" in line
    assert all(str(path) in line for path in gone)
    if "flipped" in damage or damage == "torn":
        named = {"index-flipped": ".metadata", "sums-flipped": NAME}.get(damage, "distcp")
        assert named in line
    assert job.ran(0) == [3, 4, 5, 6]
    assert job.records() == resumed


@pytest.mark.ci
def test_all_ranks_take_the_checkpoint_before_two_damaged_ones(new_job, tmp_path: Path) -> None:
    new_job(PAIR).run(*FULL, "--save", tmp_path, "--save-interval", 1, "--exit-interval", 4)
    flip(tmp_path / "iter_0000004" / "__1_0.distcp")
    (tmp_path / "iter_0000003" / ".metadata").unlink()
    asked, job = new_job(PAIR), new_job(PAIR)
    asked.run(*FULL, "--load", tmp_path, "--ckpt-step", 2)
    line = refusal(job.run(*FULL, "--load", tmp_path))
    assert "iter_0000004/__1_0.distcp is damaged" in line
    assert f"; iter_0000003: {tmp_path / 'iter_0000003'}" in line
    assert {tuple(job.ran(rank)) for rank in range(2)} == {(3, 4, 5, 6)}
    assert job.records() == asked.records()


def test_without_an_intact_checkpoint_the_job_ends_with_a_line_and_trains_nothing(new_job, saved: Path) -> None:
    for folder in saved.glob("iter_*"):
        flip(shard(folder))
    job = new_job(ALONE)
    line = refusal(job.run(*FULL, "--load", saved, codes={2}))
    assert f"--load {saved}: no usable checkpoint; iter_0000004: {shard(saved / 'iter_0000004')} is damaged" in line
    assert "nothing was loaded" in line
    assert not (job.folder / "rank-0.jsonl").exists()


@pytest.mark.ci
def test_a_job_goes_back_once_and_on_from_there_at_its_next_start(new_job, saved: Path, resumed: Records) -> None:
    job = new_job(ALONE)
    back = (*FULL, "--load", saved, "--save", saved, "--save-interval", 10, "--ckpt-step", 2)
    said = job.run(*back, "--exit-interval", 3).said
    assert f"training goes back to iteration 2: 4 in {saved} are left" in said
    said = job.run(*back).said
    assert f"--ckpt-step 2 was followed by an earlier start (stock-{job.memory.name}): " in said
    assert job.ran(0) == [3, 4, 5, 6]
    assert job.records() == resumed


def test_a_damaged_checkpoint_that_was_asked_for_is_not_replaced(new_job, saved: Path) -> None:
    def refused() -> str:
        job = new_job(ALONE)
        line = refusal(job.run(*FULL, "--load", saved, "--ckpt-step", 4, codes={2}))
        assert not (job.folder / "rank-0.jsonl").exists()
        return line

    folder = saved / "iter_0000004"
    flip(shard(folder))
    assert f"iter_0000004: {shard(folder)} is damaged" in refused()
    shutil.rmtree(folder)
    assert f"iter_0000004: {folder} is missing" in refused()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        pytest.param(("--hidden-size", 64), "Global shape mismatch for loaded (torch.Size([2, 32]))", id="shapes"),
        pytest.param(("--num-attention-heads", 8), "num_attention_heads value from checkpoint (4)", id="model"),
        pytest.param(("--lr-decay-iters", 9), " do not match", id="schedules"),
    ],
)
def test_flags_that_are_not_those_of_the_checkpoint_are_refused_in_one_line(
    flags: tuple[object, ...], told: str, new_job, original: Path
) -> None:
    outcome = new_job(ALONE).run(*FULL, "--load", original, *flags, codes={2})
    (line,) = [line for line in outcome.lines if told in line]
    assert "; load it into the model" in line or "or --override-opt_param-scheduler" in line
    assert "Traceback" not in outcome.said


@pytest.mark.full
def test_a_checkpoint_of_the_unprotected_loop_is_loaded_and_that_is_said(new_job, tmp_path: Path) -> None:
    new_job(ALONE).run("--save", tmp_path, "--save-interval", 2, "--exit-interval", 2, hooks=[unprotected])
    outcome = new_job(ALONE).run(*FULL, "--load", tmp_path)
    said = f"{tmp_path / 'iter_0000002'} has no {NAME}: it is loaded without being verified"
    assert len([line for line in outcome.lines if said in line]) == 1


def test_without_a_strategy_megatron_saves_and_loads_as_it_is(new_job, saved: Path, tmp_path: Path) -> None:
    flip(shard(saved / "iter_0000004"))
    outcome = new_job(ALONE).run("--load", saved, "--save", tmp_path / "save", "--save-interval", 5)
    assert "successfully loaded checkpoint" in outcome.said
    assert "damaged" not in outcome.said
    assert not (tmp_path / "save" / "iter_0000005" / NAME).exists()


def test_a_release_is_loaded_as_megatron_loads_it_and_a_torn_one_is_refused_by_name(new_job, saved: Path) -> None:
    released, alone, job = saved / "release", new_job(ALONE), new_job(ALONE)
    shutil.rmtree(saved / "iter_0000002")
    (saved / "iter_0000004").rename(released)
    (saved / TRACKER).write_text("release\n")
    alone.run("--load", saved, hooks=[unprotected])
    job.run(*FULL, "--load", saved, "--save", saved, "--save-interval", 6)
    assert job.ran(0) == [1, 2, 3, 4, 5, 6]
    assert job.records() == alone.records()
    assert published(saved) == ["iter_0000006", TRACKER, "release"]
    assert (saved / TRACKER).read_text() == "6"
    (saved / TRACKER).write_text("release\n")
    shard(released).unlink()
    line = refusal(new_job(ALONE).run(*FULL, "--load", saved, codes={2}))
    assert "no usable checkpoint; release: " in line and "nothing was loaded" in line


@pytest.mark.ci
def test_with_a_secret_only_what_was_made_with_it_is_loaded(new_job, tmp_path: Path, secret: Path) -> None:
    save, signing = tmp_path / "save", (*FULL, "--moe-ckpt-secret-file", secret)
    new_job(ALONE).run(
        *signing, *ASYNC, "--save", save, "--save-interval", 2, "--exit-interval", 4, hooks=[forked_writer]
    )
    newest = save / "iter_0000004"
    assert all((save / name / NAME).read_bytes().startswith(KEYED) for name in ("iter_0000002", newest.name))
    flip(shard(newest))
    forge(newest, None)
    assert f"refused iter_0000004: {newest / NAME}: it is not sealed with this job's secret" in refusal(
        new_job(ALONE).run(*signing, "--load", save)
    )
    forge(newest, b"another secret, of somebody else")
    line = refusal(new_job(ALONE).run(*signing, "--load", save))
    assert f"refused iter_0000004: {newest / NAME} does not match its checksum: it is damaged, forged, or of" in line
    (newest / NAME).unlink()
    assert "it is not signed, and anybody may have made it" in refusal(new_job(ALONE).run(*signing, "--load", save))


@pytest.mark.ci
def test_a_job_with_a_secret_loads_what_was_saved_without_one_once_it_is_signed(
    new_job, saved: Path, secret: Path
) -> None:
    loading = (*FULL, "--moe-ckpt-secret-file", secret, "--load", saved)
    line = refusal(new_job(ALONE).run(*loading, codes={2}))
    assert "no usable checkpoint" in line
    assert "moe-ckpt sign it" in line
    use_secret(SECRET)
    signed = CliRunner().invoke(commands, ["sign", str(saved)])
    assert signed.output == "".join(f"{folder} is signed\n" for folder in sorted(saved.glob("iter_*")))
    job = new_job(ALONE)
    job.run(*loading)
    assert job.ran(0) == [5, 6]


def forge(folder: Path, secret: bytes | None) -> None:
    """Checksums that fit, as somebody makes them who can write there and does not have the secret."""
    (folder / NAME).unlink()
    use_secret(secret)
    seal(folder)
    use_secret(None)


@pytest.mark.parametrize(
    "way", [pytest.param((), id="in-place"), pytest.param(ASYNC, id="async", marks=pytest.mark.full)]
)
def test_a_save_that_is_killed_leaves_nothing_that_a_reader_takes_for_whole(
    way: tuple[str, ...], new_job, tmp_path: Path, resumed: Records
) -> None:
    flags = (*FULL, *way, "--save", tmp_path, "--save-interval", 2)
    new_job(ALONE).run(*flags, hooks=[forked_writer, partial(killed_while_it_saves, 4)], codes={KILLED})
    begun = {".iter_0000006.saving"} & set(published(tmp_path)) if way else set()
    assert set(published(tmp_path)) - begun == {".iter_0000004.saving", "iter_0000002", TRACKER}
    assert f"{tmp_path / '.iter_0000004.saving'} was left by a save that did not finish" in verified(tmp_path)
    (tmp_path / LEASE).unlink()  # what starts the jobs of these tests lives on, and might start that one again
    job = new_job(ALONE)
    job.run(*flags, "--load", tmp_path)
    assert published(tmp_path) == ["iter_0000002", "iter_0000004", "iter_0000006", TRACKER]
    assert job.records() == resumed


def test_a_tracker_that_a_kill_left_empty_is_written_again(new_job, saved: Path) -> None:
    (saved / TRACKER).write_bytes(b"")
    job = new_job(ALONE)
    job.run(*FULL, "--load", saved)
    assert job.ran(0) == [5, 6]
    assert (saved / TRACKER).read_text() == "4"


def test_a_tracker_that_names_nothing_is_refused_in_one_line(new_job, saved: Path) -> None:
    (saved / TRACKER).write_text("soon")
    outcome = new_job(ALONE).run(*FULL, "--load", saved, codes={2})
    (line,) = [line for line in outcome.lines if "'soon'" in line]
    assert "repair the tracker" in line


@pytest.mark.ci
@pytest.mark.parametrize(
    ("rank", "way"),
    [
        pytest.param(0, (), id="rank 0", marks=pytest.mark.full),
        pytest.param(3, ASYNC, id="rank 3, async"),
        pytest.param(0, ASYNC, id="rank 0, async", marks=pytest.mark.full),
        pytest.param(3, (), id="rank 3", marks=pytest.mark.full),
    ],
)
def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    rank: int, way: tuple[str, ...], new_job, undisturbed, tmp_path: Path
) -> None:
    job = new_job(FOUR)
    flags = (*FULL, *way, "--save", tmp_path, "--save-interval", 2, "--log-progress")
    outcome = job.run(*flags, hooks=[forked_writer, partial(full_disk, 4, rank)])
    (line,) = [line for line in outcome.lines if "was NOT saved" in line]
    assert f"checkpoint of iteration 4 was NOT saved to {tmp_path}: " in line
    assert published(tmp_path) == ["iter_0000002", "iter_0000006", TRACKER, "progress.txt"]
    assert (tmp_path / TRACKER).read_text() == "6"
    progress = (tmp_path / "progress.txt").read_text()
    assert re.findall(r"Saved (?:async )?checkpoint\tIteration: (\d)", progress) == ["2", "6"], progress
    assert job.records() == undisturbed(FOUR)


@pytest.mark.parametrize(
    ("trouble", "way"),
    [
        pytest.param(no_access_to_folder, (), id="no access"),
        pytest.param(no_memory_to_stage, (), id="no memory", marks=pytest.mark.ci),
        pytest.param(no_memory_to_stage, ASYNC, id="no memory, async", marks=pytest.mark.full),
    ],
)
def test_what_fails_on_one_rank_alone_strands_no_other(
    trouble: Callable[[int, int], Hook], way: tuple[str, ...], new_job, tmp_path: Path
) -> None:
    flags = (*FULL, *way, "--save", tmp_path, "--save-interval", 2)
    outcome = new_job(PAIR).run(*flags, hooks=[forked_writer, partial(trouble, 4, 1)])
    (line,) = [line for line in outcome.lines if "was NOT saved" in line]
    assert "checkpoint of iteration 4 was NOT saved" in line
    assert "rank 1" in line
    assert published(tmp_path) == ["iter_0000002", "iter_0000006", TRACKER]


def test_a_last_checkpoint_that_is_not_saved_is_missed_beside_one_of_an_earlier_training(
    new_job, tmp_path: Path
) -> None:
    job, saving = new_job(ALONE), (*FULL, "--save", tmp_path, "--save-interval", 3)
    job.run(*saving)
    outcome = new_job(ALONE).run(*saving, hooks=[partial(no_access_to_folder, 6, 0)], codes={1})
    assert "checkpoint of iteration 6 was NOT saved" in outcome.said
    assert "the state of iteration 6 stays in memory" in outcome.said
    assert published(tmp_path) == ["iter_0000003", "iter_0000006", TRACKER]


def test_a_folder_that_cannot_be_written_costs_checkpoints_and_the_next_start_saves_the_last_one(
    new_job, undisturbed, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    job = new_job(ALONE)
    save = tmp_path / "file" / "save"
    flags = (*FULL, "--load", save, "--save", save, "--save-interval", 3)
    outcome = job.run(*flags, codes={1})
    assert len([line for line in outcome.lines if "was NOT saved" in line]) == 2
    assert f"its last checkpoint is not in {save}" in outcome.said
    assert "the state of iteration 6 stays in memory" in outcome.said
    assert job.records() == undisturbed(ALONE)
    (tmp_path / "file").unlink()
    job.run(*flags)
    assert published(save) == ["iter_0000006", TRACKER] and job.ran(0) == [1, 2, 3, 4, 5, 6]


def test_retention_of_megatron_keeps_the_newest_checkpoint(new_job, tmp_path: Path) -> None:
    new_job(ALONE).run(*FULL, "--save", tmp_path, "--save-interval", 1, "--save-retain-interval", 3)
    assert published(tmp_path) == ["iter_0000003", "iter_0000006", TRACKER]
    assert check(tmp_path / "iter_0000003") == check(tmp_path / "iter_0000006") == ()
