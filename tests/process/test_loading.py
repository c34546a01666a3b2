"""Loading reads what was stored once over the job, compares it as it reads it, and says how fast that was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from runs import Layout, Train, digest
from test_falling_back import flip, shards

from moe_ckpt.dense import items
from moe_ckpt.dense.integrity import NAME, seal

pytestmark = pytest.mark.own_loop

LAYOUT = Layout(tp=1, pp=1, ep=2, ranks=4)
PARALLEL = "--ckpt-fully-parallel-load --dist-ckpt-optim-fully-reshardable".split()
WIDE = ["--hidden-size", 256, "--moe-ffn-hidden-size", 256]
"""Large enough that the index and the common part, which each rank reads, are little beside the shards."""


def read_so_far() -> int:
    """Bytes that this process asked the kernel for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


@contextmanager
def counted(folder: str) -> Iterator[None]:
    """Write down what each rank reads of files while it loads: all of it, and what it need not have read."""
    from megatron.pretrain.checkpoint import load, verified_reads

    original = vars(load)["_load"]

    def counting(*arguments: Any) -> None:
        before = read_so_far()
        original(*arguments)
        (Path(folder) / f"rank-{os.environ['RANK']}").write_text(str(read_so_far() - before))

    compared = load.require_intact

    def comparing(*arguments: Any, **named: Any) -> None:
        before = read_so_far()
        compared(*arguments, **named)
        (Path(folder) / f"compared-{os.environ['RANK']}").write_text(str(read_so_far() - before))

    with (
        mock.patch.object(load, "_load", counting),
        mock.patch.object(load, "require_intact", comparing),
        mock.patch.object(verified_reads, "disk_bytes_per_s", return_value=1e9),  # reads a part again
    ):
        yield


def test_each_byte_of_the_shards_is_read_once_over_the_job_and_the_rate_is_told(train: Train, tmp_path: Path) -> None:
    saved, counts = tmp_path / "saved", tmp_path / "counts"
    counts.mkdir()
    train(LAYOUT, *WIDE, *PARALLEL, "--train-iters", 2, "--save", saved)
    reports = tmp_path / "reports"
    loading = ["--load", saved, "--train-iters", 3, "--override-opt_param-scheduler", "--metrics-jsonl", reports]
    outcome = train(LAYOUT, *WIDE, *PARALLEL, *loading, hooks=(partial(counted, str(counts)),))
    folder = saved / "iter_0000002"
    stored = sum(path.stat().st_size for path in shards(folder))
    beside = sum(path.stat().st_size for path in folder.iterdir() if path not in shards(folder))
    read = sum(int(path.read_text()) for path in counts.iterdir())
    # The index is read by each rank, and more than once by core; everything else once by one of them.
    assert stored <= read < 1.02 * stored + 6 * LAYOUT.ranks * beside
    assert 6 * LAYOUT.ranks * beside < stored, "or the bound above says nothing"
    (line,) = [line for line in outcome.out[0].splitlines() if "read and verified" in line]
    assert "GB 1.00 times in" in line
    assert "GB/s; the disk alone: 1.00 GB/s" in line
    (load,) = [one["load"] for line in reports.read_text().splitlines() if "load" in (one := json.loads(line))]
    assert load["iteration"] == 2
    assert load["read_bytes"] == load["stored_bytes"] <= stored
    assert load["bytes_per_s"] > 0


def test_a_changed_byte_is_found_while_it_is_loaded_whichever_item_it_is_in(train: Train, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    layout = Layout(tp=1, pp=1, ep=1, ranks=1)
    train(layout, "--train-iters", 2, "--save", saved, "--save-interval", 1)
    (shard,) = shards(saved / "iter_0000002")
    extents = sorted(items.read(shard.parent)[shard])
    assert sum(nbytes for _, nbytes in extents) == shard.stat().st_size, "no byte is without a checksum"
    offset, nbytes = extents[len(extents) // 2]
    expected = digest(saved, 2)
    flip(shard, offset + nbytes - 1)
    outcome = train(layout, "--train-iters", 2, "--load", saved, "--save", tmp_path)
    (warning,) = outcome.warnings
    assert f"refused iteration 2: {shard} is damaged: its bytes {offset} to {offset + nbytes}" in warning
    assert digest(tmp_path, 2) == expected


@pytest.mark.full
def test_without_checksums_of_items_whole_files_are_compared_first(train: Train, tmp_path: Path) -> None:
    saved, layout = tmp_path / "saved", Layout(tp=1, pp=1, ep=1, ranks=1)
    train(layout, "--train-iters", 2, "--save", saved, "--save-interval", 1)
    folder = saved / "iter_0000002"
    for name in (items.NAME, NAME):
        (folder / name).unlink()
    seal(folder)
    loading = ["--train-iters", 1, "--override-opt_param-scheduler", "--load", saved]
    outcome = train(layout, *loading)
    assert "loaded checkpoint of iteration 2" in outcome.out[0]
    assert "read and verified" not in outcome.out[0]
    flip(shards(folder)[0], 1000)
    (warning,) = train(layout, *loading).warnings
    assert "is damaged: its checksum is" in warning
