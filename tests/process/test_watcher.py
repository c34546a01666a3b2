"""A main thread that is inside a call of C when a peer is lost, or when it is told to end, is freed and parks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster
from local_runs import PAIR, assert_only_replayed, case, recover
from runs import Start, flags, metrics, published
from sparse_runs import FaultFree, assert_identical
from watcher_hooks import PATIENCE_S, standing
from world import HANG_TIMEOUT_S

SEALED_WITHIN_S = 30.0
"""Seconds on a machine that has nothing else to do; without the watcher a call of C would not end at all."""
AT = 8
SLURM_FLAGS = ("--exit-signal-handler",)
"""Those that scripts/slurm/job.sh adds."""


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if one["event"] == kind]


@pytest.mark.parametrize(
    "handling",
    [
        pytest.param((), id="plain"),
        pytest.param(SLURM_FLAGS, id="with Slurm's flags", marks=pytest.mark.full),
    ],
)
def test_a_rank_inside_a_call_parks_within_seconds_of_the_death_of_its_peer(
    handling: tuple[str, ...], cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    one = case(PAIR, sparse=handling)
    run = recover(cluster, one, tmp_path, hooks=(partial(standing, str(tmp_path), AT, (0,), 1),))
    (died,), parked = events(tmp_path, "died"), [event for event in events(tmp_path, "parked") if event["rank"] == 0]
    assert [event["iteration"] for event in parked] == [AT - 1], run.outcomes[0].said
    assert PATIENCE_S < parked[0]["at_s"] - died["at_s"] < SEALED_WITHIN_S, run.outcomes[0].said
    # What an aborted kernel leaves is garbage: nothing more was computed with it.
    assert not events(tmp_path, "continued")
    said = run.outcomes[0].said
    assert "rank 0: peer failure: rank 1 closed its connection; the main thread is blocked in stand" in said
    assert_only_replayed(run, PAIR, [[1]])
    assert_identical(run, fault_free(one))


@pytest.mark.ci
def test_ranks_inside_a_call_park_within_seconds_of_sigterm(cluster: Cluster, tmp_path: Path) -> None:
    one = case(PAIR)
    hook = partial(standing, str(tmp_path), AT, (0,), None)  # the other one waits for it
    environment = {"TORCHELASTIC_RUN_ID": f"told-{cluster.memory.name}", "MOE_CKPT_NODE": "node-0"}
    argv = flags(cluster.corpus, PAIR, "--moe-ckpt-memory-dir", str(cluster.memory), *one.flags)
    running = cluster.world.start(argv, PAIR.ranks, [hook], [environment] * PAIR.ranks)
    wait_until((tmp_path / "stood-0").exists)
    told_s = time.time()
    for rank in range(PAIR.ranks):
        os.kill(running.process_id(rank), signal.SIGTERM)
    outcome = running.wait_or_restart()
    assert set(outcome.codes) == {1}, outcome.said
    parked = events(tmp_path, "parked")
    assert sorted((event["rank"], event["iteration"]) for event in parked) == [(0, AT - 1), (1, AT - 1)], outcome.said
    assert max(event["at_s"] for event in parked) - told_s < SEALED_WITHIN_S
    assert "told to end by SIGTERM; the main thread is blocked in stand" in outcome.said
    assert not events(tmp_path, "continued")
    again = cluster.world.start(argv, PAIR.ranks, [hook], [environment] * PAIR.ranks).wait()
    assert set(again.codes) == {0}, again.said
    assert f"recovered iteration {AT - 1} exactly" in again.said


def test_with_slurms_flags_sigterm_saves_and_leaves_where_no_peer_is_lost(
    start: Start, cluster: Cluster, save: Path, tmp_path: Path
) -> None:
    reports = tmp_path / "reports"
    one = case(PAIR, sparse=SLURM_FLAGS)
    memory = ("--moe-ckpt-memory-dir", cluster.memory)
    saving = ("--save", save, "--metrics-jsonl", reports, "--train-iters", 1000)
    running = start(PAIR, *one.flags, *memory, *saving, hooks=[partial(standing, str(tmp_path), 0, (), None)])
    wait_until(lambda: reports.exists() and len(reports.read_text().splitlines()) >= 2)
    for rank in range(PAIR.ranks):
        os.kill(running.process_id(rank), signal.SIGTERM)
    outcome = running.wait()
    assert set(outcome.codes) == {0}, outcome.said
    last = metrics(reports)[-1]["iteration"]
    assert last < 1000
    assert published(save) == [last]
    assert not events(tmp_path, "parked"), outcome.said
    assert "closing all connections" not in outcome.said


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
