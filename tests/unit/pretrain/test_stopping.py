"""The vote on the end of training ends, also where a rank that is gone never votes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.moe.errors import PeerLost
from megatron.pretrain.config.training import TrainingConfig
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
