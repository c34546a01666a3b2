"""The numbers of a job reach every sink that is asked for, and no sink ends training."""

from __future__ import annotations

import ast
import builtins
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.pretrain.errors import InvalidInput
from megatron.pretrain.metrics import IterationReport, Metrics, MetricsSettings, RunFacts, sinks

ROOT = Path(__file__).parents[3]
FACTS = RunFacts("job-7", "sparse", 4, 100, 0, tokens_per_iteration=1000, flops_per_iteration=5e9, at_s=10.0)
TIMELINE = {
    "begun_s": 50.0, "total_s": 3.0, "parts": {"detect": 1.0, "replay": 2.0}, "replayed": 4, "ranks_back": 2,
    "lost_tokens": {0: {1: 5, 2: 6}}, "plt": 0.25,
}  # fmt: skip


def report(iteration: int, **changes: Any) -> IterationReport:
    usual: dict[str, Any] = {
        "iteration": iteration, "consumed_train_samples": 8 * iteration, "lm_loss": 2.5, "grad_norm": 1.0,
        "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": False, "iteration_time_s": 0.5, "stall_s": 0.125,
        "protection": "protected", "protected_iteration": iteration - 1, "persistence": "degraded",
        "persisted_iteration": 0, "snapshot_bytes": 100, "replicated_bytes": 40, "persisted_bytes": 7,
        "checkpoint_memory": {"window": 4, "own_bytes": 16, "replica_bytes": 8, "log_bytes": 2}, "order_changes": 1,
    }  # fmt: skip
    return IterationReport(**usual | changes)


def metrics(**settings: Any) -> Metrics:
    opened = Metrics(is_last_rank=True, settings=MetricsSettings(**settings))
    opened.began(FACTS)
    return opened


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_throughput_is_that_of_the_whole_job_in_this_iteration(tmp_path: Path) -> None:
    writer = metrics(jsonl=str(tmp_path / "metrics.jsonl"))
    writer.record(report(1))
    writer.record(report(2, iteration_time_s=0.0))
    run, first, second = lines(tmp_path / "metrics.jsonl")
    assert run["run"]["version"] == 1 and run["run"]["job"] == "job-7"
    assert (first["tokens_per_s"], first["model_flops_per_s"]) == (2000.0, 1e10) and first["at_s"] > 0
    assert second["tokens_per_s"] is None, "it is not known how long it took"


