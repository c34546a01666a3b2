"""The demo says that all is well only if it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["demo"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def report(iteration: int, *, replayed: bool = False) -> dict[str, Any]:
    known = {"stall_s": 0.001, "iteration_time_s": 0.1, "protection": "protected"}
    return known | {"iteration": iteration, "lm_loss": 1 / iteration, "replayed": replayed}


@pytest.fixture
def killed(demo: ModuleType) -> list[dict[str, Any]]:
    """Reports of a run that was struck and replayed the four iterations before."""
    at = demo.KILL_AT
    again = [report(iteration, replayed=True) for iteration in range(at - 4, at)]
    return [*map(report, range(1, at)), *again, *map(report, range(at, demo.ITERATIONS + 1))]


@pytest.fixture
def expected(demo: ModuleType) -> dict[int, float]:
    return {iteration: 1 / iteration for iteration in range(1, demo.ITERATIONS + 1)}


def test_a_run_with_the_losses_of_the_undisturbed_one_is_equal(
    demo: ModuleType, killed: list[dict[str, Any]], expected: dict[int, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.compare(expected, killed)
    assert (
        f"{demo.ITERATIONS + 4} losses, 4 of them replayed, 0 of iterations that were trained again: all bit-equal"
        in capsys.readouterr().out
    )


def last_bit_changed(killed: list[dict[str, Any]]) -> None:
    killed[-1]["lm_loss"] += 2**-58


def replayed_otherwise(killed: list[dict[str, Any]]) -> None:
    killed[40]["lm_loss"] = 1.0


def one_lost(killed: list[dict[str, Any]]) -> None:
    del killed[50]


def one_trained_again(killed: list[dict[str, Any]]) -> None:
    killed[41]["replayed"] = False


@pytest.mark.parametrize("change", [last_bit_changed, replayed_otherwise, one_lost, one_trained_again])
def test_a_run_that_differs_in_anything_is_not_equal(
    change: Callable[[list[dict[str, Any]]], None],
    demo: ModuleType,
    killed: list[dict[str, Any]],
    expected: dict[int, float],
) -> None:
    change(killed)
    assert not demo.compare(expected, killed)


def test_loss_stall_and_protection_are_drawn(demo: ModuleType, killed: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    demo.plot([*map(report, range(1, demo.ITERATIONS + 1))], killed, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
