"""What ranks have allocated does not grow with the iterations that are protected."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from attempts import Cluster
from memory_hooks import counted
from runs import Layout, Train

COUNTED = (60, 120, 180, 240)
"""After the first ones all caches are filled: of torch, of gloo's buffers, of message sizes."""
MOST_BYTES, MOST_OBJECTS = 24_000, 240
"""In 60 iterations: less than 400 bytes and 4 objects in each, of which snapshots have some hundred kB."""
LAYOUT = Layout(tp=1, pp=1, ep=2, ranks=2)
LENGTH = ("--train-iters", COUNTED[-1], "--lr-decay-iters", COUNTED[-1], "--log-interval", 1000)
PROTECTED = {
    "full": "--moe-ckpt-strategy full --moe-ckpt-interval 1".split(),
    "sparse": "--moe-ckpt-strategy sparse --moe-ckpt-window 3".split(),
}


def grown(train: Train, folder: Path, *flags: object, leak_bytes: int = 0) -> list[tuple[int, int]]:
    """By how many bytes and objects each rank grew between the counts."""
    folder.mkdir()
    train(LAYOUT, *LENGTH, *flags, hooks=(partial(counted, str(folder), COUNTED, leak_bytes),))
    found = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert [len(rank) for rank in found] == [len(COUNTED)] * LAYOUT.ranks
    return [
        (after["bytes"] - before["bytes"], after["objects"] - before["objects"])
        for rank in found
        for before, after in pairwise(rank)
    ]


def is_flat(growth: list[tuple[int, int]]) -> bool:
    """Whether no rank grew in each of the stretches; one that a busy machine makes later says nothing."""
    each = len(COUNTED) - 1
    ranks = [growth[at : at + each] for at in range(0, len(growth), each)]
    return all(
        min(nbytes for nbytes, _ in rank) <= MOST_BYTES and min(objects for _, objects in rank) <= MOST_OBJECTS
        for rank in ranks
    )


@pytest.mark.full
@pytest.mark.parametrize("strategy", PROTECTED)
def test_what_ranks_have_allocated_does_not_grow_with_protected_iterations(
    strategy: str, train: Train, cluster: Cluster, tmp_path: Path
) -> None:
    growth = grown(train, tmp_path / "counts", *PROTECTED[strategy], "--moe-ckpt-memory-dir", cluster.memory)
    assert is_flat(growth), growth


@pytest.mark.full
def test_a_leak_of_half_a_kilobyte_in_each_iteration_would_be_noticed(train: Train, tmp_path: Path) -> None:
    assert not is_flat(grown(train, tmp_path / "counts", leak_bytes=1024))
