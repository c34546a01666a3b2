"""Iterations whose results core does not trust, in jobs that were killed right before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from runs import differences, digest
from stock_jobs import FULL, KILLED, Shape

from megatron.core.rerun_state_machine import EXIT_CODE_FAILED_ON_RESULT_VALIDATION, EXIT_CODE_RESUME_TO_DISAMBIGUATE

BIASED = Shape(1, 1, 1, more=("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"))


@contextlib.contextmanager
def losing_numbers(at: int) -> Iterator[None]:
    """The loss of this iteration is not a number, however often its passes are run."""
    import pretrain_gpt_moe
    from megatron.training import get_args

    whole = pretrain_gpt_moe.loss_func

    def loss_func(mask: Any, output: Any) -> Any:
        return whole(mask, output * float("nan") if get_args().curr_iteration + 1 == at else output)

    with mock.patch.object(pretrain_gpt_moe, "loss_func", loss_func):
        yield


@contextlib.contextmanager
def on_another_node() -> Iterator[None]:
    """Core looks whether results come out again elsewhere."""
    here = os.uname()
    with mock.patch.object(os, "uname", return_value=os.uname_result((here[0], "another", *here[2:]))):
        yield


@pytest.mark.ci
def test_a_loss_that_is_not_a_number_ends_a_job_behind_its_recovery_with_the_state_before(
    new_job, tmp_path: Path
) -> None:
    """Core judges no result of a process's first iteration, and saves with biases that rejected passes have moved."""
    length = ("--save", tmp_path / "straight", "--save-interval", 100, "--train-iters", 4)
    save = ("--save", tmp_path / "struck", "--save-interval", 100)
    new_job(BIASED).run(*FULL, *length)
    job, fault = new_job(BIASED), ("--moe-ckpt-interval", 1, "--moe-ckpt-inject-fault", "0@5:step")
    job.run(*FULL, *save, *fault, codes={KILLED})
    job.run(*FULL, *save, *fault, hooks=[partial(losing_numbers, 5)], codes={EXIT_CODE_RESUME_TO_DISAMBIGUATE})
    assert job.ran(0) == [1, 2, 3, 4]
    # Schedules know how long training is, and the rest has what core has found out.
    found = differences(digest(tmp_path / "struck", 4), digest(tmp_path / "straight", 4))
    assert found == ["scheduler", "other"]
    # Memory has that iteration too, without the doubt: from there core would end with the first code for ever.
    elsewhere = [partial(losing_numbers, 5), on_another_node]
    loading = ("--load", tmp_path / "struck")
    outcome = job.run(*FULL, *save, *loading, *fault, hooks=elsewhere, codes={EXIT_CODE_FAILED_ON_RESULT_VALIDATION})
    assert "Correct result (but possible Application error) (NaN in the loss)" in outcome.said
