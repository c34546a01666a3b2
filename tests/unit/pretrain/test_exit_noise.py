"""Ctrl-C, and output that nobody reads any more, end or disturb nothing with a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.moe.standby.slot import DESCRIPTOR
from megatron.pretrain.exit_noise import OF_LAUNCHERS

ROOT = Path(__file__).parents[3]
MOE_CKPT = (sys.executable, "-m", "moe_ckpt")
HEARD = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
"""In a child: tests in the background of a shell ignore Ctrl-C."""
CLOSED = "nobody reads standard output any more: the job continues without it\n"

LOGS = """
import logging, sys, time
from megatron.pretrain.exit_noise import outlive_readers
outlive_readers()
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
print("ready", flush=True)
sys.stdin.readline()
for at in range(100):
    print(at, flush=True)
    logging.info(at)
    sys.stdout.write(str(at))
"""


@pytest.mark.parametrize("unbuffered", [["-u"], []], ids=["-u", ""])
def test_output_without_a_reader_is_said_once_and_goes_nowhere(unbuffered: list[str]) -> None:
    started = subprocess.Popen(
        [sys.executable, *unbuffered, "-c", LOGS], cwd=ROOT, text=True, env={**os.environ, "RANK": "3"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with started:
        assert started.stdout is not None
        assert started.stdin is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "ready\n"
        started.stdout.close()
        started.stdin.write("\n")
        started.stdin.flush()
        assert started.stderr.read() == f"rank 3: {CLOSED}"
    assert started.returncode == 0


def test_output_with_a_reader_is_as_it_was() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOGS.replace("100", "2")],
        cwd=ROOT,
        text=True,
        input="\n",
        capture_output=True,
        check=True,
    )
    assert ended.stdout.startswith("ready\n0\nINFO:root:0\n01\nINFO:root:1\n")
    assert ended.stderr.startswith("INFO") or not ended.stderr


@pytest.mark.parametrize(("program", "code"), [("lambda: 75", 75), ("lambda: 1 / 0", 1)])
@pytest.mark.parametrize("redirected", ["", " >&-"])
def test_a_launcher_ends_with_its_code_whatever_destructors_do(program: str, code: int, redirected: str) -> None:
    ends = "import atexit, os; atexit.register(os.abort); from megatron.pretrain.exit_noise import end_with"
    line = f"{sys.executable} -c '{ends}; print(1); end_with({program})'{redirected}"
    ended = subprocess.run(["bash", "-c", line], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ended.returncode == code
    assert ended.stderr.count("ZeroDivisionError") == (code == 1) and ended.stdout == ("" if redirected else "1\n")


def test_a_failed_rank_runs_its_exit_handlers_and_frees_nothing() -> None:
    program = """
import atexit, os
from megatron.pretrain.exit_noise import end_failed_rank
class Freed:
    __del__ = lambda self: os.write(1, b"freed")
kept = Freed()
atexit.register(print, "registered")
end_failed_rank(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "registered\n", "")


def test_ranks_and_standbys_are_known_by_what_launchers_give_them() -> None:
    assert DESCRIPTOR in OF_LAUNCHERS


@pytest.mark.parametrize("redirected", [">&-", ">&- 2>&-", "| true", ">/dev/full"])
@pytest.mark.parametrize("command", ["simulate constants", "--help"])
def test_commands_without_output_end_without_a_traceback(command: str, redirected: str) -> None:
    line = f"{sys.executable} -m moe_ckpt {command} {redirected}"
    ended = subprocess.run(["bash", "-c", line], cwd=ROOT, text=True, capture_output=True, check=False)
    assert ended.returncode in (0, 1)
    assert len(ended.stderr.splitlines()) == (redirected == ">/dev/full"), ended.stderr


def test_an_interrupted_command_says_so_in_a_line(tmp_path: Path) -> None:
    command = [*MOE_CKPT, "report", "--watch", "--port", "0", str(tmp_path / "metrics.jsonl")]
    fifo = tmp_path / "metrics.jsonl"
    os.mkfifo(fifo)  # reading waits for a writer
    started = subprocess.Popen(
        command, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=HEARD
    )
    with started, fifo.open("w"):  # opened once it reads
        started.send_signal(signal.SIGINT)
        assert started.stderr is not None
        said = started.stderr.read()
    assert started.returncode == 130
    assert said.strip() == "moe-ckpt: interrupted"


def test_a_conversion_that_slurm_ends_leaves_nothing(tmp_path: Path) -> None:
    program = f"""
import pathlib, time, moe_ckpt
moe_ckpt.refuse_unsupported_versions()
import moe_ckpt.commands.main as commands
from moe_ckpt.dense.staging import staging
def convert():
    with staging(pathlib.Path({str(tmp_path / "out")!r}), "exporting"):
        print("ready", flush=True)
        time.sleep(60)
commands.main = convert
moe_ckpt.main()
"""
    started = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with started:
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "ready\n"
        started.terminate()
        said = started.stderr.read()
    assert (started.returncode, said) == (143, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "start",
    [("-c", "from megatron.pretrain.standby.run import main; main()"), ("-m", "megatron.pretrain.launch")],
    ids=["moe-ckpt-run", "train_cpu.sh"],
)
def test_a_launcher_that_is_interrupted_while_torch_is_imported_ends_without_a_word(
    start: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text('__version__ = "2.9.0"\n')
    (tmp_path / "torch" / "__init__.py").write_text('print("imported", flush=True)\ninput()\n')
    started = subprocess.Popen(
        [sys.executable, *start], cwd=ROOT, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=HEARD,
    )  # fmt: skip
    with started:
        assert started.stdout is not None
        assert started.stderr is not None
        assert started.stdout.readline() == "imported\n"
        started.send_signal(signal.SIGINT)
        said = started.stderr.read()
    assert started.returncode == -signal.SIGINT, said
    assert not said
