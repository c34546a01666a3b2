"""Without the distributed optimizer, data-parallel ranks on other nodes make replicas of what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout, Train, differences, digest, reports_in

pytestmark = pytest.mark.ci

LAYOUT = Layout(tp=1, pp=2, ep=1, ranks=4)
NODES = (("node-0", "node-1", "node-0", "node-1"), ("node-2", "node-1", "node-2", "node-1"))
SEALED = 4


@pytest.mark.parametrize(
    ("strategy", "snapshots"),
    [
        pytest.param("full", 1, id="full"),
        pytest.param("sparse --moe-ckpt-window 2", 1, id="sparse", marks=pytest.mark.full),
        # A stage has a layer of 4 experts, and the budget all of them, however slow the machine is.
        pytest.param(
            "selective --moe-ckpt-budget-local 1GB --moe-ckpt-budget-remote 1GB",
            1 + 4,
            id="selective",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_lost_node_comes_back_from_replicas_that_peers_made_of_their_own_state(
    strategy: str, snapshots: int, cluster: Cluster, train: Train, tmp_path: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(LAYOUT, "--bf16", "--metrics-jsonl", straight / "reports", "--save", straight, distributed=False)
    flags = ("--moe-ckpt-strategy", *strategy.split())
    faults = [part for rank in (0, 2) for part in ("--moe-ckpt-inject-fault", f"{rank}@6")]
    outcomes = cluster.run(
        LAYOUT, "--bf16", *flags, "--metrics-jsonl", killed / "reports", "--save", killed, *faults, distributed=False,
        nodes=Nodes(NODES, lost={0: "node-0"}),
        hooks=(once_sealed(cluster.memory, SEALED, 2 * snapshots * LAYOUT.ranks),),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == f"recovered iteration {SEALED} exactly", outcomes[1].said
    assert any("peer memory" in line for line in table), table
    assert not differences(digest(killed, 6), digest(straight, 6))
    first = reports_in(killed / "reports")[:5]
    assert first[-1]["protected_iteration"] >= 2
    assert sum(one["replicated_bytes"] for one in first) == 0, "data-parallel ranks hold all of it, random states too"
