"""Sparse checkpoints under worse than one kill: repeated, in a replay, too early, with lost and damaged memory."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from runs import Layout
from sparse_hooks import killed_in_replay, paced
from sparse_runs import BF16, DROPOUT, EXPERT_BIAS, Case, FaultFree, assert_identical, assert_replayed, killed
from world import Outcome

PAIR, FOUR = Layout(1, 1, 2, ranks=2), Layout(1, 2, 2, ranks=4)
MODEL = (*BF16, *EXPERT_BIAS, *DROPOUT)
ONE_FAULT = Case(PAIR, MODEL, faults=("1@8",))
TWO_NODES = (("node-0", "node-1"),)


def loaded(outcome: Outcome, iteration: int) -> list[str]:
    """The lines that say that the checkpoint of an iteration was loaded, in the words of either loop."""
    said = rf"loaded checkpoint (of iteration {iteration}\b|from .* at iteration {iteration}\b)"
    return re.findall(said, outcome.said)


@pytest.mark.full
@pytest.mark.parametrize(("nth", "phase"), [(1, "after step"), (2, "before step")])
def test_a_fault_in_the_middle_of_a_replay_begins_it_again(
    nth: int, phase: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    hook = partial(killed_in_replay, str(tmp_path), 0, nth, phase)
    run = killed(cluster, ONE_FAULT, tmp_path / "killed", hooks=(hook,))
    assert len(run.outcomes) == 3
    assert not recovered(run.outcomes[1]), "the replay had ended before"
    assert recovered(run.outcomes[2])[0].startswith("recovered iteration 6 exactly"), run.outcomes[2].said
    assert_replayed(run, 3)
    assert_identical(run, fault_free(ONE_FAULT))


@pytest.mark.ci
def test_a_fault_in_the_first_window_after_loading_a_checkpoint_loads_it_again(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    expected, copied = fault_free(ONE_FAULT), tmp_path / "copied"
    shutil.copytree(expected.folder, copied)
    loading = ("--load", str(copied), "--ckpt-step", "12")
    run = killed(cluster, Case(PAIR, MODEL, faults=("0@14:step",), sparse=loading), tmp_path / "killed")
    assert [len(loaded(outcome, 12)) for outcome in run.outcomes] == [1, 1]
    assert_identical(run, expected, after=12)


@pytest.mark.ci
def test_the_last_dense_checkpoint_is_taken_where_it_is_newer_than_the_last_whole_window(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    loading = ("--load", str(tmp_path / "killed"))
    run = killed(cluster, Case(PAIR, MODEL, window="5", faults=("0@9",), sparse=loading), tmp_path / "killed")
    assert loaded(run.outcomes[1], 6)
    assert not run.replays
    assert_identical(run, fault_free(ONE_FAULT))


@pytest.mark.full
def test_a_lost_node_is_replaced_from_replicas_though_ranks_move(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    before, after = ("node-0", "node-0", "node-1", "node-1"), ("node-2", "node-1", "node-1", "node-2")
    case = Case(FOUR, MODEL, faults=("0@9", "1@9"))
    nodes = Nodes((before, after), lost={0: "node-0"})
    run = killed(cluster, case, tmp_path / "killed", nodes=nodes)
    assert any("peer memory" in line for line in recovered(run.outcomes[1])), run.outcomes[1].said
    assert_replayed(run, 3)
    assert_identical(run, fault_free(case))


@pytest.mark.full
def test_a_node_is_lost_before_the_next_attempt_has_chosen_its_window(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    """What is fetched from peers is larger than any segment that there is as long as the window is not known."""
    case = Case(PAIR, MODEL, window="auto", faults=("0@14:step",))
    places = (("node-0", "node-1"), ("node-2", "node-1"))
    run = killed(
        cluster, case, tmp_path / "killed", nodes=Nodes(places, lost={0: "node-0"}), hooks=(partial(paced, 2),)
    )
    assert any("peer memory" in line for line in recovered(run.outcomes[1])), run.outcomes[1].said
    assert_identical(run, fault_free(case))


@pytest.mark.ci
def test_when_all_memory_is_lost_the_newest_window_in_storage_is_replayed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    storage = ("--moe-ckpt-persist-dir", str(tmp_path / "storage"), "--moe-ckpt-persist-interval", "3")
    case = Case(PAIR, MODEL, faults=("0@10:step",), sparse=storage)
    run = killed(cluster, case, tmp_path / "killed", nodes=Nodes((("node-0",) * 2,), lost={0: "node-0"}))
    assert any("persistent" in line for line in recovered(run.outcomes[1])), run.outcomes[1].said
    assert_replayed(run, 3)
    assert_identical(run, fault_free(case))


@pytest.mark.ci
@pytest.mark.parametrize(
    "which",
    [pytest.param(0, marks=pytest.mark.full), pytest.param(1), pytest.param(2, marks=pytest.mark.full)],
    ids=["first", "middle", "last"],
)
def test_a_damaged_snapshot_of_a_window_is_refused_and_the_peers_copy_is_taken(
    which: int, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    run = killed(
        cluster, ONE_FAULT, tmp_path / "killed", nodes=Nodes(TWO_NODES),
        between=lambda _: damage(cluster.memory / "node-0", 4 + which),
    )  # fmt: skip
    table = recovered(run.outcomes[1])
    assert any(f"refused: window of rank 0 after iteration {4 + which}" in line for line in table), table
    assert any(line.startswith("  peer memory of node 1") for line in table), table
    assert_replayed(run, 3)
    assert_identical(run, fault_free(ONE_FAULT))


@pytest.mark.ci
def test_without_an_intact_copy_of_a_window_an_older_one_in_storage_is_replayed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    storage = ("--moe-ckpt-persist-dir", str(tmp_path / "storage"), "--moe-ckpt-persist-interval", "6")
    case = Case(PAIR, MODEL, faults=("1@14:step",), sparse=storage)
    run = killed(
        cluster, case, tmp_path / "killed", between=lambda _: damage(cluster.memory / "node-0", 11),
    )  # fmt: skip
    table = recovered(run.outcomes[1])
    assert any("refused: " in line for line in table), table
    assert_replayed(run, 3)
    assert_identical(run, fault_free(case))


def damage(node: Path, iteration: int) -> None:
    """Flip a bit in rank 0's snapshot of this iteration, in the node's memory."""
    (sealed,) = node.glob(f"*/slot-000/segment-*.iter_{iteration:07d}-rank_00000-*.json")
    with sealed.with_name(f"{sealed.name[:11]}.bin").open("r+b") as segment:
        segment.seek(20_000)
        (byte,) = segment.read(1)
        segment.seek(20_000)
        segment.write(bytes([byte ^ 4]))


@pytest.mark.full
def test_all_ranks_plan_the_same_windows_in_a_new_order_after_each_reorder(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    often = ("--moe-ckpt-reorder-threshold", "0.01", "--moe-ckpt-reorder-fraction", "0.01")
    case = Case(FOUR, MODEL, faults=("2@11:step",), sparse=often)
    run = killed(cluster, case, tmp_path / "killed")
    planned = [[(event["iteration"], event["digest"]) for event in of_rank if event["event"] == "planned"]
               for of_rank in run.events]  # fmt: skip
    # A rank that is killed may have planned less in its last iteration than the others.
    assert len({tuple(dict(of_rank).items()) for of_rank in planned}) == 1
    begun = [one for one in run.events[0] if one["event"] == "planned" and one["iteration"] % 3 == 1]
    first_steps = {tuple(one["anchored"]) for one in begun}
    assert len(first_steps) > 1, "the order never changed: this shows nothing"
    assert_replayed(run, 3)
    assert_identical(run, fault_free(case))


@pytest.mark.ci
def test_where_copies_are_slow_the_window_grows_and_is_replayed(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    case = Case(PAIR, MODEL, window="auto", faults=("1@14:step",))
    run = killed(cluster, case, tmp_path / "killed", hooks=(partial(paced, 2),))
    ((first, last),) = re.findall(r"window (\d+) to (\d+): restored", run.outcomes[1].said)
    assert int(first) < int(last)
    assert_replayed(run, int(last) - int(first) + 1)
    assert_identical(run, fault_free(case))


@pytest.mark.full
def test_without_faults_sparse_checkpoints_change_nothing_in_training(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    overlapping = (*MODEL, "--overlap-grad-reduce", "--overlap-param-gather")
    case = Case(PAIR, overlapping, faults=("0@10:forward-backward",))
    run = killed(cluster, case, tmp_path / "killed")
    assert_replayed(run, 3)
    assert_identical(run, fault_free(case))