def test_an_attempt_does_not_write_on_in_a_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "lm_l')
    metrics(jsonl=str(path)).record(report(2))
    torn, run, whole = path.read_text().splitlines()
    assert torn == '{"iteration": 1, "lm_l' and "run" in run and json.loads(whole)["iteration"] == 2


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the driver says of its metrics."""
    speaker = logging.getLogger("megatron.pretrain")
    before, speaker.propagate = speaker.propagate, True
    caplog.set_level(logging.CRITICAL, "megatron.pretrain")
    yield caplog
    speaker.propagate = before


def test_a_sink_that_fails_is_said_once_and_the_others_continue(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    class Broken:
        def add_scalar(self, *_: Any) -> None:
            raise RuntimeError("the board\nis broken")

    writer = metrics(jsonl=str(tmp_path / "metrics.jsonl"), tensorboard=Broken())
    for iteration in (1, 2, 3):
        writer.record(report(iteration))
    (line,) = said.messages
    assert line == "metrics: cannot write --tensorboard-dir: the board is broken; disabled"
    assert len(lines(tmp_path / "metrics.jsonl")) == 4


def test_a_disk_that_is_full_for_a_while_costs_those_lines_only(said: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "gone" / "metrics.prom"
    path.parent.mkdir()
    writer = metrics(textfile=str(path))
    path.unlink()
    path.parent.rmdir()
    writer.record(report(1))
    path.parent.mkdir()
    writer.record(report(2))
    assert 'training_iteration{run="job-7"} 2.0' in path.read_text() and len(said.messages) == 1


def test_a_line_that_a_full_disk_cuts_off_costs_that_line_only(said: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = metrics(jsonl=str(path))
    writer.record(report(1))
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
    try:
        writer.record(report(2))
        writer.record(report(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    writer.record(report(4))
    _, first, torn, last = path.read_text().splitlines()
    assert (json.loads(first)["iteration"], len(torn), json.loads(last)["iteration"]) == (1, 40, 4)
    assert said.messages == [
        "metrics: cannot write --metrics-jsonl: No space left on device; tried again in each iteration"
    ]


def test_boards_get_all_numbers_by_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(tmp_path))
    writer = metrics(tensorboard=board)
    writer.record(report(3))
    writer.recovered(TIMELINE, 2)
    writer.close()
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {name: events.Scalars(name)[0] for name in events.Tags()["scalars"]}
    wanted = {
        "checkpoint/protection": 2, "checkpoint/persistence": 1,
        "checkpoint/iterations not protected": 1,
        "checkpoint/iterations not persisted": 3, "throughput/tokens per s": 2000, "throughput/model FLOP per s": 1e10,
        "checkpoint/bytes written": 7, "checkpoint/memory replica bytes": 8, "recovery/total (s)": 3,
        "recovery/lost tokens": 11, "recovery/replay (s)": 2,
    }  # fmt: skip
    assert {name: found[name].value for name in wanted} == pytest.approx(wanted)
    assert found["checkpoint/protection"].step == 3 and found["recovery/total (s)"].step == 2


def test_a_board_gets_what_the_loop_does_not_show() -> None:
    names: set[str] = set()

    class Board:
        def add_scalar(self, name: str, *_: Any) -> None:
            names.add(name)

    metrics(tensorboard=Board()).record(report(1))
    assert "lm loss" not in names and "checkpoint/protection" in names


def test_prometheus_is_told_of_protection_before_all_else(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    writer = metrics(textfile=str(path))
    writer.record(report(8))
    writer.recovered(TIMELINE, 8)
    writer.record(report(9))
    text = path.read_text()
    assert text.startswith("# HELP moe_ckpt_protection_state")
    for line in (
        'moe_ckpt_protection_state{run="job-7",tier="memory"} 2.0',
        'moe_ckpt_protection_state{run="job-7",tier="storage"} 1.0',
        'moe_ckpt_newest_iteration{run="job-7",tier="memory"} 8.0',
        'moe_ckpt_memory_bytes{run="job-7",use="replica"} 8.0',
        'moe_ckpt_copied_bytes_total{run="job-7"} 200.0',
        'moe_ckpt_written_bytes_total{run="job-7"} 14.0',
        'moe_ckpt_recoveries_total{run="job-7"} 1.0',
        'moe_ckpt_recovery_seconds{part="replay",run="job-7"} 2.0',
        'moe_ckpt_recovery_lost_tokens{run="job-7"} 11.0',
        'training_start_timestamp_seconds{run="job-7"} 10.0',
        'training_tokens_per_second{run="job-7"} 2000.0',
        'training_model_flops_per_second{run="job-7"} 1e+',
    ):
        assert line in text, line


def test_what_is_left_of_a_job_that_ended_well_wakes_nobody(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    writer = metrics(textfile=str(path))
    writer.record(report(8))
    assert path.exists()
    writer.close()
    assert not path.exists()


def test_the_alert_rules_are_about_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    writer = metrics(textfile=str(path))
    writer.record(report(8))
    writer.recovered(TIMELINE, 8)
    rules = (ROOT / "examples" / "monitoring" / "alerts.yml").read_text()
    used = set(re.findall(r"\b(?:moe_ckpt|training)_\w+", rules))
    assert len(used) > 6
    assert {name for name in used if f"\n{name}{{" not in path.read_text()} == set()
    assert all(f'tier="{tier}"' in path.read_text() for tier in re.findall('tier="(\\w+)"', rules))


def test_the_same_is_served_on_localhost_as_openmetrics() -> None:
    from world import free_port  # here: a job of `wandb_job` imports this file, and not that one

    port = free_port()
    writer = metrics(port=port)
    writer.record(report(1))
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
        assert "openmetrics-text" in answer.headers["Content-Type"]
    assert text.endswith("# EOF\n") and 'moe_ckpt_protection_state{run="job-7",tier="memory"} 2.0' in text
    writer.close()
    with socket.create_server(("127.0.0.1", port)):
        pass  # it was given back


def test_a_port_in_use_is_one_line_and_training_continues(said: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        metrics(port=port, textfile=str(tmp_path / "job.prom")).record(report(1))
    (line,) = said.messages
    assert line == f"metrics: cannot serve --metrics-port {port}: Address already in use; disabled"
    assert "training_iteration" in (tmp_path / "job.prom").read_text()


@pytest.mark.parametrize(
    ("module", "settings", "advice"),
    [
        ("prometheus_client", {"textfile": "x"}, r"--metrics-textfile needs .*\[metrics\]"),
        ("prometheus_client", {"port": 1}, r"--metrics-port needs .*\[metrics\]"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_to_install(
    module: str, settings: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ImportError(f"No module named {name!r}")
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInput, match=advice):
        metrics(**settings)


def test_nothing_of_the_boards_is_imported_before_it_is_asked_for() -> None:
    files = sorted(Path(sinks.__file__).parent.glob("*.py"))
    top_level = [
        ast.unparse(node)
        for file in files
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert len(files) > 5
    assert not [line for line in top_level if any(name in line for name in ("wandb", "prometheus_client", "torch"))]


WANDB = """
import sys
import wandb
sys.path[:0] = [{here!r}, {unit!r}]
from test_metrics import TIMELINE, metrics, report
run = wandb.init(project="p", dir={folder!r})
writer = metrics(jsonl={jsonl!r}, wandb=run)
for iteration in (1, 2, 2, 3):
    writer.record(report(iteration))
run.log({{"loss of Megatron-LM": 1.0}}, 5)  # whose loop is an iteration ahead of the recovery
writer.recovered(TIMELINE, 3)
writer.record(report(6))
writer.close()
run.finish()
"""


def wandb_job(folder: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """A job that reports to Weights & Biases, without an account."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'megatron-moe-ckpt[wandb]'")
    jsonl = folder / "metrics.jsonl"
    code = WANDB.format(
        here=str(Path(__file__).parent), unit=str(Path(__file__).parents[1]), jsonl=str(jsonl), folder=str(folder)
    )
    unset = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = unset | {"WANDB_MODE": "offline", "HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done, lines(jsonl)


@pytest.mark.ci
def test_weights_and_biases_gets_iterations_that_come_again_too(tmp_path: Path) -> None:
    done, found = wandb_job(tmp_path)
    assert len(found) == 7 and "training continues" not in done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    kept = log.read_bytes()
    assert (
        b"checkpoint/protection" in kept and b"throughput/model FLOP per s" in kept and b"recovery/lost tokens" in kept
    )
