"""How many of Megatron-Bridge's recipes are protected: never fewer than before, and read from the wheel as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bridge_wheel import why_not

from .test_docs import tool

ROOT = Path(__file__).parents[2]
LEAST = {
    "training": {"full": 47, "in place": 46, "sparse": 47, "local recovery": 33},
    "performance": {"full": 306, "in place": 303, "sparse": 260, "local recovery": 98},
}
"""Raise a number when more is protected."""


def test_no_fewer_recipes_are_protected_than_before() -> None:
    found = tool("recipe_coverage").totals()
    accepted = {kind: {column: row[column][0] for column in row} for kind, row in found.items()}
    assert accepted == LEAST


@pytest.mark.ci
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_settings_of_recipes_are_those_of_the_wheel() -> None:
    # In a process of its own: stand-ins for parts of Bridge stay in one.
    code = "import recipe_coverage as tool; assert tool.read() == tool.DATA.read_text()"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT / "tools", check=True, timeout=120)
