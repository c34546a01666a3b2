"""Jobs whose replicas go over process groups, and what connections cost; interfaces that are there and that are not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from fault_hooks import once_sealed
from runs import Layout, UndisturbedRun, flags
from test_protection import FULL, assert_same_end
from transport_hooks import CHUNK_BYTES, bulk_noted, sockets_counted
from world import World

TWO = Layout(pp=2, ep=1, ranks=2)


@pytest.mark.ci
def test_a_lost_node_is_replaced_from_replicas_that_went_over_process_groups(
    cluster: Cluster, undisturbed_run: UndisturbedRun, tmp_path: Path
) -> None:
    straight, killed = undisturbed_run(TWO), tmp_path / "killed"
    nodes = Nodes((("node-0", "node-1"), ("node-2", "node-1")), lost={0: "node-0"})
    outcomes = cluster.run(
        TWO, *FULL, "--metrics-jsonl", killed / "reports", "--save", killed, "--moe-ckpt-inject-fault", "0@6",
        "--moe-ckpt-transport", "process-group", "--moe-ckpt-interface", "lo", nodes=nodes,
        hooks=(once_sealed(cluster.memory, 4, 2 * TWO.ranks), partial(bulk_noted, str(tmp_path))),
    )  # fmt: skip
    table = recovered(outcomes[1])
    assert table[0] == "recovered iteration 4 exactly", outcomes[1].said
    assert any("peer memory" in line for line in table), table
    assert_same_end(straight, killed)
    assert "transport: process groups of gloo, staged on cpu" in outcomes[0].said
    assert "gloo uses interface lo (--moe-ckpt-interface)" in outcomes[0].said
    calls = [(tmp_path / f"calls-{rank}").read_text().splitlines() for rank in range(2)]
    for called in calls:
        assert {line.split()[0] for line in called} == {"send", "recv"}
        assert max(int(line.split()[1]) for line in called) == CHUNK_BYTES, "no message had several chunks"


def test_an_interface_that_no_machine_has_ends_the_job_with_one_line_before_gloo_looks_for_it(
    cluster: Cluster, world: World
) -> None:
    outcome = world.run(flags(cluster.corpus, TWO, *FULL, "--moe-ckpt-interface", "eth77"), 2)
    assert set(outcome.codes) == {2}, outcome.said
    lines = [line for line in outcome.lines if "eth77" in line and "....." not in line]
    assert len(set(lines)) == 1, outcome.said
    assert "rank 0: --moe-ckpt-interface eth77: this machine has no such interface" in lines[0]


@pytest.mark.ci
def test_sockets_grow_with_the_peers_of_a_rank_and_not_with_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Of 8 ranks each has at most: two listeners, six of trees and exchanges (one for each way to three others, whose
    numbers are powers of two away), and for each way to a peer in replication one."""
    layout, nodes = Layout(pp=2, ep=2, ranks=8), tuple(f"node-{rank // 2}" for rank in range(8))
    cluster.run(layout, *FULL, nodes=Nodes((nodes,), lost={}), hooks=(partial(sockets_counted, str(tmp_path)),))
    counts = [json.loads((tmp_path / f"sockets-{rank}.json").read_text()) for rank in range(8)]
    assert max(count["transports"] for count in counts) <= 2 + 6 + 4
    assert max(count["links"] for count in counts) <= 6
