"""The vote on the end of training ends, also where a rank that is gone never votes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.core.dist_checkpointing.moe.seats.joining import Joining
from megatron.pretrain.config.training import TrainingConfig
from megatron.pretrain.seats.growth import PATIENCE_S, PatientCount
from megatron.pretrain.stopping import StopConditions


class Work:
    """A collective that ends after so many questions, as one of NCCL that says so of itself; -1: never."""

    def __init__(self, questions: int) -> None:
        self.questions, self.waited = questions, False

    def is_completed(self) -> bool:
        self.questions -= 1
        return self.questions == -1

    def wait(self) -> None:
        self.waited = True


def conditions(work: Work, timeout_minutes: float, monkeypatch: pytest.MonkeyPatch) -> StopConditions:
    def all_reduce(votes: torch.Tensor, **options: Any) -> Work:
        assert options["async_op"]
        return work

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return StopConditions(TrainingConfig(exit_duration_in_mins=60), timeout_minutes)


def test_a_vote_that_is_through_says_whether_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(3)
    assert conditions(work, 1, monkeypatch).reason(1) is None
    assert work.waited


def test_a_vote_that_never_ends_is_given_up_after_the_timeout_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLost, match=r"within 0.3 s \(--distributed-timeout-minutes\)"):
        conditions(Work(-1), 0.005, monkeypatch).reason(1)


def test_a_signal_that_came_while_this_process_lost_a_peer_ends_training_once_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda votes, **options: Work(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    training = TrainingConfig(exit_signal_handler=True, exit_signal="SIGUSR2")
    before = signal.getsignal(signal.SIGUSR2)
    try:
        StopConditions(training, 1)
        signal.raise_signal(signal.SIGUSR2)
        assert StopConditions(training, 1).reason(1) == "signal SIGUSR2"
    finally:
        signal.signal(signal.SIGUSR2, before)
    try:
        assert StopConditions(training, 1).reason(1) is None, "another process has not been told"
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_nodes_that_wait_end_training_after_an_iteration_that_is_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda votes, **options: Work(0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    joining = Joining(tmp_path)
    stop = StopConditions(TrainingConfig(), 1, joining, interval=2)
    assert stop.reason(2) is None
    joining.ask()
    assert stop.reason(3) is None
    assert stop.reason(4) == "nodes wait to join"
    assert stop.makes_way


def test_an_agent_hears_of_nodes_that_wait_once_its_workers_are_ready_or_patience_ends(tmp_path: Path) -> None:
    waiting, now_s, joining = 0, 0.0, Joining(tmp_path)
    count = PatientCount(lambda: waiting, joining, lambda: now_s)
    assert count() == 0
    assert not joining.is_asked
    waiting = 1
    assert count() == 0
    assert joining.is_asked
    joining.ready()
    assert count() == 1
    waiting = 0
    assert count() == 0
    assert not joining.is_asked, "a next start of workers is not asked for nodes that have come"
    waiting = 2
    assert count() == 0
    now_s = PATIENCE_S + 1
    assert count() == 2
