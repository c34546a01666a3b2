"""Local recovery when losses come one after another: while others park, restart, wait or replay, and later on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, Nodes, recovered
from local_hooks import killed_at
from local_runs import PAIR, TWO, assert_only_replayed, case, recover, rejoined
from runs import Layout, flags
from sparse_hooks import killed_in_replay
from sparse_runs import ITERATIONS, FaultFree, assert_identical

full = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "victim", "rank", "place"),
    [
        pytest.param(PAIR, 1, 0, "parking", marks=pytest.mark.ci),
        pytest.param(PAIR, 1, 1, "restarting", marks=full),
        pytest.param(PAIR, 1, 0, "waiting", marks=full),
        pytest.param(TWO, 2, 1, "parking", marks=full),
        pytest.param(TWO, 2, 3, "restarting", marks=full),
        pytest.param(TWO, 2, 2, "restarting", marks=full),
        pytest.param(TWO, 2, 0, "waiting", marks=full),
    ],
    ids=str,
)
def test_a_second_loss_before_all_stand_together_is_survived(
    layout: Layout, victim: int, rank: int, place: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(layout, f"{victim}@10:step")
    run = recover(cluster, one, tmp_path, hooks=(partial(killed_at, str(tmp_path), rank, place),))
    assert (tmp_path / f"struck-{rank}-{place}").exists()
    assert any(map(recovered, run.outcomes[1:]))
    assert_identical(run, fault_free(one))


@pytest.mark.parametrize(
    ("nth", "phase"), [pytest.param(1, "after step", marks=full), pytest.param(2, "before step", marks=pytest.mark.ci)]
)
def test_a_loss_in_the_replaying_stage_begins_its_replay_again(
    nth: int, phase: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(TWO, "2@10:step")
    run = recover(cluster, one, tmp_path, hooks=(partial(killed_in_replay, str(tmp_path), 3, nth, phase),))
    assert len(run.outcomes) == 3
    assert_only_replayed(run, TWO, [[1]])
    assert_identical(run, fault_free(one))


@pytest.mark.ci
def test_a_start_that_is_refused_leaves_what_was_logged_and_parked(cluster: Cluster, tmp_path: Path) -> None:
    one = case(PAIR, "1@9:step")
    other = "--moe-ckpt-strategy", "full", "--train-iters", ITERATIONS, *one.model, "--moe-ckpt-memory-dir"
    argv = flags(cluster.corpus, PAIR, *map(str, other), str(cluster.memory))
    job = {"TORCHELASTIC_RUN_ID": f"{tmp_path.name}-killed-{cluster.memory.name}"}

    def kept() -> list[str]:
        return sorted(map(str, cluster.memory.glob("*/*/standby-*/segment-*")))

    def refused(attempt: int) -> None:
        left, places = kept(), [job | one for one in Nodes.one(PAIR.ranks).environments(attempt)]
        outcome = cluster.world.start(argv, PAIR.ranks, (), places).wait()
        assert set(outcome.codes) == {2} and "it was made with --moe-ckpt-strategy sparse" in outcome.said
        assert left and kept() == left

    run = recover(cluster, one, tmp_path, between=refused)
    assert_only_replayed(run, PAIR, [[1]])


@full
def test_many_losses_in_one_run_in_all_phases_cost_nothing(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(PAIR, "0@6:step", "1@8", "0@9:forward-backward", "1@12:end", "0@15:start", "1@17:step")
    run = recover(cluster, one, tmp_path)
    assert len(run.outcomes) == 7
    assert any(map(recovered, run.outcomes[1:]))
    assert_identical(run, fault_free(one))


@full
def test_global_recovery_may_be_asked_for(cluster: Cluster, fault_free: FaultFree, tmp_path: Path) -> None:
    one = replace(case(PAIR, "1@10:step"), recovery="global")
    run = recover(cluster, one, tmp_path)
    assert {event["scope"] for rank in range(2) for event in rejoined(run, rank)} == {"global"}
    assert_identical(run, fault_free(one))
