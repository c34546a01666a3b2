"""What protection promises, in real jobs: sealed bytes never change, whatever is written around them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster, Nodes
from guarantee_hooks import no_joint_snapshot_after, reusing_buffers_early, watching_sealed_bytes
from runs import Layout
from world import Hook

pytestmark = pytest.mark.ci

LAYOUT = Layout(pp=2, ep=1, ranks=2)
EVERY = (
    "--moe-ckpt-strategy",
    "full",
    "--moe-ckpt-interval",
    "1",
    "--log-interval",
    "1000",
    "--moe-ckpt-timeout-s",
    "30",
)
TWO_NODES = Nodes((("node-0", "node-1"),))
ORDINARY = 25
"""Iterations with ordinary rounds: in those after them an older snapshot has to stay."""


def watched(cluster: Cluster, folder: Path, iterations: int, *hooks: Hook) -> list[dict[str, Any]]:
    """The facts of both ranks after a job that snapshots every iteration, each rank on a node of its own."""
    watch = partial(watching_sealed_bytes, str(folder))
    (outcome,) = cluster.run(LAYOUT, *EVERY, "--train-iters", iterations, nodes=TWO_NODES, hooks=(watch, *hooks))
    assert set(outcome.codes) == {0}, outcome.said
    return [json.loads((folder / f"watched-{rank}").read_text()) for rank in range(LAYOUT.ranks)]


@pytest.mark.parametrize(
    "iterations", [pytest.param(70, id="sample"), pytest.param(230, id="full", marks=pytest.mark.full)]
)
def test_sealed_bytes_stay_as_they_are_while_others_are_written(
    iterations: int, cluster: Cluster, tmp_path: Path
) -> None:
    stays = iterations - ORDINARY - 1  # looks at the snapshot and the replica that stay, the least of a correct run
    for facts in watched(cluster, tmp_path, iterations, partial(no_joint_snapshot_after, ORDINARY)):
        assert facts["looks"] == iterations
        assert min(facts["own"], facts["replica"]) >= stays, facts
        assert facts["different"] > 2, "nothing else was written beside what stayed"
        assert not facts["changed"]


def test_a_store_that_reuses_memory_early_is_noticed(cluster: Cluster, tmp_path: Path) -> None:
    facts = watched(cluster, tmp_path, 24, reusing_buffers_early)
    assert any(one["changed"] for one in facts), facts
