"""Local recovery when memory goes with its node or ranks move: replicas, parked state and logs are found elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, Nodes
from local_hooks import killed_at, replicas_refused
from local_runs import PAIR, TWO, WINDOW, assert_only_replayed, case, recover, rejoined, restored
from sparse_runs import FaultFree, assert_identical

pytestmark = pytest.mark.ci


@pytest.mark.full
def test_a_lost_node_is_replaced_and_its_stage_replays_from_the_newest_window_of_which_all_its_ranks_have_replicas(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """The second time the replicas of one rank are a window behind those of the other when their node is lost."""
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-2", "node-1", "node-1")
    one, nodes = case(TWO, "0@12", "1@12"), Nodes((before, after), lost={0: "node-0"})
    up_to_date = recover(cluster, one, tmp_path / "up-to-date", nodes=nodes)
    behind = recover(cluster, one, tmp_path, nodes=nodes, hooks=(partial(replicas_refused, 0, range(7, 13)),))
    assert restored(behind) == restored(up_to_date) - WINDOW, behind.outcomes[1].said
    for run in (up_to_date, behind):
        assert_only_replayed(run, TWO, [[0]])
        assert "peer memory of node" in run.outcomes[1].said
        assert_identical(run, fault_free(one))


@pytest.mark.full
def test_ranks_that_come_back_elsewhere_find_their_parked_state(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(PAIR, "1@10:step")
    run = recover(cluster, one, tmp_path, nodes=Nodes((("node-0", "node-1"), ("node-1", "node-0"))))
    assert_only_replayed(run, PAIR, [[1]])
    assert_identical(run, fault_free(one))


def test_when_the_node_with_the_logs_is_lost_too_the_scope_widens(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-0", "node-0", "node-2", "node-2")
    one = case(TWO, "0@10", "2@10", "3@10")
    run = recover(cluster, one, tmp_path, nodes=Nodes((before, after), lost={0: "node-1"}))
    assert {event["scope"] for rank in range(4) for event in rejoined(run, rank)} == {"global"}
    assert_identical(run, fault_free(one))


@pytest.mark.full
def test_a_peer_that_dies_while_it_sends_what_others_need_is_gone_around(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    nodes = Nodes((("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-2", "node-1", "node-1")), {0: "node-0"})
    one = case(TWO, "0@10", "1@10")
    run = recover(cluster, one, tmp_path, nodes=nodes, hooks=(partial(killed_at, str(tmp_path), 2, "sending"),))
    assert (tmp_path / "struck-2-sending").exists()
    assert_identical(run, fault_free(one))
