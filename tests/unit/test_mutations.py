"""The list of small breaks that tests must notice, `tools/mutations.toml`, and the code that it is about."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_each_break_of_the_list_fits_the_code_and_names_tests_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    found = importlib.import_module("mutation_catches").mutations()  # raises where the text is not there once
    assert found
    assert [test for one in found for test in one.tests if not (ROOT / test.partition("::")[0]).exists()] == []
