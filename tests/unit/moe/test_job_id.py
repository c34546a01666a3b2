"""One job has one id on all its ranks, and keeps it when its launcher starts it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron.core.dist_checkpointing.moe.boot_clock import SystemClock, started
from megatron.core.dist_checkpointing.moe.config import MoECheckpointConfig
from megatron.core.dist_checkpointing.moe.errors import UsageError
from megatron.core.dist_checkpointing.moe.ports import Facts, Field, Layout, SnapshotId
from megatron.core.dist_checkpointing.moe.replication.receiver import ReplicaReceiver, Room
from megatron.core.dist_checkpointing.moe.runtime.process_info import JobClaim, ProcessInfo, agree_on_job
from megatron.core.dist_checkpointing.moe.storage.manifest import encode
from megatron.core.dist_checkpointing.moe.storage.memory import MemoryStore
from megatron.core.dist_checkpointing.moe.storage.ownership import launcher
from megatron.pretrain.initialize import Launch

NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "LOCAL_RANK", "MOE_CKPT_NODE", "MOE_CKPT_PATIENCE_S")
LAYOUT = Layout.of([Field("w", "uint8", (10,))])
ROOM = Room(SystemClock(), 5.0, lambda: False)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_CKPT_NODE", "node-0")


def claim(config: MoECheckpointConfig) -> JobClaim:
    return JobClaim.of(config, ProcessInfo.from_environment())


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine", "SLURM_JOB_ID": "7"}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "slurm-7"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({}, ""),
    ],
)
def test_driver_and_manager_name_a_job_alike(
    variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = ProcessInfo.from_environment()
    assert place.job_id == named
    assert Launch.from_environment().place == place


def test_ranks_without_a_name_take_the_choice_of_rank_0() -> None:
    assert agree_on_job([JobClaim("", "", "agent-a-1"), JobClaim("", "", "agent-b-2")]) == "agent-a-1"


def test_a_name_that_any_rank_was_given_counts() -> None:
    assert agree_on_job([JobClaim("", "", "agent-a-1"), JobClaim("mine", "", "mine")]) == "mine"


def test_memory_of_an_earlier_attempt_keeps_its_id_though_rank_0_is_new() -> None:
    assert agree_on_job([JobClaim("", "", "agent-c-3"), JobClaim("", "agent-a-1", "agent-b-2")]) == "agent-a-1"


def test_ranks_of_different_jobs_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"rank 0 belongs to job 'x', rank 2 belongs to job 'y'.*--rdzv-id"):
        agree_on_job([JobClaim("x", "", "x"), JobClaim("", "", "agent-b-2"), JobClaim("y", "", "y")])


def test_what_a_launcher_left_in_memory_is_found_again_and_nothing_of_another_launcher(tmp_path: Path) -> None:
    config, node = MoECheckpointConfig(memory_dir=str(tmp_path)), tmp_path / "node-0"
    node.mkdir()
    MemoryStore(node, "agent-x-1", 0, [4096]).close()
    assert claim(config).kept == "agent-x-1"
    owner = node / "agent-x-1" / "slot-000" / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"launcher": "1-0.00"}))
    assert claim(config).kept == ""


def test_a_job_with_a_name_does_not_look_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node-0"
    node.mkdir()
    MemoryStore(node, "agent-x-1", 0, [4096]).close()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert claim(MoECheckpointConfig(memory_dir=str(tmp_path))) == JobClaim("mine", "", "mine")


@pytest.mark.ci
def test_a_wrapper_between_launcher_and_worker_is_passed_by() -> None:
    code = "from megatron.core.dist_checkpointing.moe.storage.ownership import launcher; print(launcher())"
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", inner], env=os.environ | {"LOCAL_RANK": "0"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("-")[0] == str(os.getpid())
    assert launcher().split("-")[0] == str(os.getppid())


def test_a_launcher_is_the_same_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launcher()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 3600.0)  # as psutil says it after a step
    assert launcher() == found


def test_where_all_processes_of_a_container_have_the_variables_of_a_worker_its_first_is_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(psutil.Process, "environ", lambda self: {"LOCAL_RANK": "0"})
    assert launcher() == f"1-{started(1)}"
    monkeypatch.setattr(os, "getppid", lambda: 0)  # this process is the first
    assert launcher() == "0--1"


@pytest.mark.parametrize("text", ["soon", "-3", "nan", "inf"])
def test_a_patience_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_CKPT_PATIENCE_S", text)
    with pytest.raises(UsageError, match=f"MOE_CKPT_PATIENCE_S {text} must be a positive number"):
        ProcessInfo.from_environment()


def test_a_replica_of_another_job_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "owner").mkdir()
    owner = MemoryStore(tmp_path / "owner", "x", 0, [4096])
    writer = owner.reserve(SnapshotId(3, 1), LAYOUT)
    writer.put("w", bytes(10))
    manifest = encode(writer.seal(Facts("x", "digest", {}, {})))
    (tmp_path / "keeper").mkdir()
    keeper = MemoryStore(tmp_path / "keeper", "y", 0, [4096])
    receiver = ReplicaReceiver(keeper, ROOM, "x")
    assert not receiver.holds(receiver.manifest(1, manifest))
    with pytest.raises(UsageError, match="belongs to job x, and this rank to job y: no recovery would take it"):
        ReplicaReceiver(keeper, ROOM, "y").holds(receiver.manifest(1, manifest))
    for store in (owner, keeper):
        store.close()
