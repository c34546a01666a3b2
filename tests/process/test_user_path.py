"""Commands of the pages for a new user, run as they stand; what the pages say that they print is printed.

A command of these pages is run here, or `ELSEWHERE` names the test that runs what it starts; else a test fails.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from world import HANG_TIMEOUT_S

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/megatron-lm.md", "docs/your-loop.md", "docs/bridge.md", "docs/guide.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md")),
)
KILLED = ("docs/megatron-lm.md", "docs/your-loop.md")
"""Pages that show what a killed job prints."""
CALLED = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:(?:scripts|examples|benchmarks|tools|\.venv/bin)/\S+|pretrain_gpt_moe\.py|make|torchrun|"
    r"moe-ckpt(?:-run)?|pip|python|sbatch|srun|kubectl|docker|ft_launcher|bash|cp|cd|export|diff)(?: |$)"
)
SHOWN = re.compile(
    r"\[moe-ckpt\] |recovered |recovery took |replay: | +\S|resharding: |run/checkpoints is in use|Exact where"
)
"""First words of what a command prints."""

ELSEWHERE = {
    r"make test ": "tests/unit/test_docs.py::test_command_lines_name_commands_scripts_targets_and_flags_that_exist",
    r"pip (wheel|install|check)": "tests/install/test_wheel.py::"
    "test_it_merges_with_megatron_core_and_goes_again_without_a_trace",
    r"cp -r|cd /shared/.* sbatch": "tests/install/test_wheel.py::"
    "test_the_job_file_of_16_nodes_is_rehearsed_from_the_wheel",
    r"moe-ckpt-run .*pretrain_gpt(_moe)?\.py": "tests/process/test_worker_slots.py::"
    "test_after_a_loss_standbys_take_the_slots_and_new_processes_those_that_are_left",
    r"TORCH_\w+=1 torchrun --nproc-per-node 8 .* pretrain\.py": "tests/process/test_bridge.py::"
    "test_after_a_kill_every_loss_and_every_count_is_that_of_the_unprotected_loop",
    r"(\w+=\S+ )+examples/(deepseek-v3|mixtral|qwen3).*/train\.sh": "tests/unit/test_recipes.py::"
    "test_what_a_node_starts_has_each_flag_and_its_value_as_a_word",
    r"(\w+=\S+ )+examples/(gpt|moe-llava|qwen-moe|deepseek-moe).*/train\.sh": "tests/unit/test_examples.py::"
    "test_slurm_gets_the_same_job_and_one_node_more_as_a_spare",
    r"examples/(deepseek-v3|mixtral|qwen3).*/reduced\.sh": "tests/process/test_examples.py::"
    "test_a_reduced_recipe_ends_as_without_its_fault",
    r"examples/(gpt|moe-llava|qwen-moe|deepseek-moe|finetune).*/reduced\.sh": "tests/process/test_examples.py::"
    "test_an_example_of_a_fault_ends_as_is_written_beside_it",
    r"\S+python examples/accuracy/(campaign|\w+\.py( +#|$))": "tests/process/test_examples.py::"
    "test_an_accuracy_campaign_trains_asks_and_continues_where_it_was",
    r"pretrain_gpt_moe\.py \.\.\. --metrics": "tests/unit/pretrain/test_metrics.py::"
    "test_the_same_is_served_on_localhost_as_openmetrics",
}
"""Commands that need a cluster, GPUs or an hour, or have a test of their own: the test that runs what they start."""

ENDS_WITH = {"moe-ckpt diff": 1, "moe-ckpt status": 1, "diff": 1}
"""Exit codes other than 0: two iterations differ, no job runs here, the loops differ."""
QUICK = re.compile(r"moe-ckpt plan|diff ")
"""These run in `make test-ci`: seconds, and of no other command of their page."""
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")
TOKENS = re.compile(r"(\.\.\.|\d[\d.,]*(?:e[+-]\d+)?)")

type Launch = Callable[..., subprocess.CompletedProcess[str]]
type Shell = Callable[[str], str]


def blocks(page: str) -> list[list[str]]:
    """Indented blocks of a page and fenced ones of a shell, their continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / page).read_text(encoding="utf-8"))
    text = re.sub(r"(?ms)^```(?:diff|python|yaml)\n.*?^```$", "", text)
    fenced = re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)
    return [
        *([line[4:].rstrip() for line in block.splitlines()] for block in re.findall(r"(?m)(?:^    .*\n)+", text)),
        *(block.splitlines() for block in fenced),
    ]


