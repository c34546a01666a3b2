"""Copies that begin while a pipeline stage waits for another one: measured, and as good as any after a real kill."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, recovered
from fault_hooks import once_sealed, slow_passes
from runs import Layout, Train, differences, digest, reports_in

pytestmark = pytest.mark.ci

ITERATIONS = 10


@pytest.mark.parametrize(
    ("strategy", "layout", "flags"),
    [
        pytest.param("full", Layout(), "--moe-ckpt-replicate gradients", id="full"),
        pytest.param("selective", Layout(), "", id="selective", marks=pytest.mark.full),
        pytest.param("sparse", Layout(), "--moe-ckpt-window 2", id="sparse", marks=pytest.mark.full),
        pytest.param("full", Layout(vpp=2), "", id="full-virtual-stages", marks=pytest.mark.full),
    ],
)
def test_copies_and_sends_begin_in_waits_of_each_stage_and_bring_a_killed_job_back_to_the_bit(
    strategy: str, layout: Layout, flags: str, cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    straight, killed, last = tmp_path / "straight", tmp_path / "killed", ITERATIONS - 3
    given = ("--train-iters", ITERATIONS, "--lr-decay-iters", ITERATIONS, "--save")
    train(layout, *given, straight)
    outcomes = cluster.run(
        layout, *given, killed, "--moe-ckpt-strategy", strategy, "--moe-ckpt-replicas", "1", *flags.split(),
        "--moe-ckpt-copy-placement", "bubbles", "--metrics-jsonl", killed / "reports",
        "--moe-ckpt-inject-fault", f"1@{ITERATIONS - 1}",
        # Each stage waits longer than a busy machine keeps a copy thread from running.
        hooks=(once_sealed(cluster.memory, last, layout.ranks), partial(slow_passes, 0.1)),
    )  # fmt: skip
    assert recovered(outcomes[1])[0].startswith("recovered iteration"), outcomes[1].said
    assert not differences(digest(killed, ITERATIONS), digest(straight, ITERATIONS))
    assert "has no effect" not in outcomes[0].said
    told = [one["pipeline_waits"] for one in reports_in(killed / "reports")[: ITERATIONS - 2]]
    rows = [stages for stages in told if stages and stages[0]["passes_s"] > 0]
    assert len(rows) >= ITERATIONS - 5
    for stage in range(layout.pp):
        column = [stages[stage] for stages in rows]
        assert all(0 < row["waited_s"] < row["passes_s"] and row["estimated_s"] > 0 for row in column), column
        assert sum(row["copied_bytes"] for row in column) > 0, column
        assert sum(row["sent_bytes"] for row in column) > 0, column
