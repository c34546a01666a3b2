"""Megatron-LM's parser of flags, which the driver keeps from reading its own sources again and again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from world import World

PROGRAM = Path(__file__).with_name("parse_twice.py")


@pytest.fixture(scope="module")
def facts(world: World) -> dict[str, Any]:
    """What one worker found."""
    outcome = world.start((), 1, script=PROGRAM).wait()
    (said,) = [line for line in outcome.lines if line.startswith("facts: ")] or [outcome.said]
    found: dict[str, Any] = json.loads(said.removeprefix("facts: "))
    return found


def test_flags_and_help_are_the_same_with_cached_docstrings(facts: dict[str, Any]) -> None:
    assert facts["same"]


def test_sources_are_parsed_for_the_first_parser_only(facts: dict[str, Any]) -> None:
    plain, first, second = facts["parsed"]
    assert plain >= first > 10
    assert second == 0
