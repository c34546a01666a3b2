"""Commands of the pages for a new user, run as they stand; what the pages say that they print is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = re.compile(r"(?:[A-Z]+=\S+ )*(?:scripts/train_cpu\.sh|torchrun|moe-ckpt|\.venv/bin/python) [^.]")
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")
TOKENS = re.compile(r"(\.\.\.|\d[\d.,]*(?:e[+-]\d+)?)")

type Launch = Callable[..., subprocess.CompletedProcess[str]]


def blocks(page: str) -> list[list[str]]:
    """Indented blocks of a page, their continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text(encoding="utf-8"))
    return [[line[4:] for line in block.splitlines()] for block in re.findall(r"(?m)(?:^    .*\n)+", text)]


def commands(page: str) -> list[str]:
    """Those that run on a machine without GPUs, as a shell takes them."""
    lines = [line for block in blocks(page) for line in block]
    return [line for line in lines if RUNS.match(line) and "..." not in line and "/dev/shm" not in line]


def printed(page: str) -> list[re.Pattern[str]]:
    """Lines that the page shows of a log; numbers may be others, and `...` is anything."""
    shown = [
        line
        for block in blocks(page)
        for line in block
        if re.match(r"(\[moe-ckpt\] )?(protected|interval|recover)", line)
    ]
    return [
        re.compile("".join(_pattern(part) for part in TOKENS.split(line.removeprefix("[moe-ckpt] ")) if part))
        for line in shown
    ]


def _pattern(part: str) -> str:
    return ".*" if part == "..." else r"[\d.,e+-]+" if NUMBER.fullmatch(part) else re.escape(part)


@pytest.fixture
def shell(launch: Launch, tmp_path: Path) -> Callable[[str], str]:
    """Runs a command of a page, with folders and memory of its own, and returns what it said."""
    (tmp_path / "run").mkdir()
    memory = Path(f"/dev/shm/{tmp_path.parent.name}-{os.getpid()}")
    memory.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(command: str) -> str:
        command = re.sub(r"(?<![\w/])run/", f"{shlex.quote(str(tmp_path))}/run/", command)
        if "--moe-ckpt-strategy" in command:
            command += f" --moe-ckpt-memory-dir {memory}"
        ended = launch(["bash", "-c", command], PATH=path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, f"{command}\n{said}"
        return said

    yield run
    subprocess.run(["rm", "-rf", str(memory)], check=True)


@pytest.mark.ci
@pytest.mark.parametrize("page", ["docs/megatron-lm.md", "docs/your-loop.md"])
def test_a_rank_is_killed_as_the_page_says_and_what_it_shows_is_printed(page: str, shell: Callable[[str], str]) -> None:
    (command,) = (one for one in commands(page) if "--moe-ckpt-inject-fault" in one)
    said, shown = shell(command), printed(page)
    assert shown
    at = 0
    for pattern in shown:
        found = pattern.search(said, at)
        assert found, f"{pattern.pattern} is not there, or not in this order:\n{said}"
        at = found.end()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_guide_run_one_after_the_other(shell: Callable[[str], str]) -> None:
    told = commands("docs/guide.md")
    assert len(told) > 12
    for command in told:
        # Exit code 1: two iterations differ, no job runs here.
        if not command.startswith(("moe-ckpt diff", "moe-ckpt status")):
            shell(command)
