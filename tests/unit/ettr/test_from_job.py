"""Advice from a job that ran, flags to paste, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from megatron_flags import parser

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.commands.advise import advise
from moe_ckpt.commands.from_job import measured
from moe_ckpt.commands.plan import plan
from moe_ckpt.commands.simulate import simulate
from moe_ckpt.simulator.advise import EXACT

JOB = ("--model", "GPT-125M-8E", "--ep", "8", "--world-size", "16", "--seeds", "2", "--system", "gemini", "--json")


def metrics(folder: Path, count: int = 8) -> Path:
    """Iterations of 2 s, 0.25 s of it in waiting and 0.15 s beside copies, and one recovery."""
    rows: list[dict[str, Any]] = [
        {"iteration": at, "iteration_time_s": 2.0, "stall_s": 0.25, "slowed_s": 0.15, "snapshot_bytes": 10**9,
         "replicated_bytes": 3 * 10**9, "at_s": 2.0 * at, "lm_loss": 1.0}
        for at in range(1, count + 1)
    ]  # fmt: skip
    parts = {"detect": 0.5, "restart": 0.5, "import": 3.5, "rendezvous": 1.0, "build": 2.0, "fetch": 0.3, "replay": 3.0}
    rows.append({"recovery": {"parts": parts, "begun_s": 99.0, "is_whole": True}})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(advise, [*JOB, *words])


def test_medians_of_a_job_are_read_from_its_metrics(tmp_path: Path) -> None:
    found = measured(metrics(tmp_path))
    assert found.iteration_s == pytest.approx(1.6)
    assert (found.added_s, found.copied_bytes) == (0.15, 1e9)
    assert (found.detect_s, found.restart_s) == (0.5, 7.0)
    assert found.parts_s == {"restart": 0.5, "import": 3.5, "rendezvous": 1.0, "build": 2.0}
    assert found.sent_bytes_per_s == pytest.approx(1.5e9)


def test_an_iteration_without_a_copy_lost_nothing_to_one(tmp_path: Path) -> None:
    path = metrics(tmp_path, 21)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:-1]:
        row |= {"stall_s": 0.0} | ({} if row["iteration"] % 10 == 0 else {"snapshot_bytes": 0, "replicated_bytes": 0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measured(path).iteration_s == 2.0


def test_a_plan_of_the_job_that_was_measured_adds_what_that_measured(tmp_path: Path) -> None:
    words = ("--model", "GPT-125M-8E", "--ep", "8", "--world-size", "32", "--moe-ckpt-strategy", "full", "--json")
    replicas = ("--moe-ckpt-replicas", "3")
    found = CliRunner().invoke(plan, [*words, *replicas, "--from", str(metrics(tmp_path))])
    said = json.loads(found.stdout)
    added_s = 0.15 * said["largest_snapshot_of_a_rank_bytes"] / 1e9
    assert said["checkpoints_add_to_an_iteration"] * 1.6 == pytest.approx(added_s, rel=0.02)


def test_advice_takes_what_a_job_measured(tmp_path: Path) -> None:
    data = json.loads(run("--mtbf", "30m", "--from", str(metrics(tmp_path))).stdout)
    assert data["iteration_s"] == pytest.approx(1.6)
    (parts,) = data["a_fault,_by_the_parts_of_its_timeline"]
    assert parts["detect_s"] == 0.5
    assert parts["restart_s"] + parts["rendezvous_s"] == pytest.approx(7.0)


def test_what_is_given_counts_before_what_was_measured(tmp_path: Path) -> None:
    words = ("--from", str(metrics(tmp_path)), "--iteration-time", "5s", "--restart", "1m")
    data = json.loads(run("--mtbf", "30m", *words).stdout)
    assert data["iteration_s"] == pytest.approx(5.0)
    assert sum(data["a_fault,_by_the_parts_of_its_timeline"][0][name] for name in ("restart_s", "rendezvous_s")) == 60


def test_too_few_iterations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has 2 iterations after the first"):
        measured(metrics(tmp_path, 3))


def test_iterations_that_no_job_has_are_left_out_and_what_a_line_lacks_counts_as_none(tmp_path: Path) -> None:
    path = metrics(tmp_path, 12)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[2]["replicated_bytes"]
    rows[4]["iteration_time_s"], rows[5]["stall_s"], rows[6]["iteration_time_s"] = -3.0, 9.0, 0.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measured(path)
    assert found.iteration_s == pytest.approx(1.6)
    assert found.replicas == pytest.approx(3 * 7 / 8)


def test_flags_come_first_and_the_driver_takes_them() -> None:
    data = json.loads(run("--mtbf", "30m").stdout)
    assert list(data)[1] == "flags"
    assert data["flags"].startswith("--moe-ckpt-strategy full --moe-ckpt-interval ")
    assert parser().parse_args(data["flags"].split()).moe_ckpt_strategy == "full"


def test_the_recommendation_is_explained_in_three_sentences() -> None:
    data = json.loads(run("--mtbf", "30m").stdout)
    assert data["why"].startswith("Use gemini")
    assert "most of it in restart" in data["cost"]
    assert data["beside_it"]


def test_restarts_in_place_are_shorter() -> None:
    cold, place = (json.loads(run("--mtbf", "30m", *words).stdout) for words in ((), ("--restart-mode", "in-place")))
    assert place["expected_ettr"] > cold["expected_ettr"] + 0.02


@pytest.mark.parametrize("mtbf", ["1s", "20", "1m"])
def test_a_mean_time_below_a_restart_is_refused_in_one_line(mtbf: str) -> None:
    error = run("--mtbf", mtbf).exception
    assert isinstance(error, UsageError)
    assert "not longer than a restart takes" in str(error)


@pytest.mark.parametrize("hours", ["12", "12h", "720m"])
def test_hours_are_hours_with_and_without_their_unit(hours: str) -> None:
    words = ("run", *JOB[:6], "--mtbf", "1h", "--seeds", "1", "--system", "torch_dist", "--hours", hours, "--json")
    result = CliRunner().invoke(simulate, words)
    assert json.loads(result.stdout)["hours_of_a_run"] == 12


def test_systems_that_cannot_run_a_dense_model_are_named_beside_those_that_can() -> None:
    words = ("run", "--model", "Llama-3-8B", "--tp", "8", "--mtbf", "1h", "--seeds", "1", "--json")
    found = json.loads(CliRunner().invoke(simulate, words).stdout)
    assert {row["system"] for row in found["systems"]} == set(EXACT)
    said = [note for note in found["notes"] if note.startswith("Not simulated: ")]
    assert [name for name in ("moc", "moetion") if any(name in note for note in said)] == ["moc", "moetion"]
    asked = CliRunner().invoke(simulate, [*words, "--system", "moc"]).exception
    assert isinstance(asked, UsageError)


def test_of_systems_that_cannot_run_the_job_nobody_is_told_to_add_memory() -> None:
    words = ("--model", "Llama-3-8B", "--tp", "8", "--mtbf", "12h", "--seeds", "1", "--system", "moc")
    said = CliRunner().invoke(advise, words).stdout
    assert "No system can be used: none of those that were asked for can run this job; leave out --system." in said
    assert "memory, or train on more nodes" not in said


def test_a_trace_that_names_a_node_which_the_job_has_not_is_refused_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,nodes\n100,99\n")
    error = CliRunner().invoke(simulate, ["run", *JOB[:6], "--trace", str(trace)]).exception
    assert isinstance(error, UsageError)
    assert "line 2: the job has no node 99: its nodes are 0 to 1" in str(error)
