"""Jobs on a device that is as asynchronous as a GPU: killed and started again, they compute what the CPU computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster
from device_hooks import asynchronous
from effort import cases
from runs import Layout
from sparse_runs import (
    AUX_LOSS,
    BF16,
    FP16,
    FP32,
    SHARED,
    UNTIED,
    Case,
    FaultFree,
    assert_identical,
    assert_replayed,
    killed,
)

SHORT = ("--train-iters", "12", "--lr-decay-iters", "12")
EXPERTS, STAGES = Layout(1, 1, 2, ranks=2), Layout(1, 2, 1, ranks=2)
FAULT = ("1@8:forward-backward",)
DETERMINISTIC = ("--deterministic-mode",)
"""As replays ask for on GPUs."""


@dataclass(frozen=True)
class On:
    """A job and the order of its device."""

    case: Case
    schedule: str


CASES = {
    "full": On(Case(EXPERTS, (*FP32, *AUX_LOSS, *SHORT), window="", faults=FAULT), "starve-copies"),
    "sparse": On(Case(EXPERTS, (*BF16, *SHARED, *SHORT), faults=FAULT, sparse=DETERMINISTIC), "lazy"),
    "sparse-fp16": On(Case(EXPERTS, (*FP16, *SHORT), faults=("0@8:step",), sparse=DETERMINISTIC), "random"),
    "logs": On(
        Case(STAGES, (*BF16, *UNTIED, *SHORT), faults=FAULT, recovery="auto", sparse=DETERMINISTIC), "starve-training"
    ),
    "logs-eager": On(
        Case(STAGES, (*UNTIED, *SHORT), faults=("0@9:end",), recovery="auto", sparse=DETERMINISTIC), "eager"
    ),
}


@pytest.mark.parametrize("name", cases(CASES, fast=(), full=("full", "sparse-fp16", "logs", "logs-eager")))
def test_a_killed_job_on_an_asynchronous_device_ends_as_an_undisturbed_one_on_the_cpu(
    name: str, cluster: Cluster, fault_free: FaultFree, tmp_path: Path
) -> None:
    case, schedule = CASES[name].case, CASES[name].schedule
    run = killed(cluster, case, tmp_path / "killed", hooks=(partial(asynchronous, schedule, 1, str(tmp_path)),))
    assert len(run.outcomes) > 1
    if case.window and case.recovery == "global":
        assert_replayed(run, int(case.window))
    assert_identical(run, fault_free(case))
    for facts in seen(tmp_path, case.layout.ranks):
        assert facts["copied"].get("snapshot-launch"), "no snapshot was copied beside training"
        if case.layout.pp > 1:
            assert facts["copied"].get("MainThread"), "nothing that was sent was copied beside training"
        assert (facts["elsewhere"], facts["after_free"], facts["error"]) == ([], [], "")


def seen(folder: Path, ranks: int) -> Iterator[dict[str, Any]]:
    """What each device has seen in the last attempt."""
    for rank in range(ranks):
        yield json.loads((folder / f"device-{rank}.jsonl").read_text().splitlines()[-1])
