"""`python -m reproduce`: tables, files and pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megatron.core.dist_checkpointing.moe.errors import UsageError
from reproduce.__main__ import main
from reproduce.figures import FIGURES

ROOT = Path(__file__).parents[3]


def invoke(name: str, *words: str) -> Result:
    return CliRunner().invoke(main, [name, *words])


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-X", "importtime", "-m", "reproduce", name, *words]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_help_says_which_tables_and_figures_there_are() -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    assert all(f"{name} " in result.output and entry.what in result.output for name, entry in FIGURES.items())


def test_a_table_is_printed_without_torch() -> None:
    result = run("table6")
    assert result.returncode == 0, result.stderr[-500:]
    assert "host memory of checkpoints" in result.stdout
    assert not {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()} & {"torch", "numpy"}


@pytest.mark.ci
def test_a_figure_of_an_extension_is_printed_by_the_command_too() -> None:
    result = run("moc_fig11")
    assert result.returncode == 0, result.stderr[-500:]
    assert "sharding" in result.stdout.lower() or "MoC" in result.stdout


def test_json_has_plain_numbers() -> None:
    found = json.loads(invoke("table6", "--json").output)
    assert found["DeepSeek-MoE"]["published"]["gemini_bytes"] == 426_400_000_000
    assert isinstance(found["QWen-MoE"]["ours"]["total_bytes"], int)


def test_a_result_is_written_as_its_suffixes_say(tmp_path: Path) -> None:
    markdown, data, picture = (tmp_path / name for name in ("fig1.md", "fig1.json", "fig1.png"))
    result = invoke("fig1", "--out", str(markdown), "--out", str(data), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "| best interval |" in markdown.read_text()
    assert "(fig1.png)" in markdown.read_text()
    assert json.loads(data.read_text())["costs"]["iteration_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [("--out", "fig1.txt"), ("--plot", "fig1.doc")])
def test_a_suffix_that_stands_for_nothing_is_refused(words: tuple[str, str]) -> None:
    error = invoke("fig1", *words).exception
    assert isinstance(error, UsageError)
    assert words[1] in str(error)


def test_what_cannot_be_written_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def computed() -> None:
        raise AssertionError("was computed")

    monkeypatch.setattr("reproduce.fig1.figure", computed)
    for words in (("--out", "fig1.txt"), ("--plot", "none/fig1.png")):
        assert isinstance(invoke("fig1", *words).exception, UsageError)


def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    result = run("fig1", "--out", str(tmp_path / "none" / "fig1.md"))
    (said,) = [line for line in result.stderr.splitlines() if not line.startswith("import time")]
    assert result.returncode == 2
    assert said.startswith("python -m reproduce: --out") and "cannot be written" in said
