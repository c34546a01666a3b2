"""Saving: beside training, onto disks that fail, and how many checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
from runs import Layout, Train, differences, digest, exact, metrics, published
from runs import flags_of_own_loop as flags
from worker_hooks import full_disk, no_access_to_folder, no_memory_to_stage, stuck_writer, writing_after_report
from world import World

pytestmark = pytest.mark.own_loop

full = pytest.mark.full
SMALL = Layout(pp=2, ep=1, ranks=2)
WAYS = pytest.mark.parametrize("way", [[], ["--async-save"]], ids=["sync", "async"])


@pytest.mark.parametrize(
    "extra", [["--bf16"], pytest.param(["--dist-ckpt-optim-fully-reshardable"], marks=full)], ids=" ".join
)
def test_a_background_save_holds_the_step_it_was_asked_for_though_training_went_on(
    extra: list[str], train: Train, tmp_path: Path
) -> None:
    sync, background, reports = tmp_path / "sync", tmp_path / "background", tmp_path / "reports.jsonl"
    train(Layout(), *extra, "--save", sync, "--save-interval", 3)
    late = partial(writing_after_report, str(reports), 5)
    saving = ["--save", background, "--save-interval", 3, "--async-save", "--metrics-jsonl", reports]
    train(Layout(), *extra, *saving, hooks=[late])
    assert published(background) == [3, 6]
    for iteration in (3, 6):
        assert differences(digest(sync, iteration), digest(background, iteration)) == []


def test_only_the_newest_checkpoints_are_kept(train: Train, save: Path) -> None:
    train(SMALL, "--save", save, "--save-interval", 1, "--keep-last", 2)
    assert published(save) == [5, 6]
    assert differences(digest(save, 5), digest(save, 6))
    assert sorted(path.name for path in save.iterdir()) == [
        "iter_0000005",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.fixture(scope="module")
def undisturbed(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2, 4 and 6 of a run in which every save succeeds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome = world.run(flags(corpus, Layout(), "--save", str(folder), "--save-interval", "2"), Layout().ranks)
    assert set(outcome.codes) == {0}, outcome.said
    return folder


@pytest.mark.parametrize(
    ("rank", "way"),
    [
        pytest.param(0, [], id="rank 0"),
        pytest.param(3, ["--async-save"], id="rank 3, async"),
        pytest.param(None, ["--async-save"], id="all ranks, async"),
        pytest.param(0, ["--async-save"], id="rank 0, async", marks=full),
        pytest.param(3, [], id="rank 3", marks=full),
    ],
)
def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    rank: int | None, way: list[str], undisturbed: Path, train: Train, save: Path, tmp_path: Path
) -> None:
    saving = [*way, "--save", save, "--save-interval", 2, "--metrics-jsonl", tmp_path / "reports"]
    outcome = train(Layout(), *saving, hooks=[partial(full_disk, 4, rank)])
    (line,) = outcome.warnings
    assert "iteration 4 was NOT saved" in line
    assert "training goes on, the last saved iteration is 2" in line
    assert published(save) == [2, 6]
    assert not list(save.glob(".iter*"))
    assert all(differences(digest(undisturbed, i), digest(save, i)) == [] for i in (2, 6))
    assert [report["iteration"] for report in metrics(tmp_path / "reports")] == [1, 2, 3, 4, 5, 6]


@WAYS
@pytest.mark.parametrize("trouble", [no_memory_to_stage, no_access_to_folder])
def test_what_fails_on_one_rank_alone_strands_no_other(
    trouble: Callable[[int, int], AbstractContextManager[None]], way: list[str], train: Train, save: Path
) -> None:
    outcome = train(SMALL, *way, "--save", save, "--save-interval", 2, hooks=[partial(trouble, 4, 1)])
    (line,) = outcome.warnings
    assert "iteration 4 was NOT saved" in line
    assert "on rank 1" in line
    assert published(save) == [2, 6]


def test_a_writer_that_never_ends_is_given_up_and_said(train: Train, save: Path) -> None:
    saving = ["--save", save, "--save-interval", 2, "--async-save"]
    outcome = train(SMALL, *saving, hooks=[partial(stuck_writer, 4, 1)])
    (line,) = outcome.warnings
    assert "iteration 4 was NOT saved" in line
    assert "took longer than" in line
    assert published(save) == [2, 6]


def test_a_full_disk_under_the_metrics_file_does_not_end_training(train: Train) -> None:
    outcome = train(SMALL, "--metrics-jsonl", "/dev/full")
    (line,) = outcome.warnings
    assert "--metrics-jsonl" in line
    assert "iteration        6/       6" in outcome.out[1]


@WAYS
def test_training_goes_on_where_nothing_can_be_saved_at_all(way: list[str], train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = train(SMALL, *way, "--save", tmp_path / "file" / "save", "--save-interval", 3)
    assert len(outcome.warnings) == len([line for line in outcome.warnings if "was NOT saved" in line])
    assert "iteration 3 was NOT saved" in outcome.warnings[0]
    assert "iteration        6/       6" in outcome.out[1]


def test_checkpoints_do_not_change_what_is_trained(train: Train, save: Path, tmp_path: Path) -> None:
    plain, saving = tmp_path / "plain.jsonl", tmp_path / "saving.jsonl"
    overlapping = ["--overlap-grad-reduce", "--overlap-param-gather"]
    train(Layout(), *overlapping, "--metrics-jsonl", plain)
    train(Layout(), *overlapping, "--metrics-jsonl", saving, "--save", save, "--save-interval", 1, "--async-save")
    assert exact(plain) == exact(saving)
