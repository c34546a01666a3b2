"""Trainers that are killed while they persist: what they had begun is in storage all the same, exact."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from attempts import Cluster, recovered
from fault_hooks import cut_off_while_persisting
from runs import Layout, UndisturbedRun
from test_protection import assert_same_end

from megatron.core.dist_checkpointing.moe.extensions.persist_agent.agent import wait_for_agent
from megatron.core.dist_checkpointing.moe.storage.filesystem import FilesystemStore

pytestmark = pytest.mark.ci

FULL = ("--moe-ckpt-strategy", "full", "--moe-ckpt-interval", "2")
SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "2")
CUT_OFF = 4


def checksums(storage: Path, rank: int) -> dict[str, str]:
    """Of all records of a rank's snapshot of the iteration that is cut off; all of them are verified."""
    store = FilesystemStore(storage, rank)
    (snapshot,) = [one for one in store.snapshots().sealed if (one.iteration, one.rank) == (CUT_OFF, rank)]
    with store.open(snapshot) as reader:
        assert reader.verify() == ()
        return {record.key: record.xxh3 for record in reader.manifest.records}


@pytest.mark.parametrize(
    ("strategy", "agent", "comes_from"),
    [
        pytest.param(FULL, ("--moe-ckpt-persist-agent-s", "60"), CUT_OFF, id="full"),
        pytest.param(FULL, (), 2, id="without agent", marks=pytest.mark.full),
        pytest.param(SPARSE, ("--moe-ckpt-persist-agent-s", "60"), CUT_OFF, id="sparse", marks=pytest.mark.full),
    ],
)
def test_a_snapshot_that_was_cut_off_by_sigkill_is_what_training_comes_back_from_when_all_memory_is_lost(
    strategy: tuple[str, ...],
    agent: tuple[str, ...],
    comes_from: int,
    cluster: Cluster,
    undisturbed_run: UndisturbedRun,
    tmp_path: Path,
) -> None:
    killed, layout = tmp_path / "killed", Layout(pp=2, ep=1, ranks=2)
    straight = undisturbed_run(layout)
    sound, cut = tmp_path / "sound", tmp_path / "cut"
    stored = "--moe-ckpt-persist-interval", "2", "--moe-ckpt-persist-keep", "9"
    cluster.run(layout, *strategy, "--moe-ckpt-persist-dir", sound, *stored, job="sound")

    def all_memory_is_lost(attempt: int) -> None:
        for slot in sorted(cluster.memory.glob("node-0/*/slot-*")):
            wait_for_agent(slot, 60.0)
        if agent:
            for rank in range(layout.ranks):
                assert checksums(cut, rank) == checksums(sound, rank)
            assert not list(cut.glob(".writing.*")), "nothing torn stays"
        shutil.rmtree(cluster.memory / "node-0")

    outcomes = cluster.run(
        layout, *strategy, "--moe-ckpt-persist-dir", cut, *stored, *agent, "--metrics-jsonl", killed / "reports",
        "--save", killed, hooks=(partial(cut_off_while_persisting, CUT_OFF, 1, str(tmp_path)),),
        between=all_memory_is_lost,
    )  # fmt: skip
    assert len(outcomes) == 2
    table = recovered(outcomes[1])
    assert table[0].startswith(f"recovered iteration {comes_from} "), outcomes[1].said
    assert any("persistent" in line for line in table), table
    assert_same_end(straight, killed)
