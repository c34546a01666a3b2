"""How a window of another layout is made whole: in which folder, and for how long it is waited for."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe import PreviousWindow
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.dense_saves import writing
from megatron.core.dist_checkpointing.moe.errors import PeerLost, UsageError
from megatron.core.dist_checkpointing.moe.stock.previous_windows import made_whole

WINDOW = PreviousWindow(3, 4, "world_size 4", "job", in_memory=False)


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("place", ["save", "storage"])
def test_what_an_attempt_left_that_was_killed_is_removed_by_the_next_one(
    place: str, converting: Any, tmp_path: Path
) -> None:
    args, config = converting("mkdir -p $8/iter_0000004", timeout_s=60.0, save=place == "save")
    shared = tmp_path / place
    left = shared / ".moe-ckpt-window-of-an-attempt"
    left.mkdir(parents=True)
    (left / "as large as the model").touch()
    with made_whole(args, config, WINDOW, lambda folder: None):
        assert [path.name for path in shared.iterdir()] == [Path(args.load).name]
        assert args.ckpt_step is None
    assert (args.load, args.ckpt_step) == ("elsewhere", 2)
    assert not list(shared.iterdir())


@pytest.fixture
def converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a script play `moe-ckpt convert`, and gives arguments and settings of a job with so much patience."""

    def prepared(script: str, timeout_s: float, *, save: bool = False) -> Any:
        played = tmp_path / "convert"
        played.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        played.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(played))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        storage = tmp_path / "storage"
        storage.mkdir(exist_ok=True)
        args = SimpleNamespace(save=str(tmp_path / "save") if save else None, load="elsewhere", ckpt_step=2)
        return args, MoECheckpointConfig(persist_dir=str(storage), timeout_s=timeout_s)

    return prepared


def come_back(args: Any, config: MoECheckpointConfig) -> None:
    with made_whole(args, config, WINDOW, lambda folder: None):
        raise AssertionError("nothing was made whole")


def a_peer_is_lost_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective in which ranks wait for the conversion fails as soon as this file is there."""

    def failing(is_done: bool) -> bool:
        if path.exists():
            raise PeerLost("rank 1 is gone")
        return is_done

    monkeypatch.setattr(writing, "all_done", failing)


@pytest.mark.usefixtures("single_process_group")
def test_when_a_peer_is_lost_the_conversion_is_told_to_end_and_tidies_up(
    converting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args, config = converting("sleep 60 &\ntouch begun\nwait $!\necho $? > code", timeout_s=60.0)
    a_peer_is_lost_once(tmp_path / "begun", monkeypatch)
    with pytest.raises(PeerLost):
        come_back(args, config)
    assert (tmp_path / "code").read_text().strip() == "143", "its job had SIGTERM, and it was waited for itself"
    assert f"stopping the conversion of {WINDOW}" in caplog.text
    assert list((tmp_path / "storage").iterdir()) == []


@pytest.mark.usefixtures("single_process_group")
def test_a_conversion_that_does_not_end_is_killed_with_its_job_after_the_timeout_which_is_told(
    converting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args, config = converting(
        "trap '' TERM\nsleep 60 &\necho $! > pid\ntouch begun\nwait $!\ntouch ended", timeout_s=0.5
    )
    a_peer_is_lost_once(tmp_path / "begun", monkeypatch)
    with pytest.raises(PeerLost):
        come_back(args, config)
    assert not (tmp_path / "ended").exists()
    assert "moe-ckpt convert did not exit in 0.5 s" in caplog.text
    deadline = time.monotonic() + 30
    while is_running(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int((tmp_path / "pid").read_text()))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.usefixtures("single_process_group")
def test_a_conversion_that_found_only_an_older_iteration_whole_says_so(converting: Any, tmp_path: Path) -> None:
    args, config = converting("mkdir $8/iter_0000002", timeout_s=60.0)
    with pytest.raises(UsageError, match="iteration 4 did not come out of it"):
        come_back(args, config)
    assert list((tmp_path / "storage").iterdir()) == []
