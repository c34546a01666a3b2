"""What a training process that ends for good says, and leaves to its launcher."""

from __future__ import annotations

import fcntl
import logging
import os
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.core.dist_checkpointing.moe.errors import (
    CheckpointFailure,
    MoECheckpointError,
    NoExactState,
    PeerLost,
    StoreFailure,
    UsageError,
)
from megatron.core.dist_checkpointing.moe.in_place.building import CannotBuildAlone
from megatron.core.dist_checkpointing.moe.in_place.process_groups import StillConnected
from megatron.core.dist_checkpointing.moe.standby.verdict import (
    VERDICT_FILE,
    forget_verdict,
    has_left_early,
    has_trained,
    leave_early,
    leave_verdict,
    note_iteration,
    permanent_errors_end_the_job,
    verdict_of_ranks,
)
from megatron.pretrain.standby.node_agent import NodeAgent


def fail(error: MoECheckpointError) -> None:
    with permanent_errors_end_the_job():
        raise error


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VERDICT_FILE, str(tmp_path / "verdict"))
    return tmp_path / "verdict"


@pytest.mark.parametrize(("kind", "code"), [(UsageError, "2"), (NoExactState, "1")])
def test_a_permanent_error_is_said_once_on_a_node_and_left_to_its_launcher(
    kind: type[MoECheckpointError], code: str, verdict: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with pytest.raises(SystemExit) as ending:
                fail(kind("no"))
            assert ending.value.code == 0, "torchrun restarts what fails"
    assert (caplog.messages, verdict.read_text()) == (["no"], code)


@pytest.mark.parametrize("kind", [PeerLost, StoreFailure, StillConnected, CannotBuildAlone])
def test_an_error_that_a_restart_may_mend_passes(kind: type[MoECheckpointError], verdict: Path) -> None:
    with pytest.raises(kind):
        fail(kind("for now"))
    assert not verdict.exists()


def test_what_cannot_be_left_to_the_launcher_is_no_end_of_training(verdict: Path) -> None:
    verdict.parent.rmdir()
    assert not leave_verdict(2)
    with pytest.raises(UsageError, match="no"):
        fail(UsageError("no"))


def test_whoever_cleans_up_leaves_the_folder_of_a_launcher_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VERDICT_FILE, raising=False)
    with verdict_of_ranks():
        cleans = os.open(Path(os.environ[VERDICT_FILE]).parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # as systemd-tmpfiles asks
            fcntl.flock(cleans, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(cleans, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleans)


class Agent(NodeAgent):
    """An agent whose ranks end with these codes, one in each start."""

    def __init__(self, codes: list[int], restarts: int = 9) -> None:
        self._codes, self._remaining_restarts = codes, restarts

    def _settle(self, group: WorkerGroup) -> None:
        self._starts += 1

    def _seen(self, worker_group: WorkerGroup) -> RunResult:
        code = self._codes[self._starts - 1]
        return RunResult(WorkerState.FAILED, {}, {0: cast("ProcessFailure", SimpleNamespace(exitcode=code))})

    def _stop_workers(self, *_: object, **__: object) -> None:
        """There are none."""


@pytest.mark.parametrize(
    ("codes", "starts"),
    [([2], 1), ([1, 2, 2], 3), ([1, 2, 1, 2, 2], 5)],
    ids=["at once", "behind another start", "not twice at first"],
)
def test_an_exit_code_of_python_alone_is_a_verdict_at_once_or_the_second_time(
    codes: list[int], starts: int, verdict: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends with it where it cannot open the script, which is there again a second later."""
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", lambda agent, group: None)
    agent, group = Agent(codes), cast("WorkerGroup", SimpleNamespace(workers=[]))
    for start in range(1, starts + 1):
        methodcaller("_rendezvous", group)(agent)
        result = methodcaller("_monitor_workers", group)(agent)
        assert (result.state is WorkerState.SUCCEEDED) == (start == starts)
        assert verdict.exists() == (start == starts)


@pytest.mark.parametrize(("error", "ends"), [(CheckpointFailure("lost"), True), (UsageError("wrong"), False)])
def test_a_rank_that_must_not_train_without_protection_ends_the_job_though_its_neighbours_fail_with_it(
    error: Exception, ends: bool, verdict: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", lambda agent, group: None)
    agent, group = Agent([1]), cast("WorkerGroup", SimpleNamespace(workers=[]))
    methodcaller("_rendezvous", group)(agent)
    with pytest.raises(SystemExit), permanent_errors_end_the_job():
        raise error
    result = methodcaller("_monitor_workers", group)(agent)
    assert (result.state is WorkerState.SUCCEEDED) is ends
    assert verdict.read_text() == str(error.exit_code)


def test_an_exit_code_of_python_alone_is_a_verdict_where_no_restart_is_left(
    verdict: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimpleElasticAgent, "_rendezvous", lambda agent, group: None)
    agent, group = Agent([1, 2], restarts=0), cast("WorkerGroup", SimpleNamespace(workers=[]))
    for _ in range(2):
        methodcaller("_rendezvous", group)(agent)
    assert methodcaller("_monitor_workers", group)(agent).state is WorkerState.SUCCEEDED
    assert verdict.read_text() == "2"


def test_a_verdict_for_which_the_disk_has_no_room_is_none(verdict: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict.symlink_to("/dev/full")
    assert not leave_verdict(2)
    assert not verdict.is_symlink()


def test_who_left_early_in_an_earlier_attempt_counts_no_more(verdict: Path) -> None:
    leave_verdict(2)
    leave_early()
    assert has_left_early()
    forget_verdict()
    assert not has_left_early()
    assert not verdict.exists()


@pytest.mark.usefixtures("verdict")
def test_an_iteration_that_was_trained_in_an_earlier_attempt_counts() -> None:
    note_iteration.cache_clear()
    assert not has_trained()
    note_iteration()
    forget_verdict()
    assert has_trained()


def test_without_our_launcher_every_error_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VERDICT_FILE, raising=False)
    with pytest.raises(UsageError):
        fail(UsageError("no"))
    assert not leave_verdict(2)
    leave_early()
    assert not has_left_early()
