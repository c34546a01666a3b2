"""The folder of checkpoints: what is published, and what a killed save leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.dense_saves.directory import TRACKER, CheckpointDirectory
from moe_ckpt.dense.names import INDEX, read_tracker
from moe_ckpt.dense.went_back import RECORD, gone_back


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "save")


def publish(directory: CheckpointDirectory, *iterations: int) -> None:
    for iteration in iterations:
        (directory.stage(iteration) / "content").write_text(str(iteration))
        directory.place(iteration)
        directory.track(iteration)


def test_what_is_staged_is_not_there_until_it_is_published(directory: CheckpointDirectory) -> None:
    directory.stage(3)
    assert directory.iterations() == []
    assert read_tracker(directory.root) is None


def test_what_is_published_counts_once_the_tracker_names_it(directory: CheckpointDirectory) -> None:
    publish(directory, 3)
    directory.stage(6)
    directory.place(6)
    assert (read_tracker(directory.root), directory.iterations()) == ("iter_0000003", [6, 3])
    directory.track(6)
    assert read_tracker(directory.root) == "iter_0000006"


def test_nobody_else_reaches_into_what_will_be_signed_until_it_has_its_name(directory: CheckpointDirectory) -> None:
    directory.root.mkdir()
    directory.root.chmod(0o2775)  # of a group: what is made in it belongs to that group too
    usual = directory.stage(1).stat().st_mode
    staging = directory.stage(3, is_signed=True)
    assert stat.S_IMODE(staging.stat().st_mode) == 0o2700
    (staging / "inside").mkdir()
    assert (staging / "inside").stat().st_mode & stat.S_ISGID
    directory.require_own(3)
    directory.place(3)
    assert directory.folder(3).stat().st_mode == usual


def test_a_folder_that_took_the_place_of_one_that_will_be_signed_is_refused(directory: CheckpointDirectory) -> None:
    staging = directory.stage(3, is_signed=True)
    staging.rename(staging.with_name("elsewhere"))
    staging.mkdir(0o700)
    with pytest.raises(OSError, match="another folder was put in its place"):
        directory.require_own(3)


def test_publishing_an_iteration_again_replaces_it(directory: CheckpointDirectory) -> None:
    publish(directory, 3)
    (directory.stage(3) / "content").write_text("new")
    directory.place(3)
    assert (directory.folder(3) / "content").read_text() == "new"
    assert sorted(path.name for path in directory.root.iterdir()) == ["iter_0000003", TRACKER]


def test_where_publishing_an_iteration_again_fails_it_is_there_as_it_was(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(directory, 3)
    staging, rename = directory.stage(3), os.rename

    def fails(source: Path, target: Path) -> None:
        if source == staging:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="Input/output error"):
        directory.place(3)
    assert directory.iterations() == [3]
    directory.stage(6)
    assert (directory.folder(3) / "content").read_text() == "3"


def test_staging_sweeps_what_a_killed_save_left_behind(directory: CheckpointDirectory) -> None:
    directory.stage(3)
    directory.stage(6)
    assert [path.name for path in directory.root.iterdir()] == [".iter_0000006.saving"]


def test_what_a_killed_save_had_moved_out_of_its_way_is_published_again(directory: CheckpointDirectory) -> None:
    publish(directory, 3)
    directory.stage(3)
    # Killed between the two renames.
    replaced = directory.folder(3).rename(directory.root / ".iter_0000003.replaced")
    directory.stage(6, keep=frozenset({3}))
    assert replaced.is_dir(), "a save of it that is under way does that by itself"
    directory.stage(9)
    assert (directory.folder(3) / "content").read_text() == "3"
    assert sorted(path.name for path in directory.root.iterdir()) == [".iter_0000009.saving", "iter_0000003", TRACKER]


@pytest.mark.parametrize(
    ("published", "text", "names"),
    [((3, 6, 9), "", "6"), ((9,), "", None), ((3, 6), "3", "3"), ((3,), "release", "release"), ((), None, None)],
)
def test_a_tracker_that_a_killed_writer_left_empty_names_the_checkpoint_before_the_one_that_is_saved(
    published: tuple[int, ...], text: str | None, names: str | None, directory: CheckpointDirectory
) -> None:
    tracker = directory.root / TRACKER
    for iteration in published:
        publish(directory, iteration)
    tracker.unlink(missing_ok=True)
    if text is not None:
        tracker.write_text(text)
    directory.require_writable_tracker(9)
    assert (tracker.read_text() if tracker.exists() else None) == names


def test_a_tracker_that_a_killed_writer_left_empty_names_nothing_that_training_left(
    directory: CheckpointDirectory,
) -> None:
    for iteration in (3, 6):
        publish(directory, iteration)
        (directory.folder(iteration) / INDEX).touch()
    (directory.root / RECORD).write_bytes(gone_back(directory.root, 3, "job", (3, 6)).encoded())
    (directory.root / TRACKER).write_text("")
    directory.require_writable_tracker(9)
    assert (directory.root / TRACKER).read_text() == "3"
