"""What is found in a --load directory, and what is made of it: torn iterations, foreign files, nothing at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Layout, Start, Train, exact
from runs import flags_of_own_loop as flags
from stock_hooks import saving_as_stock
from world import World

from moe_ckpt.dense.integrity import NAME, check

pytestmark = pytest.mark.own_loop

TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT = Layout(pp=2, ep=1, ranks=2)


def shards(iteration: Path) -> list[Path]:
    return sorted(iteration.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "index missing": lambda folder: (folder / ".metadata").unlink(),
    "index truncated": lambda folder: truncate(folder / ".metadata"),
    "format missing": lambda folder: (folder / "metadata.json").unlink(),
    "common part missing": lambda folder: (folder / "common.pt").unlink(),
    "common part truncated": lambda folder: truncate(folder / "common.pt"),
    "shards truncated": lambda folder: truncate(shards(folder)[-1]),
    "shards missing": lambda folder: shards(folder)[0].unlink(),
    "shards zero-filled": lambda folder: [path.write_bytes(bytes(path.stat().st_size)) for path in shards(folder)],
    "one shard zero-filled": lambda folder: shards(folder)[0].write_bytes(bytes(shards(folder)[0].stat().st_size)),
    "one byte of a shard": lambda folder: flip(shards(folder)[-1], shards(folder)[-1].stat().st_size // 2),
    "one byte of the common part": lambda folder: flip(folder / "common.pt", 1000),
    "one byte of the sums": lambda folder: flip(folder / NAME, 60),
    "sums missing": lambda folder: (folder / NAME).unlink(),
    "folder missing": shutil.rmtree,
}


@pytest.fixture(scope="module")
def original(world: World, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints of iterations 2, 4 and 6, and the reports of the run."""
    folder = tmp_path_factory.mktemp("original")
    saving = ["--save", str(folder), "--save-interval", "2", "--metrics-jsonl", str(folder / "reports")]
    outcome = world.run(flags(corpus, LAYOUT, *saving), LAYOUT.ranks)
    assert set(outcome.codes) == {0}, outcome.said
    return folder


@pytest.fixture
def saved(original: Path, save: Path) -> Path:
    """A copy of `original` to damage."""
    shutil.copytree(original, save)
    return save


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_newest_iteration_falls_back_to_the_one_before(
    damage: str, saved: Path, original: Path, train: Train, tmp_path: Path
) -> None:
    DAMAGE[damage](saved / "iter_0000006")
    outcome = train(LAYOUT, "--load", saved, "--metrics-jsonl", tmp_path / "reports")
    (warning,) = outcome.warnings
    assert "6" in warning
    assert "loaded checkpoint of iteration 4" in outcome.out[0]
    assert exact(tmp_path / "reports") == exact(original / "reports", after=4)


def test_each_iteration_is_saved_with_sums_of_all_its_files(original: Path) -> None:
    for iteration in original.glob("iter_*"):
        assert check(iteration) == ()
        named = set(json.loads((iteration / NAME).read_bytes())["integrity"]["files"])
        assert named == {path.name for path in iteration.iterdir()} - {NAME}


