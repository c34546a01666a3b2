"""Checksums of the items of a shard file: the file that has them, and that they are those of the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from megatron.core.dist_checkpointing.moe.errors import UnreadableCheckpoint
from moe_ckpt.dense import integrity, items

SUMS = {"__0_0.distcp": {(0, 7): "0" * 32, (7, 3): "f" * 32}, "__1_0.distcp": {(0, 0): "a" * 32}}


def test_what_was_encoded_is_decoded() -> None:
    assert items.decode(items.encode(SUMS), "file") == SUMS


def test_each_changed_byte_of_the_file_is_refused() -> None:
    content = items.encode(SUMS)
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        with pytest.raises(UnreadableCheckpoint, match=r"^file is (?:damaged|written)"):
            items.decode(bytes(changed), "file")


def test_a_file_outside_of_the_folder_is_refused() -> None:
    with pytest.raises(UnreadableCheckpoint, match="file is damaged"):
        items.decode(items.encode({"../a": {(0, 1): "0" * 32}}), "file")


@given(sizes=st.lists(st.integers(0, 9), max_size=12), block=st.integers(1, 16))
def test_sums_of_items_are_those_of_their_bytes_wherever_blocks_end(
    sizes: list[int], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytes(range(sum(sizes)))
    path = tmp_path_factory.mktemp("items") / "file"
    path.write_bytes(content)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    extents = set(zip(starts, sizes, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "_BLOCK_BYTES", block)
        whole, found = items.sums_of_file(path, extents)
    assert whole == integrity.FileSum(len(content), xxh3_128(content).hexdigest())
    assert found == {(at, size): xxh3_128(content[at : at + size]).hexdigest() for at, size in extents}
