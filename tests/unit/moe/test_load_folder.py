"""What `--load` names, where that is nearly a folder of checkpoints: it is loaded or refused, and never passed over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.dist_checkpointing.moe.dense_saves.choosing import one_iteration
from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.dense.names import COMMON, FORMAT, INDEX, TRACKER


def saved(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("4")
    return folder


def said_of(load: object) -> str:
    return one_iteration(SimpleNamespace(load=load, ckpt_step=None))


@pytest.mark.parametrize("name", [INDEX, FORMAT, COMMON])
@pytest.mark.parametrize("form", ["{}", "{}/", "{}/../iter_0000004"])
def test_one_iteration_stands_for_its_folder_and_its_number(name: str, form: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "iter_0000004", name)
    args = SimpleNamespace(load=form.format(folder), ckpt_step=None)
    assert "is one iteration" in one_iteration(args)
    assert (Path(args.load).resolve(), args.ckpt_step) == (tmp_path.resolve(), 4)


def test_iteration_0_which_megatron_cannot_be_told_to_load_needs_a_tracker_that_names_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "iter_0000000", INDEX)
    args = SimpleNamespace(load=str(folder), ckpt_step=None)
    for tracked in (None, "5000"):
        if tracked is not None:
            (tmp_path / TRACKER).write_text(tracked)
        with pytest.raises(UsageError, match="takes --ckpt-step 0 for none; give a folder whose"):
            one_iteration(args)
        if tracked is None:
            assert "from its iteration 0 write 0 into a latest" in said_of(str(tmp_path))
    (tmp_path / TRACKER).write_text("0\n")
    assert one_iteration(args) == f"--load {folder} is one iteration: taken as --load {tmp_path}"
    assert (args.load, args.ckpt_step) == (str(tmp_path), None)


def test_a_relative_path_of_one_iteration_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved(tmp_path / "iter_0000004", INDEX))
    args = SimpleNamespace(load=".", ckpt_step=None)
    assert one_iteration(args)
    assert (args.load, args.ckpt_step) == (str(tmp_path), 4)


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("release", [INDEX], "give the folder above it"),
        ("snapshots", ["iter_0000005-rank_00001-window"], "--moe-ckpt-persist-dir"),
        ("model", ["config.json", "model-00001-of-00002.safetensors"], "moe-ckpt convert --from hf"),
    ],
)
def test_what_is_recognized_as_something_else_is_refused_with_what_to_give(
    name: str, files: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        said_of(str(saved(tmp_path / name, *files)))


def test_iterations_without_a_tracker_are_not_passed_over_unsaid(tmp_path: Path) -> None:
    for iteration in (2, 4):
        saved(tmp_path / f"iter_000000{iteration}", INDEX)
    assert "training begins again" in said_of(str(tmp_path))
    assert "--ckpt-step 4" in said_of(str(tmp_path))


def test_what_megatron_understands_or_begins_in_is_left_to_it(tmp_path: Path) -> None:
    tracked = saved(tmp_path / "tracked", TRACKER)
    saved(tracked / "iter_0000004", INDEX)
    for load in (
        str(tracked),
        str(saved(tmp_path / "empty")),
        str(tmp_path / "none"),
        "msc://bucket/iter_0000004",
    ):
        assert said_of(load) == ""
