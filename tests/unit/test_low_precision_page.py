"""Tables of docs/low_precision.md are those that the benchmarks make of the data that were kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("benchmark", ["low_precision_bytes", "low_precision_quality"])
def test_the_page_has_the_table_that_was_measured(benchmark: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{benchmark}.py"), "--report"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout in (ROOT / "docs" / "low_precision.md").read_text(encoding="utf-8")


def test_a_window_of_row_5_takes_less_than_half_of_row_2_s() -> None:
    kept = json.loads((ROOT / "benchmarks" / "results" / "low_precision_bytes.json").read_text())
    assert kept["5"]["window"] < 0.5 * kept["2"]["window"]
