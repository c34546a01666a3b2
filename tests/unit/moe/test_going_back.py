"""`--ckpt-step` into the folder that is saved to: followed once, by the tracker too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stock_stand_in import one_rank

from megatron.core.dist_checkpointing.moe.stock import going_back
from moe_ckpt.dense.integrity import NAME
from moe_ckpt.dense.names import INDEX, TRACKER
from moe_ckpt.dense.went_back import RECORD, left_in


def folder(root: Path) -> Path:
    """Checkpoints of iterations 2, 4 and 6."""
    saved(root, 2, 4, 6)
    (root / TRACKER).write_text("6")
    return root


def asked(root: Path, step: int = 2, **others: Any) -> Any:
    transient = {"non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    return SimpleNamespace(**transient | {"load": str(root), "save": f"{root}/", "ckpt_step": step} | others)


def came_to(iteration: int, args: Any, *, loaded: bool = True) -> None:
    with one_rank():
        going_back.came_to(iteration, args, "job", loaded=loaded)


def step_of_next_start(root: Path, step: int = 2, job: str = "job", over: tuple[str, ...] = ()) -> int | None:
    args = asked(root, step)
    with one_rank():
        jobs = going_back.followers(job, over.__contains__, args)
    assert (job in jobs) == bool(jobs) == (args.ckpt_step is None)
    found: int | None = args.ckpt_step
    return found


def test_the_tracker_names_the_iteration_that_training_goes_back_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    came_to(2, asked(folder(tmp_path)))
    assert (tmp_path / TRACKER).read_text() == "2"
    assert f"training goes back to iteration 2: 4, 6 in {tmp_path} are left" in caplog.text


@pytest.mark.parametrize(
    ("iteration", "loaded", "others"),
    [
        (0, True, {}),  # --finetune
        (2, False, {}),  # a snapshot of that iteration
        (2, True, {"save": "elsewhere"}),
        (2, True, {"save": None}),
        (2, True, {"load": None}),
    ],
)
def test_the_tracker_stays_where_training_does_not_go_back_in_its_own_folder(
    iteration: int, loaded: bool, others: dict[str, Any], tmp_path: Path
) -> None:
    came_to(iteration, asked(folder(tmp_path), **others), loaded=loaded)
    assert (tmp_path / TRACKER).read_text() == "6"
    assert step_of_next_start(tmp_path) == 2


def test_the_next_start_of_that_job_does_not_go_back_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    came_to(2, asked(folder(tmp_path)))
    assert step_of_next_start(tmp_path) is None
    assert f"to go back once more, remove {tmp_path}/{RECORD}" in caplog.text
    assert step_of_next_start(tmp_path, step=4) == 4
    assert step_of_next_start(tmp_path, job="other") == 2
    assert step_of_next_start(tmp_path, job="other", over=("job",)) is None


@pytest.mark.parametrize("place", [None, "elsewhere"])
def test_checkpoints_that_are_not_to_persist_of_what_is_left_are_not_loaded_at_the_next_start(
    place: str | None, tmp_path: Path
) -> None:
    transient = folder(tmp_path) / (place or "non_persistent")
    transient.mkdir()
    (transient / TRACKER).write_text("5")
    where = None if place is None else str(transient)
    came_to(2, asked(tmp_path, non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=where))
    assert not (transient / TRACKER).exists()


def saved(root: Path, *iterations: int, name: str = INDEX, content: str = "") -> Path:
    for iteration in iterations:
        path = root / f"iter_{iteration:07d}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{iteration} {content}")
    return root


@pytest.mark.parametrize("name", [INDEX, "mp_rank_00/model_optim_rng.pt"])
def test_what_training_left_counts_until_a_save_takes_its_place(name: str, tmp_path: Path) -> None:
    came_to(2, asked(saved(tmp_path, 2, 4, 6, name=name)))
    saved(tmp_path, 6, name=NAME)  # as it is signed, or sealed by another version
    assert left_in(tmp_path) == {4, 6}
    saved(tmp_path, 4, name=name, content="again")
    assert left_in(tmp_path) == {6}
    saved(tmp_path, 8, name=name)
    came_to(4, asked(tmp_path, step=4))
    assert left_in(tmp_path) == {6, 8}


def test_back_in_what_was_left_its_past_counts_and_not_what_was_saved_in_place_of_that(tmp_path: Path) -> None:
    came_to(2, asked(saved(folder(tmp_path), 2, 4, 6, 8, 10)))
    saved(tmp_path, 4, content="again")
    came_to(8, asked(tmp_path, step=8))
    assert left_in(tmp_path) == {4, 10}


def test_all_jobs_of_a_chain_go_on_from_what_any_of_them_saved(tmp_path: Path) -> None:
    came_to(2, asked(folder(tmp_path)))
    for number, job in enumerate(["second of, them", "third"]):
        args, before = asked(tmp_path), ("job", "second of, them")[: number + 1]
        with one_rank():
            assert going_back.followers(job, before[-1:].__contains__, args) == {*before, job}


@pytest.mark.parametrize("content", ["", "2", "two job", "2 job more", "2 job four=1", "\0" * 1000])
def test_a_record_that_says_nothing_leaves_the_flag(content: str, tmp_path: Path) -> None:
    (folder(tmp_path) / RECORD).write_text(content)
    assert (step_of_next_start(tmp_path), left_in(tmp_path)) == (2, frozenset())


def test_a_snapshot_that_is_taken_in_place_of_what_was_asked_for_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    came_to(5, asked(folder(tmp_path)), loaded=False)
    assert "--ckpt-step 2 holds for the first start of a job: this one continues from its iteration 5" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_reported_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(going_back, "write_atomically", full)
    came_to(2, asked(folder(tmp_path)))
    assert "the next start goes back to iteration 2 again" in caplog.text
    assert step_of_next_start(tmp_path) == 2
