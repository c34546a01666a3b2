"""Which checkpoint Megatron-LM is told to load, and that its arguments are as they were behind it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from stock_stand_in import one_rank

from megatron.core.dist_checkpointing.moe.dense_saves.choosing import intact_checkpoint
from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.dense.integrity import seal
from moe_ckpt.dense.names import TRACKER


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"%d" % iteration)
        seal(folder)
        (root / TRACKER).write_text(str(iteration))


def damage(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"x")


def arguments(root: Path, **values: Any) -> Namespace:
    given = {"load": str(root), "ckpt_step": None, "ckpt_format": "torch_dist", "auto_detect_ckpt_format": False}
    given |= {"save": None, "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    return Namespace(**given | values)


def told(args: Namespace) -> tuple[Any, Any]:
    """The arguments by which Megatron-LM decides, in the block."""
    before = dict(vars(args))
    with intact_checkpoint(args):
        seen = args.ckpt_step, args.non_persistent_ckpt_type
    assert vars(args) == before
    return seen


def test_an_intact_newest_checkpoint_is_left_to_megatron(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    assert told(arguments(tmp_path)) == (None, None)


def test_a_damaged_one_is_passed_by_and_what_was_never_announced_is_no_substitute(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6)
    (tmp_path / TRACKER).write_text("4")
    damage(tmp_path / "iter_0000004")
    assert told(arguments(tmp_path)) == (2, None)


@pytest.mark.parametrize(("transient", "expected"), [(4, (None, None)), (1, (None, "global"))])
def test_a_damaged_checkpoint_that_is_not_to_persist_gives_way_to_one_that_is(
    tmp_path: Path, transient: int, expected: tuple[Any, Any]
) -> None:
    save(tmp_path, 2)
    save(tmp_path / "non_persistent", transient)
    damage(tmp_path / "non_persistent" / f"iter_{transient:07d}")
    assert told(arguments(tmp_path, non_persistent_ckpt_type="global")) == expected


def test_without_a_tracker_megatron_begins_again_as_ever(tmp_path: Path) -> None:
    save(tmp_path, 2)
    damage(tmp_path / "iter_0000002")
    (tmp_path / TRACKER).unlink()
    assert told(arguments(tmp_path)) == (None, None)


def test_what_was_asked_for_by_number_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    damage(tmp_path / "iter_0000004")
    with pytest.raises(UnreadableCheckpoint, match=r"no usable checkpoint; iter_0000004: .*__0_0\.distcp is damaged"):
        told(arguments(tmp_path, ckpt_step=4))


@pytest.mark.parametrize("asked", [None, 4])
def test_one_that_a_killed_save_had_moved_out_of_its_way_is_loaded_again(tmp_path: Path, asked: int | None) -> None:
    save(tmp_path, 2, 4)
    (tmp_path / "iter_0000004").rename(tmp_path / ".iter_0000004.replaced")
    with pytest.raises(UnreadableCheckpoint) if asked else nullcontext():  # another job may be at work there
        assert told(arguments(tmp_path, ckpt_step=asked)) == (2, None)
    assert told(arguments(tmp_path, ckpt_step=asked, save=str(tmp_path))) == (asked, None)


def test_a_pretrained_checkpoint_is_compared_where_it_is_what_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "pretrained", 2)
    damage(tmp_path / "pretrained" / "iter_0000002")
    with pytest.raises(UnreadableCheckpoint, match=r"pretrained: no usable checkpoint"):
        told(arguments(tmp_path / "none", pretrained_checkpoint=str(tmp_path / "pretrained")))
