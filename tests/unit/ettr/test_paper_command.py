"""`moe-ckpt simulate run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.commands.simulate import simulate

RUN = ("run", "--model", "GPT-125M-8E", "--pp", "2", "--ep", "4", "--global-batch-size", "32", "--cluster", "a800")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(simulate, words)


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)["systems"]
    return found


def test_a_run_of_ones_own_model_has_a_row_for_each_system_and_failure_rate() -> None:
    words = (*RUN, "--mtbf", "1h", "--mtbf", "10m", "--system", "gemini", "--system", "sparse", "--seeds", "3")
    found = rows(invoke(*words, "--json"))
    assert [(row["mtbf_s"], row["system"]) for row in found] == [
        (3600.0, "gemini"),
        (3600.0, "moevement"),
        (600.0, "gemini"),
        (600.0, "moevement"),
    ]
    assert all(0 < row["ettr"] < 1 for row in found)


def test_the_same_seeds_give_the_same_result() -> None:
    words = (*RUN, "--mtbf", "20m", "--system", "moc", "--seeds", "2", "--json")
    assert invoke(*words).output == invoke(*words).output


def test_a_budget_of_lost_tokens_is_spread_over_the_hours_that_are_asked_for() -> None:
    short, long = (
        rows(invoke(*RUN, "--mtbf", "30m", "--system", "moc", "--seeds", "1", "--hours", hours, "--json"))[0]
        for hours in ("12", "48")
    )
    assert long["lost"] < 10 * short["lost"]


def test_a_trace_is_one_run_with_its_own_failures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,nodes\n600,0\n4000,0\n")
    found = rows(invoke(*RUN, "--trace", str(trace), "--hours", "2", "--system", "gemini", "--json"))
    assert [row["mtbf_s"] for row in found] == [3600.0]
    assert found[0]["±"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--mtbf"),
        (("--mtbf", "soon"), "soon"),
        (("--mtbf", "1h", "--system", "magic"), "magic"),
        (("--mtbf", "1h", "--trace", "faults.csv"), "--trace"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_to_give(words: tuple[str, ...], said: str) -> None:
    result = invoke(*RUN, *words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_batch_that_the_layout_cannot_split_is_refused() -> None:
    error = invoke("run", "--model", "GPT-125M-8E", "--ep", "8", "--global-batch-size", "12", "--mtbf", "1h").exception
    assert isinstance(error, UsageError)
    assert "--global-batch-size 12" in str(error)