def commands(page: str) -> list[str]:
    """As a shell takes them, one after the other; what a block goes to or exports before others is a part of those."""
    found = []
    for block in blocks(page):
        before = ""
        for line in (line.strip().removeprefix("$ ") for line in block):
            if line.startswith(("cd ", "export ")) and "sbatch" not in line:
                before += f"{line} && "
            elif CALLED.match(line):
                found.append(before + line)
    return found


def elsewhere(command: str) -> list[str]:
    return [pattern for pattern in ELSEWHERE if re.match(pattern, command)]


def kills(command: str) -> bool:
    return "--moe-ckpt-inject-fault" in command and "ft_launcher" not in command


def run_here(page: str) -> Iterator[object]:
    rest = [one for one in commands(page) if not elsewhere(one) and not (page in KILLED and kills(one))]
    for number, command in enumerate(rest):
        mark = pytest.mark.ci if QUICK.match(command) else pytest.mark.full
        yield pytest.param(command, marks=mark, id=f"{page}-{number}")


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Has `run`, in which the commands of a page find what those before them wrote, and memory."""
    made = tmp_path_factory.mktemp("pages")
    (made / "run").mkdir()
    memory = Path(f"/dev/shm/{made.name}-{os.getpid()}")
    (made / "memory").symlink_to(memory)
    memory.mkdir()
    yield made
    shutil.rmtree(memory)


@pytest.fixture
def shell(launch: Launch, folder: Path) -> Shell:
    """Runs a command of a page, with folders and memory of its own, and returns what it said."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(command: str) -> str:
        code = next((code for name, code in ENDS_WITH.items() if command.startswith(name)), 0)
        command = re.sub(r"(?<![\w/])run/", f"{shlex.quote(str(folder))}/run/", command)
        # As if `make setup` had made the environment in which this runs.
        command = re.sub(r"^make ", f"make -o {sys.prefix}/.ready VENV={sys.prefix} ", command)
        if "--moe-ckpt-strategy" in command and not command.startswith("moe-ckpt "):
            command += f" --moe-ckpt-memory-dir {(folder / 'memory').resolve()}"
        limit_s = 3 * HANG_TIMEOUT_S if command.startswith("make ") else HANG_TIMEOUT_S
        ended = launch(["bash", "-c", command], timeout_s=limit_s, PATH=path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, f"{command}\n{said}"
        return said

    return run


def test_a_page_for_new_users_has_no_command_that_no_test_runs() -> None:
    every = [(page, block) for page in PAGES for block in blocks(page)]
    unknown = [
        (page, line)
        for page, block in every
        for line in block[: 1 if block[0].startswith("$ ") else None]
        if not CALLED.match(line.strip().removeprefix("$ ")) and not SHOWN.match(line)
    ]
    assert not unknown, "neither a command that is known nor what one prints: add it to CALLED or SHOWN"
    told = [command for page in PAGES for command in commands(page)]
    assert {pattern for command in told for pattern in elsewhere(command)} == set(ELSEWHERE), "of no page any more"
    assert [command for command in told if len(elsewhere(command)) > 1] == []
    for path, _, name in (test.partition("::") for test in ELSEWHERE.values()):
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [pytest.param(KILLED[0], marks=pytest.mark.ci), pytest.param(KILLED[1], marks=pytest.mark.full)]
)
def test_a_rank_is_killed_as_the_page_says_and_what_it_shows_is_printed(page: str, shell: Shell) -> None:
    (command,) = filter(kills, commands(page))
    said, shown = shell(command), printed(page)
    assert shown
    at = 0
    for pattern in shown:
        found = pattern.search(said, at)
        assert found, f"{pattern.pattern} is not there, or not in this order:\n{said}"
        at = found.end()


@pytest.mark.timeout(4 * HANG_TIMEOUT_S)
@pytest.mark.parametrize("command", [case for page in PAGES for case in run_here(page)])
def test_a_command_of_a_page_runs_behind_those_before_it(command: str, shell: Shell) -> None:
    if command.startswith("ft_launcher") and shutil.which("ft_launcher") is None:
        pytest.skip("NVRx is not there: pip install nvidia-resiliency-ext where only its launcher finds it")
    shell(command)
