"""How training ends before its last iteration, what it evaluates and what it writes down."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from runs import Layout, Start, Train, differences, digest, exact, metrics, published
from world import HANG_TIMEOUT_S

pytestmark = pytest.mark.own_loop

LAYOUT = Layout(pp=2, ep=1, ranks=2)


def wait_for_reports(path: Path, count: int) -> None:
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{path} did not get {count} reports"
        time.sleep(0.05)


def test_a_run_left_at_an_interval_continues_exactly(train: Train, tmp_path: Path) -> None:
    pieces, straight, reports = tmp_path / "pieces", tmp_path / "straight", tmp_path / "reports"
    saving = ["--save", pieces, "--load", pieces, "--exit-interval", 4, "--metrics-jsonl", reports]
    outcome = train(LAYOUT, *saving)
    assert "--exit-interval 4" in outcome.out[0]
    assert published(pieces) == [4]
    train(LAYOUT, *saving)
    train(LAYOUT, "--save", straight, "--metrics-jsonl", tmp_path / "straight.jsonl")
    assert exact(reports) == exact(tmp_path / "straight.jsonl")
    assert differences(digest(pieces, 6), digest(straight, 6)) == []


def test_a_run_saves_and_leaves_when_its_time_is_up(train: Train, save: Path) -> None:
    outcome = train(LAYOUT, "--save", save, "--exit-duration-in-mins", 1e-6)
    assert "--exit-duration-in-mins" in outcome.out[0]
    assert published(save) == [1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_one_rank_makes_all_ranks_save_and_leave(
    number: signal.Signals, start: Start, save: Path, tmp_path: Path
) -> None:
    reports = tmp_path / "reports"
    handling = ["--exit-signal-handler", "--exit-signal", number.name]
    running = start(LAYOUT, *handling, "--train-iters", 1000, "--save", save, "--metrics-jsonl", reports)
    wait_for_reports(reports, 2)
    os.kill(running.process_id(1), number)
    outcome = running.wait()
    assert set(outcome.codes) == {0}, outcome.said
    last = metrics(reports)[-1]["iteration"]
    assert last < 1000
    assert published(save) == [last]
    assert f"signal {number.name}" in outcome.out[0]


def test_progress_is_written_down(train: Train, save: Path) -> None:
    train(LAYOUT, "--save", save, "--save-interval", 3, "--log-progress")
    lines = (save / "progress.txt").read_text().splitlines()
    said = [line.split("\t", 1)[1] for line in lines]
    assert [line.split("\t")[-2] for line in lines] == [
        "Started training",
        "Saved checkpoint",
        "Saved checkpoint",
        "Ended training",
    ], said
    assert [line.split("\t")[-1] for line in lines] == [f"Iteration: {i}" for i in (0, 3, 6, 6)]


def test_a_save_that_failed_is_not_written_down_as_saved(train: Train, save: Path) -> None:
    save.mkdir()
    for iteration in (3, 6):
        (save / f".iter_{iteration:07d}.saving").touch()  # a file where the staging folder should be
    train(LAYOUT, "--save", save, "--save-interval", 3, "--log-progress")
    assert "Saved" not in (save / "progress.txt").read_text()


def test_tensorboard_gets_the_losses(train: Train, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports = tmp_path / "reports"
    train(LAYOUT, "--tensorboard-dir", tmp_path / "board", "--metrics-jsonl", reports)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("lm loss")}
    assert losses == pytest.approx({report["iteration"]: report["lm_loss"] for report in metrics(reports)})


def test_evaluation_reports_a_loss_and_changes_nothing(train: Train, tmp_path: Path) -> None:
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    train(LAYOUT, "--metrics-jsonl", plain)
    outcome = train(LAYOUT, "--metrics-jsonl", evaluated, "--eval-interval", 2, "--eval-iters", 1)
    assert exact(plain) == exact(evaluated)
    lines = [line for line in outcome.out[-1].splitlines() if " split at iteration " in line]
    assert len(lines) == 4, outcome.said  # validation at 2, 4 and 6, the test split at the end
