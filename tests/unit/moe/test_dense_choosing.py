"""Which checkpoint Megatron-LM is told to load, and that its arguments are as they were behind it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from stock_stand_in import one_rank

from megatron.core.dist_checkpointing.moe.dense_saves.choosing import intact_checkpoint
from megatron.core.dist_checkpointing.moe.errors import StoreFailure, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.extensions.partial_saves.loading import with_stale_experts
from megatron.core.dist_checkpointing.moe.stock.dense import LOST, StockSaves, newest_checkpoint
from megatron.core.dist_checkpointing.moe.stock.seams import Call
from moe_ckpt.dense.chain import MANIFEST, Chain, encode
from moe_ckpt.dense.integrity import NAME, seal
from moe_ckpt.dense.names import DOUBTFUL, INDEX, TRACKER
from moe_ckpt.dense.went_back import RECORD, gone_back


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def save(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", INDEX):
            (folder / name).write_bytes(b"%d" % iteration)
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


@pytest.mark.parametrize("way", ["saved again", "over it, with its time", "linked and opened to a group"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_taken_for_what_was_compared(
    way: str, is_sealed: bool, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    shard = tmp_path / "iter_0000004" / "__0_0.distcp"
    if not is_sealed:
        (shard.parent / NAME).unlink()
        shard = shard.parent / "mp_rank_00" / "model_optim_rng.pt"
        shard.parent.mkdir()
        shard.write_bytes(b"4")

    def load() -> None:
        with intact_checkpoint(arguments(tmp_path, ckpt_format="torch_dist" if is_sealed else "torch")):
            before = shard.stat()
            if way == "linked and opened to a group":
                os.link(shard, tmp_path / "backup")
                shard.chmod(0o660)
                return
            if way == "saved again":
                shard.unlink()
            shard.write_bytes(b"5")
            if way == "over it, with its time":
                os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))

    # Without sums a writer that puts back length and time is not seen.
    is_seen = way == "saved again" or (is_sealed and "over" in way)
    says = "was saved again while it was loaded"
    with pytest.raises(StoreFailure, match=says) if is_seen else nullcontext():
        load()


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


def test_what_was_asked_for_is_loaded_though_one_that_is_not_to_persist_is_newer(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path / "non_persistent", 3)
    flags = {"ckpt_step": 2, "non_persistent_ckpt_type": "global"}
    assert told(arguments(tmp_path, **flags, save=str(tmp_path))) == (2, None)
    assert told(arguments(tmp_path, **flags)) == (2, None)
    elsewhere = {"non_persistent_global_ckpt_dir": str(tmp_path / "non_persistent"), "save": "another"}
    assert told(arguments(tmp_path, **flags, **elsewhere)) == (2, "global")  # maybe of this very training


@pytest.mark.parametrize(
    ("tracked", "flags", "is_refused"),
    [
        ("2", {}, False),
        ("4", {}, True),
        ("4", {"no_load_optim": True}, False),
        ("4", {"finetune": True}, False),
        ("4", {"load": None, "pretrained_checkpoint": "{root}"}, False),
    ],
)
def test_weights_of_one_iteration_are_not_loaded_with_the_distributed_optimizer_of_another(
    tracked: str, flags: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    (tmp_path / TRACKER).write_text(tracked)
    (tmp_path / "iter_0000002" / NAME).unlink()
    (tmp_path / "iter_0000002" / "mp_rank_00").mkdir()
    given = {"ckpt_step": 2, "ckpt_format": "torch", "use_distributed_optimizer": True, "finetune": False}
    flags = {name: value and str(value).format(root=tmp_path) for name, value in flags.items()}
    args = arguments(tmp_path, **given | {"no_load_optim": None} | flags)
    said = f"--ckpt-step 2: of checkpoints of format torch .* names, {tracked}; write 2 there"
    with pytest.raises(UsageError, match=said) if is_refused else nullcontext():
        assert told(args) == (2, None)
    save(tmp_path / "non_persistent", 3)
    args.non_persistent_ckpt_type = "global"
    with pytest.raises(UsageError, match=said) if is_refused else nullcontext():
        assert told(args) == (2, None)


def test_without_a_tracker_megatron_begins_again_as_ever(tmp_path: Path) -> None:
    save(tmp_path, 2)
    damage(tmp_path / "iter_0000002")
    (tmp_path / TRACKER).unlink()
    assert told(arguments(tmp_path)) == (None, None)


@pytest.mark.parametrize("form", ["torch", "fsdp_dtensor"])
@pytest.mark.parametrize("doubts", [False, True])
def test_checkpoints_that_are_saved_in_place_tell_of_a_doubtful_iteration_too(
    doubts: bool, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.dist_checkpointing.moe.stock.dense.is_in_doubt", lambda: doubts)
    args = arguments(tmp_path, save=str(tmp_path), ckpt_format=form, no_save_optim=False, no_save_rng=False)
    args.no_load_optim, args.no_load_rng, args.finetune = False, False, False

    def saved(iteration: int, optimizer: Any, *, non_persistent_ckpt: bool = False, release: bool = False) -> None:
        assert (tmp_path / f"iter_{iteration:07d}").is_dir()
        (tmp_path / TRACKER).write_text(str(iteration))

    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / DOUBTFUL).touch()  # of a save before, that this one is written over
    StockSaves(args, None, protects=True).save(Call(saved, (4, None), {}))
    found = newest_checkpoint(args)
    assert (found.iteration, found.in_doubt) == (4, doubts)


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
    (tmp_path / "link").symlink_to(tmp_path)
    assert told(arguments(tmp_path / "link", ckpt_step=asked, save=str(tmp_path))) == (asked, None)


def test_one_whose_checksums_vanish_while_it_is_looked_at_is_not_loaded_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2, 4)
    exists = Path.exists

    def last_seen(path: Path, **named: Any) -> bool:
        was_there = exists(path, **named)
        if path == tmp_path / "iter_0000004" / NAME:
            path.unlink()
        return was_there

    monkeypatch.setattr(Path, "exists", last_seen)
    assert told(arguments(tmp_path)) == (2, None)


def test_a_pretrained_checkpoint_is_compared_where_it_is_what_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "pretrained", 2)
    damage(tmp_path / "pretrained" / "iter_0000002")
    with pytest.raises(UnreadableCheckpoint, match=r"pretrained: no usable checkpoint"):
        told(arguments(tmp_path / "none", pretrained_checkpoint=str(tmp_path / "pretrained")))


def save_partly(root: Path, holders: tuple[int, ...]) -> None:
    """Iteration 4, of which these have its experts."""
    save(root, 2, 4)
    marks = {iteration: f"{iteration:016x}" for iteration in {4, *holders}}
    (root / "iter_0000004" / MANIFEST).write_bytes(encode(Chain(4, {0: holders}, marks, 0, None, "")))


WHOLE = {"finetune": False, "no_save_optim": None, "no_load_optim": None, "no_save_rng": None, "no_load_rng": None}


@pytest.mark.parametrize(
    ("holders", "flags", "found"),
    [
        ((4, 4), {}, (4, False, False)),
        ((4, 2), {}, (4, False, True)),
        ((4, 2), {"ckpt_step": 4}, (4, True, False)),
        ((4, 4), {"no_save_rng": True}, (4, False, True)),
        ((4, 4), {"no_save_rng": True, "no_load_rng": True}, (4, False, False)),
        ((4, 4), {"no_save_rng": True, "save": "elsewhere"}, (4, False, False)),
        ((4, 4), {"no_save_optim": True}, (-1, False, True)),
        ((4, 4), {"no_save_optim": True, "load": "{folder}/"}, (-1, False, True)),
        ((4, 4), {"no_save_optim": True, "no_load_optim": True}, (4, False, False)),
    ],
)
def test_a_checkpoint_with_stale_experts_or_without_what_flags_leave_out_lacks_what_a_snapshot_has(
    holders: tuple[int, ...], flags: dict[str, Any], found: tuple[int, bool, bool], tmp_path: Path
) -> None:
    save_partly(tmp_path, holders)
    flags |= {name: value.format(folder=tmp_path) for name, value in flags.items() if name == "load"}
    told = newest_checkpoint(arguments(tmp_path, **{"save": str(tmp_path), **WHOLE, **flags}))
    assert (told.iteration, told.asked_for, told.lacks) == found


def test_what_training_left_as_it_went_back_is_loaded_neither_for_a_damaged_checkpoint_nor_without_a_tracker(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, 4, 9)
    (tmp_path / RECORD).write_bytes(gone_back(tmp_path, 2, "job", (2, 4, 9)).encoded())
    save(tmp_path, 6)
    (tmp_path / TRACKER).write_text("")
    assert newest_checkpoint(arguments(tmp_path, **WHOLE)).iteration == 6
    damage(tmp_path / "iter_0000006")
    assert told(arguments(tmp_path)) == (2, None)
    (tmp_path / TRACKER).write_text("6")
    assert told(arguments(tmp_path)) == (2, None)
    (tmp_path / TRACKER).write_text("9")
    assert told(arguments(tmp_path)) == (None, None)  # a user's


@pytest.mark.parametrize(("step", "found"), [(2, 2), (3, -1)])
def test_what_was_asked_for_is_what_loading_gives_whatever_the_tracker_names(
    step: int, found: int, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    assert newest_checkpoint(arguments(tmp_path, **WHOLE, ckpt_step=step)).iteration == found
    (tmp_path / TRACKER).write_text("release")
    assert newest_checkpoint(arguments(tmp_path, **WHOLE | {"finetune": True})).iteration == 0


def test_tokens_that_stale_experts_lack_are_lost_with_those_of_faults(tmp_path: Path) -> None:
    marks, ages = {2: "2" * 16, 4: "4" * 16}, {1: (0, 1), 3: (1, 0)}
    for unsaved, lost in (({1: (0, 7), 3: (5, 0)}, [17, 25]), ({}, None)):
        chain = Chain(4, {1: (4, 2), 3: (2, 4)}, marks, 0, None, "", unsaved=unsaved, ages=ages if unsaved else {})
        (tmp_path / MANIFEST).write_bytes(encode(chain))
        assert with_stale_experts([10, 20], tmp_path) == lost


def test_what_faults_had_cost_stays_known_where_tokens_of_stale_experts_were_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain(4, {1: (4, 2), 3: (2, 4)}, {2: "2" * 16, 4: "4" * 16}, 0, None, "")
    (tmp_path / MANIFEST).write_bytes(encode(chain))
    arguments = Namespace(rank=0, **{LOST: [10, 20]})
    saves = StockSaves(arguments, None, protects=True)
    saves.loaded, saves.recorded_args = tmp_path, Namespace(**vars(arguments))
    assert saves.lost_tokens == [10, 20]
    (tmp_path / MANIFEST).unlink()  # a later checkpoint of this job has all experts, and still lacks those updates
    later = StockSaves(Namespace(rank=0), None, protects=True)
    later.loaded, later.recorded_args = tmp_path, arguments
    assert later.lost_tokens == [10, 20]
    assert caplog.text.count("more tokens are lost than are counted") == 2
