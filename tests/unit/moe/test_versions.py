"""A Python, torch or Megatron-Core that cannot work is refused in a line; a newer one only where that is not safe."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megatron.core import package_info
from megatron.core.dist_checkpointing.moe.stock import protected
from megatron.core.dist_checkpointing.moe.versions import (
    SUPPORTED,
    FoundVersion,
    UnsupportedVersion,
    check_versions,
    found_versions,
)

ROOT = Path(__file__).parents[3]
ENGINE = "megatron.core.dist_checkpointing.moe"
FINE = {
    "Python": FoundVersion("3.12.1"),
    "torch": FoundVersion("2.13.0+cpu"),
    "megatron-core": FoundVersion("0.19.2", "/env/megatron/core"),
}


def refused(name: str, version: str | None, replaying: str | None = None) -> str:
    with pytest.raises(UnsupportedVersion) as caught:
        check_versions(FINE | {name: FoundVersion(version, FINE[name].folder if version else "")}, replaying)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_what_is_installed_here_is_supported_without_a_word() -> None:
    assert check_versions(found_versions(), "sparse") == []


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("Python", "3.12.0rc1"), ("Python", "3.13.9"), ("torch", "2.8.0"), ("torch", "2.10.0a0+b4e4ee81d3.nv25.12"),
        ("torch", "3.0"), ("megatron-core", "0.17.0"), ("megatron-core", "0.19.99"),
    ],
)  # fmt: skip
def test_versions_of_the_ranges_pass(name: str, version: str) -> None:
    assert check_versions(FINE | {name: FoundVersion(version)}, "sparse") == []


@pytest.mark.parametrize(
    ("name", "version", "supported"),
    [
        ("Python", "3.11.9", "3.12 to 3.13"),
        ("torch", "2.5.1", "2.8 and newer"),
        ("torch", "2.7.1", "2.8 and newer"),
        ("megatron-core", "0.16.1", "0.17 to 0.19"),
    ],
)
def test_what_is_too_old_is_refused_with_what_was_found_what_is_supported_and_what_to_do(
    name: str, version: str, supported: str
) -> None:
    line = refused(name, version)
    assert f"{name} {version}" in line
    assert f"{supported} are supported" in line
    assert line.endswith(SUPPORTED[name].remedy)


def test_what_is_missing_is_named() -> None:
    assert refused("megatron-core", None).startswith(
        "megatron-core is missing; 0.17 to 0.19 are supported: pip install"
    )


def test_a_newer_core_is_refused_where_iterations_are_replayed_and_the_strategy_named() -> None:
    line = refused("megatron-core", "0.20.0", "sparse")
    assert "megatron-core 0.20.0 (/env/megatron/core) is newer than what is supported, 0.17 to 0.19" in line
    assert "--moe-ckpt-strategy sparse" in line
    assert "use full or pec, or pip install" in line


@pytest.mark.parametrize(("name", "version"), [("megatron-core", "1.0"), ("Python", "3.14.0")])
def test_newer_ones_only_get_a_warning_where_nothing_is_replayed(name: str, version: str) -> None:
    (line,) = check_versions(FINE | {name: FoundVersion(version)})
    assert f"{name} {version} is newer than what is supported" in line


def test_versions_that_are_found_are_those_that_python_imports() -> None:
    found = found_versions()
    assert found["Python"] == FoundVersion(platform.python_version())
    assert found["torch"] == FoundVersion(torch.__version__, str(Path(torch.__file__).parent))
    assert found["megatron-core"] == FoundVersion(
        package_info.__shortversion__, str(Path(package_info.__file__).parent)
    )


def test_the_loop_of_a_source_tree_that_pip_does_not_know_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", unknown)
    assert protected(lambda: "trained")() == "trained"


def test_pip_is_told_the_same_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, torch_range = SUPPORTED["megatron-core"], SUPPORTED["torch"]
    assert core.below is not None
    low, high = (".".join(map(str, numbers)) for numbers in (core.oldest, core.below))
    assert f"megatron-core>={low},<{high}" in project["dependencies"]
    assert f"torch>={'.'.join(map(str, torch_range.oldest))}" in project["dependencies"]
    assert project["requires-python"] == f">={'.'.join(map(str, SUPPORTED['Python'].oldest))}"


STARTS = {
    "moe-ckpt": ("-m", "moe_ckpt", "--version"),
    "driver": (str(ROOT / "pretrain_gpt_moe.py"), "--help"),
    "launcher": ("-m", "megatron.pretrain.launch", "--nproc-per-node", "1", str(ROOT / "pretrain_gpt_moe.py")),
}


def tree(folder: Path, init: str) -> Path:
    """A Megatron source tree of a version that nobody supports, and what its packages run."""
    core = folder / "megatron" / "core"
    (core / "dist_checkpointing").mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\nPRE_RELEASE = 'rc1'\n")
    for package in (core, core / "dist_checkpointing"):
        (package / "__init__.py").write_text(init)
    return core


def start_behind(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command, environment = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_every_start_refuses_a_source_tree_that_is_too_old_in_a_line(start: tuple[str, ...], tmp_path: Path) -> None:
    core = tree(tmp_path, "raise RuntimeError('this must not be run')\n")
    result = start_behind(tmp_path, *start)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"megatron-core 0.15.3 ({core}) is too old; 0.17 to 0.19 are supported: pip install")


def test_a_loop_of_a_users_own_gets_no_manager_but_that_line(tmp_path: Path) -> None:
    tree(tmp_path, "")
    result = start_behind(tmp_path, "-c", f"from {ENGINE} import MoECheckpointManager")
    assert result.stderr.splitlines()[-1].startswith(f"{ENGINE}.versions.UnsupportedVersion: megatron-core 0.15.3 (")


ON_ANY_PYTHON = (
    "moe_ckpt/__init__.py", "moe_ckpt/__main__.py", "moe_ckpt/megatron_core.py", "moe_ckpt_finder.py",
    "megatron/core/dist_checkpointing/moe/__init__.py", "megatron/core/dist_checkpointing/moe/errors.py",
    "megatron/core/dist_checkpointing/moe/versions.py",
)  # fmt: skip


@pytest.mark.parametrize("name", ON_ANY_PYTHON)
def test_what_refuses_an_old_python_can_be_read_by_it(name: str) -> None:
    ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 8))
