"""What is told of a job: while it runs to who asks its ranks, and afterwards by what it wrote."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from attempts import Cluster, Nodes
from click.testing import CliRunner
from local_runs import PAIR
from runs import flags, reports_in
from sparse_runs import UNTIED

from moe_ckpt.commands.main import commands
from moe_ckpt.runs.page import render
from moe_ckpt.runs.sources import read_runs

SPARSE = ("--moe-ckpt-strategy", "sparse", "--moe-ckpt-window", "2", *UNTIED)


@pytest.mark.full
def test_a_job_that_was_struck_tells_of_itself_in_every_attempt(cluster: Cluster, tmp_path: Path) -> None:
    reports, textfile = tmp_path / "metrics.jsonl", tmp_path / "job.prom"
    left: list[str] = []
    outcomes = cluster.run(
        PAIR, *SPARSE, "--metrics-jsonl", reports, "--metrics-textfile", textfile, "--moe-ckpt-inject-fault", "0@5",
        "--moe-ckpt-persist-dir", tmp_path / "storage", "--moe-ckpt-persist-interval", 2, "--train-iters", 12,
        between=lambda _attempt: left.append(textfile.read_text()),
    )  # fmt: skip
    assert len(outcomes) == 2
    lines = [json.loads(line) for line in reports.read_text().splitlines()]
    first, second = (line["run"] for line in lines if "run" in line)
    assert (first["iteration"], first["strategy"], first["world_size"], first["version"]) == (0, "sparse", 2, 1)
    assert first["job"] == second["job"] and second["iteration"] > 0 and second["at_s"] > first["at_s"]
    (recovery,) = (line["recovery"] for line in lines if "recovery" in line)
    assert recovery["table"][0].startswith(f"recovered iteration {recovery['target']} exactly")
    assert recovery["lost_tokens"] == {} and recovery["total_s"] > 0

    told = reports_in(reports)
    assert [report["at_s"] for report in told] == sorted(report["at_s"] for report in told)
    trained = [report for report in told if not report["replayed"]]
    assert all(
        math.isclose(report["tokens_per_s"], first["tokens_per_iteration"] / report["iteration_time_s"])
        for report in trained
        if report["iteration_time_s"]
    )
    assert trained[-1]["protected_iteration"] >= 6 and trained[-1]["persisted_iteration"] >= 4
    written = sum(file.stat().st_size for file in (tmp_path / "storage").rglob("*.bin"))
    assert sum(report["persisted_bytes"] for report in told) > 0 and written > 0

    (run,) = read_runs([reports])
    (stop,) = run.stops
    assert stop.recovery is not None and stop.resumed == recovery["target"] and run.newest == 12
    assert run.time.is_by_clock and run.time.stopped_s >= recovery["total_s"] / 2
    assert "Recovered iteration" in render([run], 0.0)
    assert 'tier="memory"} ' in left[0] and "training_iteration{" in left[0]
    assert not textfile.exists(), "training ended well: nothing is left to wake anybody"


def test_a_running_job_is_seen_whole_from_each_of_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    nodes = Nodes((("node-a", "node-b"),))
    argv = flags(
        cluster.corpus, PAIR, *SPARSE, "--train-iters", "5000", "--log-interval", "1000",
        "--moe-ckpt-memory-dir", str(cluster.memory), "--exit-signal-handler",
    )  # fmt: skip
    named = {"TORCHELASTIC_RUN_ID": f"told-{cluster.memory.name}"}
    running = cluster.world.start(argv, 2, (), [one | named for one in nodes.environments(0)])
    try:
        found = _seen(cluster.memory / "node-a", ranks=2)
        assert [row["node"] for row in found["nodes"]] == ["node-a", "node-b"]
        assert found["job"] == named["TORCHELASTIC_RUN_ID"] and found["strategy"] == "sparse"
        assert found["iteration"] - found["newest_protected"] < 1000 and found["nodes"][1]["memory_free_bytes"] > 0
        later = _seen(cluster.memory / "node-b", ranks=2, after=found["iteration"])
        assert later["iteration"] > found["iteration"]
    finally:
        os.kill(running.process_id(0), signal.SIGTERM)
        outcome = running.wait()
    assert set(outcome.codes) == {0}, outcome.said


def _seen(place: Path, ranks: int, after: int = 0) -> dict[str, Any]:
    """The status of the job, once all ranks have told it and trained on."""
    deadline_s = time.monotonic() + 120
    while True:
        result = CliRunner().invoke(commands, ["status", str(place), "--json"])
        if result.output.startswith("{"):
            found: dict[str, Any] = json.loads(result.output)
            is_whole = found["ranks_reporting"] == f"{ranks} of {ranks}" and found["protection"] == "protected"
            if is_whole and found["iteration"] > after:
                assert "notes" not in found, found["notes"]
                return found
        assert time.monotonic() < deadline_s, f"{result.output} {result.exception}"
        time.sleep(0.2)
