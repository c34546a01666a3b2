"""How fast a checkpoint was loaded: told also where its files go away meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.pretrain.checkpoint.verified_reads import Reads, report


@pytest.mark.usefixtures("single_process_group")
def test_a_file_that_was_removed_meanwhile_costs_the_rate_of_the_disk_and_nothing_else(tmp_path: Path) -> None:
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    kept.write_bytes(bytes(4096))
    items = {path: {(0, 4096): "sum"} for path in (removed, kept)}
    told = report(4, items, Reads(8192, 1.0), 2.0)
    assert (told.stored_bytes, told.read_bytes, told.seconds) == (8192, 8192, 2.0)
    kept.unlink()
    told = report(4, items, Reads(8192, 1.0), 2.0)
    assert told.bytes_per_s == 4096
    assert told.disk_bytes_per_s is None
    assert "the disk alone: not measured here" in str(told)
