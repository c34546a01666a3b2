"""Nodes that are sick and ranks that hang, on real processes: the job continues without them, to the same last bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attempts import Cluster
from runs import Launch, Layout, UndisturbedRun, differences, digest, flags
from world import HANG_TIMEOUT_S, RECOVERY_TIMEOUT_S, ROOT

pytestmark = pytest.mark.ci

STOPPED = str(ROOT / "tests" / "process" / "stopped_rank.py")
LAYOUT = Layout(pp=2, ep=1, ranks=2)
HANG_S = 6


@pytest.mark.parametrize(
    ("strategy", "strikes", "settings"),
    [
        pytest.param(
            "full", 2, {"MOE_CKPT_SCRIPT": STOPPED, "MOE_CKPT_HANG_S": str(HANG_S), "STOPS_BUILDING": "1@1"},
            id="hangs, and again as it builds its model",
        ),
        pytest.param(
            "sparse --moe-ckpt-window 2", 2,
            {"MOE_CKPT_SCRIPT": STOPPED, "MOE_CKPT_HANG_S": str(HANG_S), "STANDBYS": "1"},
            id="hangs twice, and the other rank keeps its process", marks=pytest.mark.full,
        ),
        pytest.param("full", 3, {}, id="is killed three times", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_sick_rank_leads_to_the_spare_within_its_strikes_and_no_bit_is_lost(
    strategy: str,
    strikes: int,
    settings: dict[str, str],
    launch: Launch,
    undisturbed_run: UndisturbedRun,
    corpus: str,
    cluster: Cluster,
    tmp_path: Path,
) -> None:
    straight, struck = undisturbed_run(LAYOUT), tmp_path / "struck"
    protect = ["--moe-ckpt-strategy", *strategy.split(), "--moe-ckpt-memory-dir", str(cluster.memory)]
    building = int("STOPS_BUILDING" in settings)
    faults = [part for at in range(strikes - building) for part in ("--moe-ckpt-inject-fault", f"1@{3 + at}")]
    environment = {"NNODES": "2", "NPROC": "1", "MAX_RESTARTS": "6", "MOE_CKPT_STRIKES": f"{strikes}/1h", **settings}
    ended = launch(
        ["scripts/train_cpu.sh", *flags(corpus, LAYOUT, *protect, *faults, "--save", str(struck))],
        timeout_s=HANG_TIMEOUT_S + RECOVERY_TIMEOUT_S * strikes,  # each ends in a new process, the last on a new node
        **environment,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    for number in range(1, strikes + 1):
        assert f"failure {number} of {strikes} within 3600 s" in said, said
    assert said.count(f"leaves the job: its own ranks failed {strikes} times within 3600 s") == 1, said
    assert "lost; replaced by node-2" in said, said
    if "MOE_CKPT_HANG_S" in settings:
        assert said.count("stopped, it does not answer) has trained no iteration for") == strikes - building, said
        assert said.count("stopped, it does not answer) has not come to an iteration for") == building, said
        assert "in _communicate" in said or "most recent call first" in said, "stacks of the node's ranks"
    assert not differences(digest(struck, 6), digest(straight, 6))


@pytest.mark.full
def test_ranks_that_hang_in_the_first_iteration_after_a_recovery_are_ended_too(
    launch: Launch, undisturbed_run: UndisturbedRun, corpus: str, cluster: Cluster, tmp_path: Path
) -> None:
    straight, struck = undisturbed_run(LAYOUT), tmp_path / "struck"
    protect = ("--moe-ckpt-strategy", "full", "--moe-ckpt-memory-dir", str(cluster.memory))
    argv = flags(corpus, LAYOUT, *protect, "--moe-ckpt-inject-fault", "1@3", "--save", str(struck))
    environment = {"NNODES": "1", "NPROC": "2", "MAX_RESTARTS": "6", "MOE_CKPT_HANG_S": str(HANG_S)}
    ended = launch(["scripts/train_cpu.sh", *argv], MOE_CKPT_SCRIPT=STOPPED, STOPS="0@1", **environment)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    stood = re.findall(r"stopped, it does not answer\) has trained no iteration for (\d+) s", said)
    assert len(stood) == 2, said
    assert int(stood[0]) >= HANG_S, said
    assert int(stood[1]) >= HANG_S, said
    assert not differences(digest(struck, 6), digest(straight, 6))


@pytest.mark.full
def test_a_node_that_fails_its_health_check_leaves_before_it_trains(
    launch: Launch, corpus: str, cluster: Cluster
) -> None:
    environment = {
        "NNODES": "2",
        "NPROC": "1",
        "MAX_RESTARTS": "1",
        "MOE_CKPT_HEALTH_CHECK": '[ "$MOE_CKPT_NODE" != node-1 ]',
    }
    ended = launch(["scripts/train_cpu.sh", *flags(corpus, LAYOUT)], **environment)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    line = 'node-1 leaves the job: its health check ended with exit code 1: [ "$MOE_CKPT_NODE" != node-1 ]'
    assert said.count(line) == 1, said
    assert "node-1 lost; replaced by node-2" in said, said
