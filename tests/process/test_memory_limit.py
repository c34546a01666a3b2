"""A job takes no more memory of a node than it may, gives up what does not fit one step at a time, and trains on."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster
from local_runs import PAIR
from memory_hooks import watched
from runs import reports_in
from sparse_runs import BF16, LENGTH
from world import Outcome

pytestmark = pytest.mark.ci

SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-recovery", "auto", *BF16, *LENGTH)


def run(cluster: Cluster, folder: Path, *extra: str) -> tuple[Outcome, int, list[str]]:
    """How a job of two stages ended, the most bytes that lay in its memory, and what it gave up."""
    folder.mkdir()
    (outcome,) = cluster.run(PAIR, *SPARSE, *extra, hooks=(partial(watched, str(cluster.memory), str(folder)),),
                             job=folder.name)  # fmt: skip
    notes = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return outcome, max(note["most"] for note in notes), [*outcome.warnings]


def protection(outcome: Outcome, folder: Path) -> list[Any]:
    return [report.get("protection") for report in reports_in(folder / "reports")]


def passes(folder: Path) -> list[Any]:
    return [report.get("passes_s") for report in reports_in(folder / "reports")]


@pytest.fixture
def whole(cluster: Cluster, tmp_path: Path) -> dict[str, int]:
    """Bytes that a job of a fixed window takes of its node: in all, and for snapshots alone."""
    outcome, most, _ = run(cluster, tmp_path / "whole", "--moe-ckpt-window", "3")
    assert (printed := re.search(r"memory: ([\d.e+-]+) MB of .* per node \(2 ranks\)", outcome.said))
    assert float(printed[1]) * 1e6 == pytest.approx(most, rel=0.02)
    logs = sum(json.loads(path.read_text())["standby"] for path in (tmp_path / "whole").glob("rank-*.json"))
    return {"all": most, "snapshots": most - logs}


@pytest.mark.full
def test_a_fixed_window_gives_up_logs_then_the_window_then_protection(
    cluster: Cluster, tmp_path: Path, whole: dict[str, int]
) -> None:
    limits = {"logs": whole["all"] - 1, "no logs": whole["snapshots"], "window": whole["snapshots"] - 1, "all": 9999}
    last = {
        "logs": r"boundary logs of 6 iterations are kept in place of 9",
        "no logs": r"no boundary logs are kept: faults roll back all stages",
        "window": r"everything is snapshotted at once, as with --moe-ckpt-strategy full",
        "all": r"no snapshots are taken: training is not protected",
    }
    for at, (name, limit) in enumerate(limits.items(), start=1):
        folder = tmp_path / name.replace(" ", "-")
        reports = ("--metrics-jsonl", str(folder / "reports"))
        flags = ("--moe-ckpt-window", "3", "--moe-ckpt-memory-limit", str(limit), *reports)
        outcome, most, lines = run(cluster, folder, *flags)
        assert set(outcome.codes) == {0}, outcome.said
        assert re.search(last[name], lines[-1]), outcome.said
        assert len(lines) == at if name == "logs" else len(lines) > 1
        assert all("--moe-ckpt-memory-limit" in line for line in lines)
        assert most <= max(limit, 128 << 10)  # of a rank without snapshots the random states
        assert all(0 < passes_s < 60 for passes_s in passes(folder))
        assert protection(outcome, folder)[-1] == ("unprotected" if name == "all" else "protected")


@pytest.mark.full
def test_an_automatic_window_that_wants_more_later_gives_up_what_does_not_fit(
    cluster: Cluster, tmp_path: Path, whole: dict[str, int]
) -> None:
    """It knows its window after four iterations only; exit code 2 would end a job that trains."""
    limit = whole["all"] - whole["snapshots"] + whole["snapshots"] // 8
    reports = ("--metrics-jsonl", str(tmp_path / "auto" / "reports"))
    flags = ("--moe-ckpt-window", "auto", "--moe-ckpt-memory-limit", str(limit), *reports)
    outcome, most, lines = run(cluster, tmp_path / "auto", *flags)
    assert set(outcome.codes) == {0}, outcome.said
    assert "training is not protected" in lines[-1]
    assert most <= limit


def test_a_fault_under_a_limit_is_recovered_from(cluster: Cluster, tmp_path: Path, whole: dict[str, int]) -> None:
    limit = str(whole["snapshots"] - 1)
    flags = ("--moe-ckpt-window", "3", "--moe-ckpt-memory-limit", limit, "--moe-ckpt-inject-fault", "1@9:step")
    outcomes = cluster.run(PAIR, *SPARSE, *flags)
    assert len(outcomes) == 2
    assert re.search(r"recovered iteration \d+ exactly", outcomes[1].said), outcomes[1].said
