"""The integrity file of a dense checkpoint: what it says, and that nothing in it can change unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.errors import NewerFormat, UnreadableCheckpoint
from megatron.core.dist_checkpointing.moe.store import integrity
from megatron.core.dist_checkpointing.moe.store.integrity import FileSum, check, decode, encode, expected, seal, shares

SUMS = {"__0_0.distcp": FileSum(7, "0" * 32), "common.pt": FileSum(0, "f" * 32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An iteration folder with two files."""
    (tmp_path / "a").write_bytes(b"some bytes")
    (tmp_path / "b").write_bytes(b"")
    return tmp_path


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
        decode(encode(SUMS).replace(b'"format":1', b'"format":2'), "file")


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


def test_readers_share_the_files_by_their_bytes() -> None:
    sums = {name: FileSum(nbytes, "0" * 32) for name, nbytes in (("a", 5), ("b", 4), ("c", 3), ("d", 2))}
    assert shares(sums, 2) == (("a", "d"), ("b", "c"))
    assert shares(sums, 5)[4] == ()
