"""The small examples, run as a reader would: each ends as is written beside it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from world import HANG_TIMEOUT_S, ROOT, run_to_end

EXAMPLES = ROOT / "examples"
LONGEST_S = 5 * HANG_TIMEOUT_S
"""An example trains up to five times."""


@pytest.mark.timeout(LONGEST_S + 60)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=pytest.mark.full)
        for name in ("gpt-125m-8e", "gpt-350m-16e", "moe-llava", "gpt-moe", "qwen-moe", "deepseek-moe", "finetune")
    ],
)
def test_an_example_of_a_fault_ends_as_is_written_beside_it(example: str, corpus: str, tmp_path: Path) -> None:
    scratch = tmp_path / "with spaces"
    scratch.mkdir()
    memory = set(Path("/dev/shm").glob("moe-ckpt-example-*"))
    said = run([str(EXAMPLES / example / "reduced.sh")], MOE_CKPT_CORPUS=corpus, TMPDIR=str(scratch))
    expected = (EXAMPLES / example / "expected.txt").read_text()
    # On another machine another iteration may be the newest whole one, and a sum may round otherwise.
    assert without_numbers(said) == without_numbers(expected), said
    assert not list(scratch.iterdir())
    assert set(Path("/dev/shm").glob("moe-ckpt-example-*")) <= memory


def without_numbers(text: str) -> str:
    return re.sub(r"[-+]?\d[\d.]*", "#", text)


def run(command: list[str], **environment: str) -> str:
    """What a command that ends well writes to standard output; all that it started ends with it."""
    ended = run_to_end(command, LONGEST_S, **{"MOE_CKPT_PYTHON": sys.executable} | environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S + 60)
@pytest.mark.parametrize("example", ["qwen3-30b-a3b", "mixtral-8x22b", "deepseek-v3", "deepseek-v3-lite"])
def test_a_reduced_recipe_ends_as_without_its_fault(example: str, corpus: str, tmp_path: Path) -> None:
    said = run([str(EXAMPLES / example / "reduced.sh")], MOE_CKPT_CORPUS=corpus, TMPDIR=str(tmp_path))
    assert re.search(r"^recovered iteration \d+ exactly", said, re.MULTILINE), said
    assert said.endswith("Every loss and gradient norm is that of the undisturbed run, to the last bit.\n")


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S + 60)
def test_an_accuracy_campaign_trains_asks_and_continues_where_it_was(corpus: str, tmp_path: Path) -> None:
    kept, results = tmp_path / "runs", tmp_path / "results"
    command = [sys.executable, str(EXAMPLES / "accuracy" / "campaign.py"), "--tiny", "--seeds", "1"]
    command += ["--scratch", str(kept), "--results", str(results), "--only", "full"]
    assert run(command, MOE_CKPT_CORPUS=corpus).endswith("Exact where it must be.\n")
    first = {path: path.stat().st_mtime for path in kept.iterdir()}
    assert len(first) == 2
    run([*command, "pec K=1", "selective"], MOE_CKPT_CORPUS=corpus)
    assert {path: path.stat().st_mtime for path in first} == first
    page = (results / "accuracy-campaign.md").read_text()
    assert [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:] == [
        "fault-free", "full", "pec K=1", "selective"
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S + 60)
def test_a_killed_vision_model_with_partial_experts_is_asked_about_images(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "accuracy" / "vision.py"), "--tiny", "--seeds", "1"]
    run([*command, "--results", str(tmp_path)])
    data = json.loads((tmp_path / "vision-accuracy.json").read_text())
    found = {one["name"]: one for one in data["runs"]}
    assert {name: (one["faults"], one["plt"] > 0) for name, one in found.items()} == {
        "fault-free": (0, False), "sequential": (4, True)
    }  # fmt: skip
    assert all(0 < one["accuracy"] < 1 for one in found.values())


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S + 60)
def test_tokens_that_are_dropped_from_experts_change_the_loss(corpus: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "accuracy" / "dropped_tokens.py"), "--tiny", "--seeds", "1"]
    run([*command, "--results", str(tmp_path)], MOE_CKPT_CORPUS=corpus)
    data = json.loads((tmp_path / "dropped-tokens.json").read_text())
    losses = {one["dropped"]: one["loss"] for one in data["runs"]}
    assert list(losses) == [0.0, 0.1] and losses[0.0] != losses[0.1]
