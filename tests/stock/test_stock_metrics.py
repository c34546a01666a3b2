"""What the stock loop tells of a job: to the driver's sinks, and to the boards that the loop itself has open."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy
import pytest
from stock_jobs import ALONE, PAIR, SPARSE, Shape

from moe_ckpt.runs.page import render
from moe_ckpt.runs.sources import read_runs

SCALED = Shape(ranks=1, pp=1, ep=1, more=("--fp16", "--initial-loss-scale", "2097152", "--hysteresis", "1"))


def test_a_killed_job_tells_all_sinks_of_its_recovery(new_job, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told, textfile, board = tmp_path / "metrics.jsonl", tmp_path / "job.prom", tmp_path / "board"
    sinks = ("--metrics-jsonl", told, "--metrics-textfile", textfile, "--tensorboard-dir", board)
    job, fault = new_job(PAIR), ("--moe-ckpt-inject-fault", "1@5:step")
    job.run(*SPARSE, *fault, *sinks, codes={-signal.SIGKILL, 1})
    left = textfile.read_text()
    job.run(*SPARSE, *fault, *sinks)

    lines = [json.loads(line) for line in told.read_text().splitlines()]
    starts = [line["run"] for line in lines if "run" in line]
    assert [start["strategy"] for start in starts] == ["sparse", "sparse"] and starts[0]["flops_per_iteration"] > 0
    first = next(line for line in lines if "iteration" in line)
    assert starts[0]["at_s"] <= first["at_s"] - first["iteration_time_s"], "its first iteration is not time to start"
    (recovery,) = (line["recovery"] for line in lines if "recovery" in line)
    assert recovery["scope"] == "local" and recovery["table"]
    assert any(line.get("tokens_per_s") for line in lines)

    (run,) = read_runs([told])
    assert len(run.stops) == 1 and run.stops[0].recovery is not None and run.newest == 6
    assert "Recovered iteration" in render([run], 0.0)
    assert "moe_ckpt_protection_state{" in left and not textfile.exists()
    events = EventAccumulator(str(board))
    events.Reload()
    assert {"checkpoint/protection", "throughput/tokens per s", "lm loss"} <= set(events.Tags()["scalars"])


def test_learning_rate_and_loss_scale_are_those_that_the_loop_logs(new_job, tmp_path: Path) -> None:
    told, job = tmp_path / "metrics.jsonl", new_job(SCALED)
    outcome = job.run("--moe-ckpt-strategy", "full", "--metrics-jsonl", told, "--log-interval", 1)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    reports = [line for line in lines if "lm_loss" in line]
    # The loop itself rounds the rate to fp32 for its log.
    found = [(f"{numpy.float32(one['learning_rate']):.6E}", f"{one['loss_scale']:.1f}") for one in reports]
    logged = re.findall(r"learning rate: (\S+) .* loss scale: (\S+) \|", outcome.said)
    assert found == logged
    assert len({rate for rate, _ in found}) > 3 and {scale for _, scale in found} == {"1048576.0", "524288.0"}


@pytest.mark.full
def test_a_sink_that_cannot_be_opened_is_one_line_and_training_continues(new_job) -> None:
    outcome = new_job(ALONE).run("--moe-ckpt-strategy", "none", "--metrics-jsonl", "/dev/null/metrics")
    (line,) = [line for line in outcome.said.splitlines() if "--metrics-" in line]
    assert "training continues without any of --metrics-*" in line


def test_a_full_disk_under_a_sink_is_one_line_and_training_continues(new_job) -> None:
    outcome = new_job(ALONE).run("--moe-ckpt-strategy", "none", "--metrics-jsonl", "/dev/full")
    (line,) = [line for line in outcome.said.splitlines() if "--metrics-" in line]
    assert "metrics: cannot write --metrics-jsonl: No space left on device; tried again" in line
