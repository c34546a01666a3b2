"""Each figure has its page, which is what its script writes now, with data and a picture beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from megatron.core.dist_checkpointing.moe.errors import UsageError
from reproduce import figures
from reproduce.__main__ import main
from reproduce.figure import Figure
from reproduce.figures import FIGURES

LONG = {"break_even", "cross_validation", "failure_traces", "large_scale", "public_reports", "table3"}
"""Of 5 to 45 seconds each."""


def test_every_module_that_makes_a_figure_is_in_the_table() -> None:
    modules = Path(figures.__file__).parent.glob("*.py")
    assert {path.stem for path in modules if "\ndef figure() -> Figure:" in path.read_text("utf-8")} == set(FIGURES)


def test_a_page_of_real_runs_says_of_which_commit_and_day_they_are() -> None:
    """Pages that are made anew from the sources alone are of the commit that has them."""
    folder, scripts = figures.RESULTS, Path(figures.__file__).parent
    computed = {
        FIGURES[name].page.name for name in FIGURES if "measured(" not in (scripts / f"{name}.py").read_text("utf-8")
    }
    pages = {page.name: page.read_text("utf-8") for page in folder.glob("*.md") if page.name not in computed}
    assert len(pages) >= 25
    assert [name for name, text in pages.items() if not re.search(r"commits? [0-9a-f]{8}\b", text)] == []
    assert [name for name, text in pages.items() if not re.search(r"\b2026-\d\d-\d\d\b", text)] == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else pytest.mark.ci) for name in FIGURES]
)
def test_the_page_is_what_the_script_writes(name: str) -> None:
    page, found = FIGURES[name].page, figure_of(name)
    if found is None:
        assert not page.exists()
        return
    picture, data = page.with_suffix(".png"), page.with_suffix(".json")
    told = found.markdown(f"python -m reproduce {name} --docs", picture, data)
    assert page.read_text(encoding="utf-8") == told, f"run python -m reproduce {name} --docs"
    assert picture.stat().st_size > 1000
    assert rounded(json.loads(data.read_text(encoding="utf-8"))) == rounded(json.loads(json.dumps(found.data)))


def figure_of(name: str) -> Figure | None:
    """None where the runs that it is made of are not there."""
    try:
        return Figure.of(name)
    except UsageError:
        return None


def rounded(value: Any) -> Any:
    """Without the digits in which machines may differ."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def test_a_page_is_written_with_data_and_picture_and_links_to_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    result = CliRunner().invoke(main, ["moc_fig11", "--docs"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moc-fig11.json", "moc-fig11.md", "moc-fig11.png"]
    text = (tmp_path / "moc-fig11.md").read_text()
    assert "Made by `python -m reproduce moc_fig11 --docs`." in text
    assert "](moc-fig11.png)" in text and "](moc-fig11.json)" in text


def test_a_page_with_seconds_of_recoveries_says_that_they_are_not_predicted() -> None:
    with_seconds = {
        name: row
        for name, row in FIGURES.items()
        if any(word in columns for _, columns in row.tables for word in ("recovery:seconds", "E[R]:seconds"))
    }
    assert {"fig1", "table3", "large_scale"} <= with_seconds.keys()
    assert [name for name, row in with_seconds.items() if "not predicted" not in " ".join(row.notes)] == []


def test_pages_are_named_by_paper() -> None:
    named = {name: FIGURES[name].page.stem for name in ("fig1", "table3", "moc_fig5", "large_scale")}
    assert named == {"fig1": "moevement-fig1", "table3": "moevement-table3", "moc_fig5": "moc-fig5",
                     "large_scale": "large-scale"}  # fmt: skip