def test_a_changed_byte_is_told_with_its_file(saved: Path, train: Train) -> None:
    damaged = shards(saved / "iter_0000006")[-1]
    flip(damaged, damaged.stat().st_size // 2)
    outcome = train(LAYOUT, "--load", saved, "--exit-interval", 4)
    (warning,) = outcome.warnings
    assert f"falling back to iteration 4 of {saved}; refused iteration 6: {damaged} is damaged" in warning


def test_a_checkpoint_without_sums_is_loaded_as_before_and_that_is_said(
    train: Train, save: Path, tmp_path: Path
) -> None:
    with_sums = tmp_path / "with sums"
    train(LAYOUT, "--save", with_sums, "--exit-interval", 2)
    train(LAYOUT, "--save", save, "--exit-interval", 2, hooks=[saving_as_stock])
    outcome = train(LAYOUT, "--load", save, "--exit-interval", 3)
    assert outcome.warnings == []
    assert f"has no {NAME}: its bytes are loaded without being checked" in outcome.out[0]
    assert "without being checked" not in train(LAYOUT, "--load", with_sums, "--exit-interval", 3).out[0]


def test_two_torn_iterations_fall_back_to_the_third(saved: Path, train: Train) -> None:
    DAMAGE["shards truncated"](saved / "iter_0000006")
    DAMAGE["index missing"](saved / "iter_0000004")
    outcome = train(LAYOUT, "--load", saved)
    assert "loaded checkpoint of iteration 2" in outcome.out[0]
    assert len(outcome.warnings) == 1


@pytest.mark.parametrize("damage", ["index missing", "shards zero-filled"])
def test_if_all_iterations_are_torn_nothing_is_started_over(damage: str, saved: Path, start: Start) -> None:
    for iteration in saved.glob("iter_*"):
        DAMAGE[damage](iteration)
    outcome = start(LAYOUT, "--load", saved).wait()
    assert set(outcome.codes) == {2}, outcome.said
    assert "no usable checkpoint" in outcome.lines[-1]
    assert "Traceback" not in outcome.said


def test_a_tracker_that_names_no_iteration_is_refused(saved: Path, start: Start) -> None:
    (saved / TRACKER).write_text("soon")
    outcome = start(LAYOUT, "--load", saved).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "'soon'" in line
    assert "--ckpt-step" in line


def test_without_a_tracker_the_newest_complete_iteration_is_used(saved: Path, train: Train) -> None:
    (saved / TRACKER).unlink()
    outcome = train(LAYOUT, "--load", saved)
    assert "loaded checkpoint of iteration 6" in outcome.out[0]
    assert outcome.warnings == []


@pytest.mark.parametrize("damage", ["index missing", "folder missing"])
def test_an_iteration_asked_for_by_number_is_not_replaced_by_another(damage: str, saved: Path, start: Start) -> None:
    DAMAGE[damage](saved / "iter_0000004")
    outcome = start(LAYOUT, "--load", saved, "--ckpt-step", 4).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "iteration 4" in line


def empty(folder: Path) -> None:
    folder.mkdir()


def foreign(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"not ours")


def missing(folder: Path) -> None:
    pass


@pytest.mark.parametrize("make", [empty, foreign, missing])
def test_where_no_checkpoint_is_training_starts_fresh_with_a_warning(
    make: Callable[[Path], None], original: Path, save: Path, train: Train, tmp_path: Path
) -> None:
    make(save)
    outcome = train(LAYOUT, "--load", save, "--metrics-jsonl", tmp_path / "reports")
    (warning,) = outcome.warnings
    assert "starting fresh" in warning
    assert exact(tmp_path / "reports") == exact(original / "reports")


@pytest.mark.parametrize("make", [empty, foreign, missing])
def test_where_a_checkpoint_must_be_its_absence_is_an_error(
    make: Callable[[Path], None], save: Path, start: Start
) -> None:
    make(save)
    outcome = start(LAYOUT, "--load", save, "--exit-on-missing-checkpoint").wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert str(save) in line


def test_a_checkpoint_of_another_model_is_refused(saved: Path, start: Start) -> None:
    outcome = start(LAYOUT, "--load", saved, "--hidden-size", 64).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = outcome.lines
    assert "hidden_size=32" in line


def test_schedules_that_are_not_those_of_the_checkpoint_are_refused_with_the_flags_that_settle_it(
    start: Start, train: Train, save: Path
) -> None:
    train(LAYOUT, "--save", save, "--lr-decay-iters", 6, "--exit-interval", 2)
    outcome = start(LAYOUT, "--load", save, "--lr-decay-iters", 9).wait()
    assert set(outcome.codes) == {2}, outcome.said
    (line,) = (line for line in outcome.lines if "read and verified" not in line)
    assert "--override-opt_param-scheduler" in line
    train(LAYOUT, "--load", save, "--lr-decay-iters", 9, "--override-opt_param-scheduler")
