"""What holds for tests that run in the process of the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Megatron-Core and launchers set variables, which tests behind them would read, and hand on to processes."""
    with mock.patch.dict(os.environ):
        yield
