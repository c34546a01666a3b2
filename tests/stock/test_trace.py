"""How much of the engine a job enters, and how far the first byte of a snapshot is from the training loop."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path

import pytest
from stock_jobs import FULL, KILLED, PAIR, SPARSE
from stock_recording import traced
from world import ROOT

pytestmark = pytest.mark.ci

BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["budgets"]["entered"]


@pytest.mark.parametrize("protection", [pytest.param(FULL, id="full"), pytest.param(SPARSE, id="sparse")])
def test_a_killed_job_enters_no_more_of_the_engine_than_its_budget(new_job, tmp_path: Path, protection) -> None:
    job, fault, hook = new_job(PAIR), ("--moe-ckpt-inject-fault", "1@4:step"), partial(traced, str(tmp_path))
    job.run(*protection, *fault, codes={KILLED, 1}, hooks=[hook])
    job.run(*protection, *fault, hooks=[hook])
    said = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    functions = {tuple(function) for one in said for function in one["functions"]}
    files = {file for file, *_ in functions}
    ways = [one["frames"] for one in said if one["frames"]]
    budget = BUDGETS[protection[1]]
    assert len(files) <= budget["files"], f"{len(files)}: {sorted(files)}"
    # A function in another one counts once.
    entered = {(file, line) for file, first, length, _ in functions for line in range(first, first + length)}
    lines = len(entered) - sum(docstring for *_, docstring in functions)
    assert lines <= budget["lines"], lines
    # After a recovery the first copy may be that of the state that all ranks reached.
    assert min(map(len, ways)) <= budget["frames"], ways
