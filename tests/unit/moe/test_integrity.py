"""The integrity file of a dense checkpoint: what it says, and that nothing in it can change unseen."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.moe.dense_saves import choosing as loading
from megatron.core.dist_checkpointing.moe.dense_saves import writing
from megatron.core.dist_checkpointing.moe.dense_saves.writing import RankFailure
from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.ports import Facts, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.storage.manifest import Manifest, framed, unframed, unsealed, use_secret
from megatron.core.dist_checkpointing.moe.storage.manifest import encode as encode_manifest
from megatron.pretrain.testing import cpu_device
from moe_ckpt.dense import chain, integrity
from moe_ckpt.dense.integrity import FileSum, check, decode, encode, expected, seal, shares

SUMS = {"__0_0.distcp": FileSum(7, "0" * 32), "common.pt": FileSum(0, "f" * 32)}


CHAIN = chain.Chain(12, {0: (12, 12)}, {12: "0" * 16}, 0, None, "fp32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An iteration folder with two files."""
    (tmp_path / "a").write_bytes(b"some bytes")
    (tmp_path / "b").write_bytes(b"")
    return tmp_path


def test_what_core_wrote_and_did_not_sync_is_on_the_disk_before_it_is_sealed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    seal(folder, {"a": FileSum(10, "0" * 32)})
    assert synced[0] == "b"
    assert "a" not in synced


def test_the_file_is_one_line_in_the_written_format() -> None:
    body = f'{{"format":1,"files":{{"__0_0.distcp":[7,"{"0" * 32}"],"common.pt":[0,"{"f" * 32}"]}}}}'
    assert encode(SUMS) == f'{{"xxh3":"5c4597122eaed6c1138bdfed0d4c5ebd","integrity":{body}}}\n'.encode()


def test_what_was_encoded_is_decoded() -> None:
    assert decode(encode(SUMS), "file") == SUMS


def test_each_changed_byte_of_the_file_is_refused() -> None:
    content = encode(SUMS)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        with pytest.raises(UnreadableCheckpoint, match=r"^file is (?:damaged|written)"):
            decode(bytes(changed), "file")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"integrity":[]}', b"[" * 100_000, b"\xff"])
def test_what_is_no_integrity_file_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableCheckpoint, match="file is damaged"):
        decode(content, "file")


@pytest.mark.parametrize("name", ["../a", "a/b", "..", ""])
def test_a_file_outside_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match="file is damaged"):
        decode(encode({name: FileSum(1, "0" * 32)}), "file")


def test_a_later_format_is_not_called_damaged() -> None:
    with pytest.raises(NewerFormat, match="written in format 2, this version reads up to 1"):
        decode(later("integrity", encode(SUMS)), "file")
    with pytest.raises(NewerFormat, match="written in format 3, this version reads up to 2"):
        chain.decode(later("chain", chain.encode(CHAIN), 3), "file")


def test_a_damaged_version_is_damage_and_asks_for_no_newer_software() -> None:
    for content, read in ((encode(SUMS), decode), (chain.encode(CHAIN), chain.decode)):
        with pytest.raises(UnreadableCheckpoint, match="does not match its checksum") as refusal:
            read(content.replace(b'"format":1', b'"format":2'), "file")  # type: ignore[operator]
        assert not isinstance(refusal.value, NewerFormat)


def test_a_file_under_another_spelling_is_refused_whatever_its_checksum() -> None:
    body = unframed("integrity", encode(SUMS))
    assert body is not None
    with pytest.raises(UnreadableCheckpoint, match="no save writes it so"):
        decode(framed("integrity", body.replace(b",", b", ")), "file")


def later(key: str, content: bytes, version: int = 2) -> bytes:
    """As a later version would write it, with a checksum that is right."""
    body = unframed(key, content)
    assert body is not None
    return framed(key, body.replace(b'"format":1', b'"format":%d' % version))


def test_a_sealed_folder_is_undamaged(folder: Path) -> None:
    seal(folder)
    assert check(folder) == ()


def test_a_folder_that_was_never_sealed_is_neither_intact_nor_damaged(folder: Path) -> None:
    assert check(folder) is None


def test_sums_that_are_known_are_taken_and_the_other_files_are_read(folder: Path) -> None:
    seal(folder, {"a": FileSum(10, "1" * 32)})
    (damage,) = check(folder) or ()
    assert (damage.path, damage.expected) == (folder / "a", f"checksum {'1' * 32}")


@pytest.mark.parametrize("known", [{"a": FileSum(9, "1" * 32)}, {"c": FileSum(9, "1" * 32)}])
def test_a_folder_that_lacks_what_was_written_is_not_sealed(known: dict[str, FileSum], folder: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="9 bytes were written"):
        seal(folder, known)
    assert check(folder) is None


def test_only_the_files_that_were_asked_for_are_compared(folder: Path) -> None:
    seal(folder)
    (folder / "a").write_bytes(b"other bytes")
    assert check(folder, ["b"]) == ()
    assert len(check(folder, ["a"]) or ()) == 1


