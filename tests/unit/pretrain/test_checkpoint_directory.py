"""The folder of checkpoints: what is published, which ones a resume may take, and which ones stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.dense_saves.directory import TRACKER, CheckpointDirectory
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.dense import chain


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "save")


def publish(directory: CheckpointDirectory, *iterations: int) -> None:
    for iteration in iterations:
        (directory.stage(iteration) / "content").write_text(str(iteration))
        directory.publish(iteration)


def test_what_is_staged_is_not_there_until_it_is_published(directory: CheckpointDirectory) -> None:
    directory.stage(3)
    assert directory.iterations() == []
    assert directory.tracked() is None


def test_publishing_moves_the_tracker(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6)
    assert directory.tracked() == 6
    assert directory.candidates() == [6, 3]


def test_an_iteration_newer_than_the_tracked_one_was_never_announced_and_is_no_candidate(
    directory: CheckpointDirectory,
) -> None:
    publish(directory, 3, 6, 9)
    (directory.root / TRACKER).write_text("6")
    assert directory.candidates() == [6, 3]


def test_without_a_tracker_every_published_iteration_is_a_candidate(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6)
    (directory.root / TRACKER).unlink()
    assert directory.candidates() == [6, 3]


def test_publishing_an_iteration_again_replaces_it(directory: CheckpointDirectory) -> None:
    publish(directory, 3)
    (directory.stage(3) / "content").write_text("new")
    directory.publish(3)
    assert (directory.folder(3) / "content").read_text() == "new"
    assert sorted(path.name for path in directory.root.iterdir()) == ["iter_0000003", TRACKER]


def test_staging_sweeps_what_a_killed_save_left_behind(directory: CheckpointDirectory) -> None:
    directory.stage(3)
    directory.stage(6)
    assert [path.name for path in directory.root.iterdir()] == [".iter_0000006.saving"]


def test_retention_keeps_the_newest(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6, 9, 12)
    assert directory.retain(2) == [6, 3]
    assert directory.iterations() == [12, 9]


def test_retention_after_going_back_keeps_what_can_be_loaded(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6, 12, 18)
    publish(directory, 9)  # a run that went back to 6 and saved 9
    assert directory.retain(2) == [3]
    assert directory.candidates() == [9, 6]
    assert directory.iterations() == [18, 12, 9, 6]


def test_retention_keeps_what_iterations_past_the_tracked_one_need(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6, 9, 12)
    needing = chain.Chain(12, {0: (3, 12)}, {3: "0" * 16, 12: "1" * 16}, 0, None, "fp32")
    (directory.folder(12) / chain.MANIFEST).write_bytes(chain.encode(needing))
    (directory.root / TRACKER).write_text("9")
    assert directory.retain(1) == [6]
    assert directory.iterations() == [12, 9, 3]


def test_retention_waits_while_what_an_iteration_past_the_tracked_one_needs_cannot_be_read(
    directory: CheckpointDirectory,
) -> None:
    publish(directory, 3, 6, 9)
    (directory.folder(9) / chain.MANIFEST).mkdir()
    (directory.root / TRACKER).write_text("6")
    with pytest.raises(UnreadableCheckpoint, match="is not known"):
        directory.retain(1)
    (directory.folder(9) / chain.MANIFEST).rmdir()
    (directory.folder(9) / chain.MANIFEST).write_bytes(b"damaged")
    assert directory.retain(1) == [3]


def test_retention_leaves_links(directory: CheckpointDirectory) -> None:
    publish(directory, 3, 6)
    directory.folder(3).rename(directory.root / "elsewhere")
    directory.folder(3).symlink_to(directory.root / "elsewhere")
    assert directory.retain(1) == []
    assert directory.iterations() == [6, 3]
