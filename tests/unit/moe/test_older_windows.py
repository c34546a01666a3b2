"""How a window of another layout is made whole: in which folder, and for how long it is waited for."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.core.dist_checkpointing.moe import OlderWindow
from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.pretrain.checkpoint import older_windows
from megatron.pretrain.checkpoint.older_windows import load_window, shared_folder
from megatron.pretrain.errors import InvalidInput

WINDOW = OlderWindow(3, 4, "world_size 4", in_memory=False)


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("place", ["save", "storage"])
def test_what_an_attempt_left_that_was_killed_is_removed_by_the_next_one(place: str, tmp_path: Path) -> None:
    save, persist_dir = (str(tmp_path), None) if place == "save" else (None, str(tmp_path))
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=save), moe_checkpoint=SimpleNamespace(persist_dir=persist_dir)
    )
    (tmp_path / "iter_0000004").mkdir()
    killed = shared_folder(cast("Any", SimpleNamespace(config=config)))
    left = killed.__enter__()
    (left / "as large as the model").touch()
    with shared_folder(cast("Any", SimpleNamespace(config=config))) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"iter_0000004", folder.name}
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000004"]


@pytest.fixture
def converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a script play `moe-ckpt convert`, and gives the state of a job with so much patience."""

    def prepared(script: str, timeout_s: float) -> Any:
        played = tmp_path / "convert"
        played.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
        played.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(played))
        monkeypatch.setattr(older_windows, "all_done", lambda is_done: is_done)  # the only rank, without a device
        storage = tmp_path / "storage"
        storage.mkdir()
        settings = SimpleNamespace(persist_dir=str(storage), secret_file=None, timeout_s=timeout_s)
        config = SimpleNamespace(
            parallel=SimpleNamespace(device="cpu"), checkpoint=SimpleNamespace(save=None), moe_checkpoint=settings
        )
        return SimpleNamespace(config=config)

    return prepared


def a_peer_is_lost_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective in which ranks wait for the conversion fails as soon as this file is there."""

    def failing(is_done: bool) -> bool:
        if path.exists():
            raise PeerLost("rank 1 is gone")
        return is_done

    monkeypatch.setattr(older_windows, "all_done", failing)


@pytest.mark.usefixtures("single_process_group")
def test_when_a_peer_is_lost_the_conversion_is_told_to_end_and_tidies_up(
    converting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = converting("sleep 60 &\ntouch begun\nwait $!\necho $? > code", timeout_s=60.0)
    a_peer_is_lost_once(tmp_path / "begun", monkeypatch)
    with pytest.raises(PeerLost):
        load_window(state, WINDOW, lambda folder: None)
    assert (tmp_path / "code").read_text().strip() == "143", "its job had SIGTERM, and it was waited for itself"
    assert f"the conversion of {WINDOW} is told to end" in caplog.text
    assert list((tmp_path / "storage").iterdir()) == []


@pytest.mark.usefixtures("single_process_group")
def test_a_conversion_that_does_not_end_is_killed_with_its_job_after_the_timeout_which_is_told(
    converting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = converting("trap '' TERM\nsleep 60 &\necho $! > pid\ntouch begun\nwait $!\ntouch ended", timeout_s=0.5)
    a_peer_is_lost_once(tmp_path / "begun", monkeypatch)
    with pytest.raises(PeerLost):
        load_window(state, WINDOW, lambda folder: None)
    assert not (tmp_path / "ended").exists()
    assert "waited 0.5 s for moe-ckpt convert to end" in caplog.text
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
    state = converting("mkdir $8/iter_0000002", timeout_s=60.0)
    with pytest.raises(InvalidInput, match="iteration 4 did not come out of it"):
        load_window(state, WINDOW, lambda folder: None)
    assert list((tmp_path / "storage").iterdir()) == []
