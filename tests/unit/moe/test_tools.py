"""The scripts in tools/checkpoint: the same commands under Megatron's names for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ckpt.commands.main import commands

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools" / "checkpoint"
FRONTS = sorted(path for path in TOOLS.glob("*.py") if not path.name.startswith("_"))


def told(*command: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_each_command_for_checkpoints_has_a_script() -> None:
    names = [path.stem for path in FRONTS]
    assert names == ["convert", "diff", "digest", "gc", "inspect", "plan", "verify"]
    assert set(names) <= set(commands.commands)


def test_the_scripts_differ_in_nothing_but_the_name_that_they_tell() -> None:
    assert len({path.read_text().replace(f"moe-ckpt {path.stem}", "") for path in FRONTS}) == 1


@pytest.mark.parametrize("name", ["inspect", "gc"])
def test_a_script_is_the_command_that_it_is_named_after(name: str) -> None:
    assert told(TOOLS / f"{name}.py", "--help") == told("-m", "moe_ckpt", name, "--help")
