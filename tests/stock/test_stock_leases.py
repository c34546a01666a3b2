"""Two jobs that are given the same folders: the second is refused by the name of the first, before it trains."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from stock_jobs import ALONE
from world import HANG_TIMEOUT_S, Outcome

from megatron.core.dist_checkpointing.moe.storage.lease_files import LEASE

STRATEGIES = [
    "full",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("pec", "selective", "sparse")),
]
LONG = ("--train-iters", "100000", "--log-interval", "1000")
SOON = ("--exit-interval", "1")


def refusal(outcome: Outcome, what: str) -> str:
    """The one line with which a job was refused."""
    assert "elapsed time per iteration" not in outcome.said
    (line,) = [line for line in outcome.said.splitlines() if what in line]
    return line


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_is_refused_in_the_folders_of_a_running_one_and_a_requeue_of_that_takes_over_after_sigkill(
    new_job, tmp_path: Path, strategy: str
) -> None:
    protected = ("--moe-ckpt-strategy", strategy, *LONG)
    save, storage = tmp_path / "save", tmp_path / "storage"
    saving, storing = ("--save", save, "--save-interval", 1000), ("--moe-ckpt-persist-dir", storage)
    first = new_job(ALONE)
    running = first.start(*protected, *saving, *storing, "--moe-ckpt-persist-interval", 2)
    deadline_s = time.monotonic() + HANG_TIMEOUT_S
    while not (list(storage.glob("iter_*")) and (save / LEASE).exists()):
        assert time.monotonic() < deadline_s, list(tmp_path.rglob("*"))
        time.sleep(0.1)

    who = f"job 'stock-{first.memory.name}' (process {running.process_id(0)} on"
    second = new_job(ALONE)
    assert who in refusal(second.run(*protected, *saving, codes={2}), f"{save} is in use by")
    assert who in refusal(second.run(*protected, *storing, codes={2}), f"{storage} is in use by")
    assert who in refusal(second.run(*LONG, *saving, codes={2}), f"{save} is in use by"), "without a strategy"

    os.kill(running.process_id(0), signal.SIGKILL)
    running.wait_or_restart()
    assert (save / LEASE).exists(), "nobody could release it"
    back = first.run(*protected, *saving, *storing, "--moe-ckpt-persist-interval", 2, *SOON)
    assert "recovered iteration" in back.said
    assert not list(tmp_path.rglob(LEASE)), "a good end releases them"


@pytest.mark.ci
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_another_job_stored_is_taken_when_it_is_asked_for(new_job, tmp_path: Path, strategy: str) -> None:
    storing = "--moe-ckpt-persist-dir", tmp_path, "--moe-ckpt-persist-interval", 2
    first, second = new_job(ALONE), new_job(ALONE)
    ended = "--moe-ckpt-strategy", strategy, "--train-iters", "6", *storing
    first.run(*ended)
    refused = second.run(*ended, codes={2})
    line = refusal(refused, "holds iteration 6 of job")
    assert f"give --moe-ckpt-take-over stock-{first.memory.name} to continue from it" in line
    assert "recovered iteration 6 " in second.run(*ended, "--moe-ckpt-take-over", "any").said
