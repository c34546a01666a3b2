"""How often snapshots go to storage follows how long storage takes, in a running job (CheckFreq; MoC 5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from attempts import Cluster
from fault_hooks import slow_storage
from runs import Layout
from world import Hook

from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore
from moe_ckpt.checkpoints.windows import stored_snapshots

pytestmark = pytest.mark.ci

LAYOUT = Layout(1, 1, 1, ranks=1)
ITERATIONS = 120
WRITE_S = 0.5


def stored(cluster: Cluster, folder: Path, policy: str, hooks: Sequence[Hook] = ()) -> dict[int, int | None]:
    """Iterations in storage, each with the persist interval that the job had then; None for a fixed one."""
    flags = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "1", "--moe-ckpt-interval-policy", policy)
    storage = ("--moe-ckpt-persist-dir", folder, "--moe-ckpt-persist-interval", "1", "--moe-ckpt-persist-keep", "99")
    iterations = ("--train-iters", ITERATIONS, "--lr-decay-iters", ITERATIONS)
    (outcome,) = cluster.run(LAYOUT, *iterations, *flags, *storage, hooks=hooks, job=folder.name)
    assert set(outcome.codes) == {0}, outcome.said
    (place,) = {path.parent.parent for path in folder.rglob("manifest.json")}
    found = {}
    for seen in stored_snapshots(FilesystemStore(place, 0)):
        rhythm = seen.facts.scalars["strategy"]["rhythm"]  # type: ignore[index, call-overload]
        found[seen.snapshot.iteration] = rhythm.get("persist_interval")  # type: ignore[union-attr]
    return found


def test_storage_that_takes_many_iterations_for_a_write_is_asked_as_rarely(cluster: Cluster, tmp_path: Path) -> None:
    found = stored(cluster, tmp_path / "storage", "checkfreq", (partial(slow_storage, WRITE_S),))
    intervals = [interval for interval in found.values() if interval is not None]
    assert intervals[0] == 1, "it begins at the flag's"
    assert max(intervals) > 1, found
    # The next one is due an interval after the one before, as that stood when it was planned or later.
    for (earlier, before), (later, after) in pairwise(sorted(found.items())):
        assert later - earlier >= min(before or 1, after or 1), found
