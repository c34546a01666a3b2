"""The folder in which a window of another layout is made whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.pretrain.checkpoint.older_windows import shared_folder


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
