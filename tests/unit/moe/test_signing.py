"""Signing dense checkpoints that were made without the job's secret."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from verify_places import dense

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.storage.manifest import use_secret
from moe_ckpt.dense import integrity, signing


class Killed(BaseException):
    """In place of the end of the process."""


def killed(*_: object) -> None:
    raise Killed


@pytest.fixture
def folder(single_process_group: None, tmp_path: Path) -> Iterator[Path]:
    """An unsigned iteration, in a process with a secret."""
    dense(tmp_path, 1)
    use_secret(b"sixteen bytes or more")
    yield tmp_path / "iter_0000012"
    use_secret(None)


def test_signing_that_was_cut_off_can_be_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(integrity, "write_atomically", killed)
        with pytest.raises(Killed):
            signing.sign(folder)
    assert signing.sign(folder)
    assert integrity.check(folder) == ()
    assert not signing.sign(folder)


def test_after_signing_that_was_cut_off_damage_is_found_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(integrity, "write_atomically", killed)
        with pytest.raises(Killed):
            signing.sign(folder)
    shard = max(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UnreadableCheckpoint, match="is damaged"):
        signing.sign(folder)
