"""A wheel of this project, built once."""

from __future__ import annotations

from pathlib import Path

import environments
import pytest


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = environments.sources(tmp_path_factory.mktemp("source"))
    return environments.built_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def megatron_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron-LM source tree that knows nothing of this project."""
    return environments.source_tree(tmp_path_factory.mktemp("Megatron-LM"))