def test_a_checkpoint_that_says_that_it_has_the_file_must_have_it(folder: Path) -> None:
    assert expected(folder, {}) is None
    with pytest.raises(UnreadableCheckpoint, match="is missing, so its bytes cannot be checked"):
        expected(folder, {"content_metadata": {integrity.MARK: 1}})


@pytest.mark.parametrize("name", [chain.MANIFEST, "common.pt", ".moe_ckpt_doubtful"])
def test_with_a_secret_a_file_that_changes_what_is_loaded_cannot_be_added(name: str, folder: Path) -> None:
    try:
        use_secret(b"sixteen bytes or more")
        seal(folder)
        assert expected(folder, {}) is not None
        (folder / name).write_bytes(b"of another iteration, or of anybody")
        with pytest.raises(UnreadableCheckpoint, match=f"{name} was not there when .* was signed"):
            expected(folder, {})
    finally:
        use_secret(None)


@pytest.mark.parametrize("name", [chain.MANIFEST, "common.pt", ".moe_ckpt_doubtful"])
def test_a_file_of_an_older_save_that_lies_over_this_one_is_named(name: str, folder: Path) -> None:
    """As where a folder was copied over another one: core would take `common.pt` before the state in the shards."""
    seal(folder)
    (folder / "notes.txt").write_text("of a person, which nobody loads")
    assert expected(folder, {}) is not None and check(folder) == ()
    (folder / name).write_bytes(b"of another iteration")
    with pytest.raises(
        UnreadableCheckpoint, match=f"{name} was not there when .* was saved, and would change the state"
    ):
        expected(folder, {})
    (damage,) = check(folder) or ()
    assert (damage.path.name, damage.found) == (name, "it was added")


@pytest.mark.parametrize("key", ["integrity", "manifest"])
def test_the_secret_signs_no_file_that_could_be_made_a_manifest_with_its_signature(key: str, folder: Path) -> None:
    try:
        use_secret(b"sixteen bytes or more")
        made = Manifest(SnapshotId(1, 0), Facts("job"), "segment-000.bin", Layout.of([]), ())
        body = encode(SUMS) if key == "integrity" else encode_manifest(made)
        inner = unsealed(key, body, "it", "sign it")
        assert inner is not None
        (folder / "__0_0.distcp").write_bytes(inner)
        with pytest.raises(UnreadableCheckpoint, match="to sign it would sign a snapshot: remove it"):
            seal(folder)
        assert not (folder / integrity.NAME).exists()
    finally:
        use_secret(None)


def test_a_description_of_the_content_that_is_none_does_not_stop_the_reader(folder: Path) -> None:
    assert expected(folder, {"content_metadata": "a sentence"}) is None


@pytest.mark.usefixtures("single_process_group")
def test_ranks_that_wait_for_a_slow_sum_ask_again_and_again_and_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A single collective would last as long as the largest file takes, and may time out."""
    asked, real, reduce = [], loading.damaged, dist.all_reduce

    def slow(sums: Any, **options: Any) -> Any:
        time.sleep(10 * writing.POLL_INTERVAL_S)
        return real(sums, **options)

    def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        asked.append(time.monotonic())
        return reduce(tensor, *arguments, **named)

    monkeypatch.setattr(loading, "damaged", slow)
    monkeypatch.setattr(writing, "SAY_EVERY_S", 0.1)
    monkeypatch.setattr(dist, "all_reduce", counted)
    seal(folder)
    with cpu_device.installed():
        loading.require_intact(integrity.read(folder) or {})
        assert len(asked) > 2
        assert f"rank 0: still reading 2 files of {folder} for their checksums after 0 s" in caplog.text
        (folder / "a").write_bytes(b"some bytez")
        with pytest.raises(RankFailure, match="a is damaged: its checksum is"):
            loading.require_intact(integrity.read(folder) or {})


def test_where_nodes_have_copies_of_their_own_each_node_reads_all_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, single_process_group: None
) -> None:
    """The share of this rank among all ranks has nothing wrong in it: no other node reads this copy."""
    seal(folder)
    sums = integrity.read(folder) or {}
    wrong, *_ = shares(sums, 2)[0]
    wrong.write_bytes(b"x" * sums[wrong].nbytes)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    monkeypatch.setattr(loading, "raise_on_all_ranks", lambda problem: pytest.fail(problem) if problem else None)
    reduce = dist.all_reduce

    def with_another_node(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        if tensor.dtype is torch.int64 and tensor.numel() == 2:  # which sees another file there
            tensor.copy_(torch.minimum(tensor, torch.tensor([7, -7])))
        return reduce(tensor, *given, **named)

    with cpu_device.installed():
        loading.require_intact(sums)
        monkeypatch.setattr(dist, "all_reduce", with_another_node)
        with pytest.raises(pytest.fail.Exception, match="is damaged: its checksum is"):
            loading.require_intact(sums)


def test_readers_share_the_files_by_their_bytes() -> None:
    sums = {name: FileSum(nbytes, "0" * 32) for name, nbytes in (("a", 5), ("b", 4), ("c", 3), ("d", 2))}
    assert shares(sums, 2) == (("a", "d"), ("b", "c"))
    assert shares(sums, 5)[4] == ()
