"""Checksums with the secret of a job: a copy that somebody else made is refused, and the reason is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import OtherSecret, UnreadableCheckpoint, UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.runtime import opening
from megatron.core.dist_checkpointing.moe.runtime.process_info import ProcessInfo
from megatron.core.dist_checkpointing.moe.snapshot.persisting import CopyOrder, carry_out
from megatron.core.dist_checkpointing.moe.storage.base import SnapshotReader
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from megatron.core.dist_checkpointing.moe.storage.manifest import checksum, decode, encode, use_secret
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.small_files import SECRET_FILE, read_secret, signed

OWN, OTHER = b"the secret of this job", b"the secret of another one"
SNAPSHOT, LAYOUT = SnapshotId(4, 0), Layout.of([Field("w", "uint8", (4096,))])


@pytest.fixture(autouse=True)
def _without_a_secret_afterwards() -> Iterator[None]:
    yield
    use_secret(None)


def sealed(folder: Path, secret: bytes | None) -> FilesystemStore:
    use_secret(secret)
    store = FilesystemStore(folder, 0)
    with store.reserve(SNAPSHOT, LAYOUT) as writer:
        writer.put("w", bytes(4096))
        writer.seal(Facts("job", "", {}, {}))
    return store


def opened(store: FilesystemStore | MemoryStore) -> SnapshotReader:
    return store.open(SNAPSHOT)


def test_a_snapshot_is_read_with_the_secret_that_it_was_sealed_with(tmp_path: Path) -> None:
    with opened(sealed(tmp_path, OWN)) as reader:
        assert reader.verify() == ()
        assert bytes(reader.read("w")) == bytes(4096)


@pytest.mark.parametrize(
    ("by", "says"),
    [(None, "not sealed with this job's secret"), (OTHER, "is forged, or is of a job with another secret")],
    ids=["anybody", "another job"],
)
def test_a_copy_that_somebody_else_sealed_is_refused_by_name(tmp_path: Path, by: bytes | None, says: str) -> None:
    store = sealed(tmp_path, by)
    use_secret(OWN)
    with pytest.raises(UnreadableCheckpoint, match=says) as found:
        opened(store)
    assert "\n" not in str(found.value)
    assert [torn.snapshot for torn in store.snapshots().torn] == [SNAPSHOT]


def test_what_a_job_with_a_secret_has_stored_is_not_replaced_by_one_without(tmp_path: Path) -> None:
    storage = sealed(tmp_path, OWN)
    with opened(storage) as reader:
        order = CopyOrder(reader.manifest, (SNAPSHOT,))
    use_secret(None)
    with pytest.raises(OtherSecret):
        carry_out(order, [], storage)
    use_secret(OWN)
    with opened(storage) as reader:
        assert not reader.verify()


@pytest.mark.parametrize("damaged", [(0, 1), (0,)])
def test_memory_of_which_this_secret_opens_nothing_is_of_another_secret_and_not_damaged(
    damaged: tuple[int, ...], tmp_path: Path
) -> None:
    store = MemoryStore(tmp_path, "job", 0, (4096,) * 2)
    for iteration in (0, 1):
        use_secret(OTHER if iteration in damaged else OWN)
        with store.reserve(SnapshotId(iteration, 0), LAYOUT) as writer:
            writer.put("w", bytes(4096))
            writer.seal(Facts("job", "", {}, {}))
    use_secret(OWN)
    assert [one.is_newer for one in store.snapshots().torn] == [len(damaged) == 2] * len(damaged)


def test_without_the_secret_a_snapshot_is_not_read_and_the_flag_is_named(tmp_path: Path) -> None:
    store = sealed(tmp_path, OWN)
    use_secret(None)
    with pytest.raises(UnreadableCheckpoint, match=f"--moe-ckpt-secret-file, or {SECRET_FILE}"):
        opened(store)


def test_bytes_that_were_changed_together_with_their_plain_checksum_are_refused(tmp_path: Path) -> None:
    """What a forger without the secret can do: bytes of their own, and every checksum that anybody can compute."""
    store = sealed(tmp_path, OWN)
    with opened(store) as reader:
        manifest = reader.manifest
    use_secret(None)
    forged = encode(replace(manifest, checksums=(checksum(b"\1" * 4096),)))
    use_secret(OWN)
    with pytest.raises(UnreadableCheckpoint):
        decode(forged.replace(b'"xxh3"', b'"hmac"', 1), "forged")


def test_a_keyed_checksum_depends_on_every_byte_and_on_the_secret() -> None:
    data = bytearray(1000)
    before = signed(OWN, data)
    assert signed(OTHER, data) != before
    data[999] ^= 1
    assert signed(OWN, data) != before
    assert len(before) == 32


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"x" * 32, 0o640, "can be read or written by others \\(mode 0640\\): chmod 600"),
        (b"short\n", 0o600, "has 5 bytes, but 16 to 4096 are needed"),
        (b"x" * 5000, 0o600, "16 to 4096 are needed"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, says: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=says):
        read_secret(str(path))


def test_a_secret_comes_from_the_flag_or_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flag", "environment"):
        (tmp_path / name).write_bytes((name * 4).encode())
        os.chmod(tmp_path / name, 0o600)
    assert read_secret(None) is None
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "environment"))
    assert read_secret(None) == b"environment" * 4
    assert read_secret(str(tmp_path / "flag")) == b"flag" * 4


def test_a_missing_secret_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=f"secret file {tmp_path}"):
        read_secret(str(tmp_path))


def test_the_flag_of_a_job_seals_from_its_start_and_ranks_with_other_secrets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(OWN)
    (tmp_path / "secret").chmod(0o600)
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    config = MoECheckpointConfig(strategy="full", memory_dir=str(memory), secret_file=str(tmp_path / "secret"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    opening.introduced(HashStore(), config, ProcessInfo(0, "node-0", "job"))
    assert checksum(b"bytes") == signed(OWN, b"bytes")

    def with_another(*arguments: Any) -> Any:
        own, summed_up = arguments[4:6]
        return summed_up([own, own | {"secret": "of another file"}])

    monkeypatch.setattr(opening, "gathered_by_store", with_another)
    with pytest.raises(UsageError, match="rank 1 and rank 0 have different secrets"):
        opening.introduced(HashStore(), config, ProcessInfo(0, "node-0", "job"))
