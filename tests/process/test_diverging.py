"""Replays that come out otherwise than recorded: found, named, passed by, and never the end of a job."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import attempts
import pytest
from attempts import Cluster, recovered
from diverging_hooks import a_wrong_byte, another_loss, logs_without_fingerprints
from fault_hooks import slow_passes
from local_runs import case, recover
from runs import Layout, flags
from sparse_runs import BF16, DROPOUT, Case, FaultFree, Run, assert_identical, killed
from world import Outcome

PAIR, THREE = Layout(1, 1, 2, ranks=2), Layout(1, 3, 1, ranks=3)
MODEL = (*BF16, *DROPOUT)
OTHERWISE = "came out otherwise"
MEMORY_ONLY = Case(PAIR, MODEL, faults=("0@9:step",))


def recoveries(run: Run) -> list[dict[str, Any]]:
    """What `--metrics-jsonl` says of each recovery."""
    lines = map(json.loads, (run.folder / "reports").read_text().splitlines())
    return [line["recovery"] for line in lines if "recovery" in line]


@pytest.mark.ci
def test_the_window_of_a_replay_that_diverged_is_passed_by_and_a_checkpoint_loaded(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    loading = ("--load", str(tmp_path / "killed"))
    # The window from 6 to 10 is newer than the checkpoint of iteration 6.
    one = Case(PAIR, MODEL, faults=("0@12:step",), sparse=loading, window="5")
    hook = partial(another_loss, range(7, 11))
    run = killed(cluster, one, tmp_path / "killed", hooks=(hook,), forgiven=OTHERWISE)
    diverged, last = run.outcomes[1:]
    assert set(diverged.codes) == {1}
    assert "the loss" in diverged.said and "recorded was" in diverged.said
    assert any("all stages from iteration" in line and "gave the loss" in line for line in last.lines), last.said
    assert any("successfully loaded checkpoint" in line and "at iteration 6" in line for line in last.lines), last.said
    assert any("training continues from iteration 6: those up to" in line for line in last.lines), last.said
    assert_identical(run, fault_free(one))


@pytest.mark.ci
def test_an_older_window_in_storage_takes_the_place_of_one_that_diverged(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    storage = ("--moe-ckpt-persist-dir", str(tmp_path / "storage"), "--moe-ckpt-persist-interval", "3")
    one = Case(PAIR, MODEL, faults=("1@14:step",), sparse=storage)
    # A window is in storage before the next one is whole, also on a busy machine.
    hooks = partial(another_loss, [11]), partial(slow_passes, 0.1)
    run = killed(cluster, one, tmp_path / "killed", hooks=hooks, forgiven=OTHERWISE)
    assert [set(outcome.codes) for outcome in run.outcomes[1:]] == [{1}, {0}]
    table = recovered(run.outcomes[2])
    assert table[0] == "recovered iteration 9 exactly", run.outcomes[2].said
    assert any("diverged before: the replay of all stages from iteration 10 to 12" in line for line in table), table
    assert any("iteration 11 came out otherwise: it gave the loss" in line for line in table), table
    assert any(line.startswith("  trained again: iterations 10 to 1") for line in table), table
    assert not any("  refused:" in line for line in table), table
    assert_identical(run, fault_free(one))


def started_again(cluster: Cluster, run: Run, *more: str) -> Outcome:
    """Another start of a job that has ended, with all that it left in memory."""
    saving = ("--save", run.folder, "--metrics-jsonl", run.folder / "reports", "--moe-ckpt-memory-dir", cluster.memory)
    argv = flags(cluster.corpus, PAIR, *MEMORY_ONLY.flags, *map(str, saving), *more)
    job = f"{run.folder.parent.name}-{run.folder.name}-{cluster.memory.name}"
    environments = [
        {"MOE_CKPT_NODE": "node-0", "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": job} for rank in range(PAIR.ranks)
    ]
    hook = partial(another_loss, [5, 6])
    return cluster.world.start(argv, PAIR.ranks, (hook,), environments).wait_or_restart()


@pytest.mark.ci
def test_with_nothing_older_left_the_job_ends_with_all_copies_and_a_user_may_accept_the_difference(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = partial(another_loss, [5, 6])
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 3)
    with pytest.raises(AssertionError, match="still failing after 3 attempts"):
        killed(cluster, MEMORY_ONLY, tmp_path / "killed", hooks=(hook,), forgiven="gave the loss")
    run = Run(tmp_path / "killed")
    refused = started_again(cluster, run)
    assert set(refused.codes) == {1}
    assert any("nothing older is left" in line and "--moe-ckpt-replay-tolerance" in line for line in refused.lines)
    accepted = started_again(cluster, run, "--moe-ckpt-replay-tolerance", "1e-5")
    assert set(accepted.codes) == {0}, accepted.said
    table = recovered(accepted)
    assert table[0] == "recovered iteration 6 within tolerance 1e-05 of the recorded losses", table
    assert [one["exactness"] for one in recoveries(run)] == [table[0].removeprefix("recovered iteration 6 ")]


@pytest.mark.ci
def test_a_wrong_byte_in_a_stage_that_replays_alone_is_found_and_all_stages_replay(
    cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(THREE, "1@9:step")
    run = recover(cluster, one, tmp_path, hooks=(partial(a_wrong_byte, 1, 8, 2),), forgiven=OTHERWISE)
    diverged, last = run.outcomes[1:]
    assert set(diverged.codes) == {1}
    named = "the activations forward/chunk0/microbatch2 that stage 1 sends in iteration 8 have the fingerprint"
    assert any(named in line for line in diverged.lines), diverged.said
    table = recovered(last)
    assert table[0].startswith("recovered iteration 6 exactly"), last.said
    assert any("the replay of stage 1 alone from iteration" in line and named in line for line in last.lines), table
    assert "global" in next(line for line in last.lines if line.startswith("recovered"))
    assert_identical(run, fault_free(one))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("hooks", "exactness"),
    [
        pytest.param((), "exactly", id="compared", marks=pytest.mark.full),
        pytest.param((logs_without_fingerprints,), "unverified", id="not"),
    ],
)
def test_a_stage_that_replayed_alone_is_called_exact_only_if_what_it_sent_was_compared(
    hooks: Collection[Any], exactness: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(THREE, "1@9:step")
    run = recover(cluster, one, tmp_path, hooks=tuple(hooks))
    table = recovered(run.outcomes[1])
    assert table[0] == f"recovered iteration 9 {exactness}", run.outcomes[1].said
    said = [line for line in table if "not verified: stage 1 (ranks 1), iterations" in line]
    assert len(said) == (exactness == "unverified"), table
    assert [found["exactness"] for found in recoveries(run)] == [exactness]
    assert_identical(run, fault_free(one))
