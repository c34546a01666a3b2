"""Which of `make test`, `make test-ci` and `make test-full` runs a test, by the marks of the test and of its cases."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TIERS = ("test", "test-ci", "test-full")
"""Targets of the Makefile, the cheapest first; each also needs what those before it run."""
MARKS = {"ci": 1, "full": 2}
"""Where a test with this mark runs; without one it is run by the first."""


def tier_of(path: Path, name: str) -> str:
    """The cheapest target that runs a case of the test."""
    module = _module(path)
    test = getattr(module, name)
    of_products = (_cheapest(values) for values in _products(module, test))
    return TIERS[max(_dearest([*_marks(module), *_marks(test)]), *of_products, 0)]


def _marks(holder: object) -> list[Any]:
    marks = getattr(holder, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def _dearest(marks: Iterable[Any]) -> int:
    return max((MARKS.get(mark.name, 0) for mark in marks), default=0)


def _cheapest(values: Iterable[Any]) -> int:
    return min((_dearest(getattr(value, "marks", ())) for value in values), default=0)


def _products(module: ModuleType, function: Any) -> Iterator[Iterable[Any]]:
    """The values of each parameter of a test and of the fixtures of its file, each with its marks."""
    for mark in _marks(function):
        if mark.name == "parametrize":
            yield mark.args[1]
    for name in inspect.signature(function).parameters:
        fixture = getattr(module, name, None)
        marker = getattr(fixture, "_fixture_function_marker", None)
        if marker is not None:
            yield marker.params or ()
            yield from _products(module, fixture)


@cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tier of {path}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
