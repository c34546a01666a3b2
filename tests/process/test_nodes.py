"""Several nodes played on one machine: who replaces whom, and how all end. The agents here only pretend to train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from world import HANG_TIMEOUT_S, ROOT

from megatron.pretrain import nodes
from megatron.pretrain.processes import kill_processes_with, processes_with

PATIENCE_S = 3.0
RUN_NODES = """
import logging, sys
from megatron.pretrain.nodes import Nodes, run_nodes
logging.basicConfig(format="%(message)s")
nodes, spares, patience_s, run_id, *command = sys.argv[1:]
played = Nodes(int(nodes), int(nodes), int(spares))
sys.exit(run_nodes(command, played, run_id=run_id, patience_s=float(patience_s)))
"""
WORKER = "import os, time; time.sleep(600)"
AGENT = f"""
import os, pathlib, signal, subprocess, sys, time
folder, name = pathlib.Path(sys.argv[1]), os.environ["MOE_CKPT_NODE"]
environment = os.environ | {{"TORCHELASTIC_RUN_ID": sys.argv[2]}}
quiet = {{"start_new_session": True, "stderr": subprocess.DEVNULL}}
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], env=environment, **quiet)
(folder / f"{{name}}.pid").write_text(str(os.getpid()))
while not (folder / f"{{name}}.code").exists() and not (folder / "all.code").exists():
    time.sleep(0.02)
worker.kill()
own = folder / f"{{name}}.code"
sys.exit(int((own if own.exists() else folder / "all.code").read_text()))
"""


class Nodes:
    """A launcher of pretended agents."""

    def __init__(self, folder: Path, spares: int) -> None:
        self.folder, self.run_id = folder, f"nodes-test-{os.getpid()}-{folder.name}"
        command = [sys.executable, "-c", AGENT, str(folder), self.run_id]
        arguments = ["2", str(spares), str(PATIENCE_S), self.run_id]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN_NODES, *arguments, *command],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def pid(self, name: str) -> int:
        """The agent of a node, once it runs."""
        path, deadline = self.folder / f"{name}.pid", time.monotonic() + HANG_TIMEOUT_S
        while not path.exists() or not path.read_text():
            assert time.monotonic() < deadline, f"{name} was not started; there are {os.listdir(self.folder)}"
            time.sleep(0.02)
        return int(path.read_text())

    def lose(self, name: str) -> None:
        """Kill an agent."""
        os.kill(self.pid(name), signal.SIGKILL)

    def ends(self, name: str, code: int) -> None:
        """Let an agent, or `all`, end."""
        (self.folder / f"{name}.tmp").write_text(str(code))
        (self.folder / f"{name}.tmp").rename(self.folder / f"{name}.code")

    def wait(self) -> tuple[int, str]:
        """Exit code and what was said."""
        said = self.process.communicate(timeout=HANG_TIMEOUT_S)[1]
        return self.process.returncode, said


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for run_id in {found["TORCHELASTIC_RUN_ID"] for _, found in _ours(tmp_path)}:
        kill_processes_with({"TORCHELASTIC_RUN_ID": run_id})


def _ours(folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    for pid, found in processes_with({}):
        if found.get("TORCHELASTIC_RUN_ID", "").endswith(folder.name):
            yield pid, found


@pytest.mark.ci
def test_a_node_that_is_lost_while_another_is_being_replaced_is_replaced_too(folder: Path) -> None:
    nodes = Nodes(folder, spares=3)
    nodes.pid("node-1")
    for lost in ("node-0", "node-1", "node-2"):
        nodes.lose(lost)
    nodes.pid("node-3"), nodes.pid("node-4")
    nodes.ends("all", 0)
    code, said = nodes.wait()
    assert code == 0, said
    assert "node-2 lost; replaced by node-4" in said


@pytest.mark.ci
def test_workers_of_a_lost_node_do_not_outlive_it(folder: Path) -> None:
    nodes = Nodes(folder, spares=1)
    nodes.pid("node-1")
    nodes.lose("node-0")
    nodes.pid("node-2")
    assert {found["MOE_CKPT_NODE"] for _, found in _ours(folder)} == {"node-1", "node-2"}
    nodes.ends("all", 0)
    assert nodes.wait()[0] == 0


@pytest.mark.ci
def test_when_the_spares_are_used_up_the_others_are_ended_and_it_is_told(folder: Path) -> None:
    nodes = Nodes(folder, spares=0)
    nodes.lose("node-1")
    code, said = nodes.wait()
    assert code == 1
    assert "node-1 lost; no nodes left of 2" in said
    assert "node-0 did not exit 3 s after the job failed; told to end" in said


def test_the_exit_code_is_that_of_the_agent_that_failed(folder: Path) -> None:
    nodes = Nodes(folder, spares=1)
    nodes.pid("node-0")
    nodes.ends("node-1", 7)
    nodes.ends("node-0", 0)
    assert nodes.wait()[0] == 7


@pytest.mark.ci
def test_once_a_node_has_ended_with_a_verdict_the_others_are_ended_too_whatever_they_say(folder: Path) -> None:
    nodes = Nodes(folder, spares=1)
    nodes.pid("node-1")
    nodes.ends("node-0", 2)
    code, said = nodes.wait()
    assert code == 2, said
    assert "node-1 did not exit 3 s after the job failed; told to end" in said


@pytest.mark.parametrize("codes", [(2, 1), (1, 2)], ids=["after", "before"])
def test_a_node_that_fails_after_or_before_a_verdict_does_not_change_it(folder: Path, codes: tuple[int, int]) -> None:
    nodes = Nodes(folder, spares=1)
    agent = nodes.pid("node-0")
    nodes.pid("node-1")
    nodes.ends("node-0", codes[0])
    while Path(f"/proc/{agent}").exists():  # until the launcher has seen its end
        time.sleep(0.02)
    nodes.ends("node-1", codes[1])
    assert nodes.wait()[0] == 2


VERDICT_OF_THE_FIRST_ATTEMPT = """
import os, pathlib, sys, time
verdict = pathlib.Path(os.environ["MOE_CKPT_LAUNCH_VERDICT"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        verdict.write_text("2")
        sys.exit(0)
    while not verdict.exists():
        time.sleep(0.02)
    sys.exit(1)
"""


def test_a_verdict_of_an_attempt_that_is_repeated_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(VERDICT_OF_THE_FIRST_ATTEMPT)
    command = [sys.executable, "-m", "megatron.pretrain.launch", "--nproc-per-node=2", str(tmp_path / "worker.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr


def test_a_signal_ends_all_nodes_and_none_is_replaced(folder: Path) -> None:
    nodes = Nodes(folder, spares=5)
    agents = nodes.pid("node-0"), nodes.pid("node-1")
    nodes.process.send_signal(signal.SIGTERM)
    code, said = nodes.wait()
    assert code == 128 + signal.SIGTERM, said
    assert "replaced by" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in agents)


WORKS_WITH_ITS_AGENT = """
import os, pathlib, sys, time
agent = os.getppid()
pathlib.Path(sys.argv[1], f"{os.environ['RANK']}.pid").write_text(str(agent))
while os.getppid() == agent:
    time.sleep(0.05)
"""


def test_a_signal_that_comes_while_a_node_is_started_reaches_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def started(*_: Any, **__: Any) -> Any:
        agents.forward(signal.SIGTERM, None)
        return SimpleNamespace(send_signal=told.append, poll=lambda: None)

    def ended(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(poll=lambda: nodes.NODE_LEAVES, send_signal=told.append)

    monkeypatch.setattr(subprocess, "Popen", ended)
    monkeypatch.setattr(nodes, "end_processes_with", lambda *_: [])
    agents = vars(nodes)["_Agents"]([], nodes.Nodes(1, 1, spares=1), "")
    monkeypatch.setattr(subprocess, "Popen", started)
    agents.poll()
    assert told == [signal.SIGTERM]


@pytest.mark.ci
def test_nodes_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKS_WITH_ITS_AGENT)
    options = "--nproc-per-node=1", "--nnodes=2", str(tmp_path / "worker.py"), str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "megatron.pretrain.launch", *options],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as launcher:  # fmt: skip
        try:
            deadline = time.monotonic() + HANG_TIMEOUT_S
            while len(list(tmp_path.glob("*.pid"))) < 2:
                assert time.monotonic() < deadline, "two nodes were not started"
                time.sleep(0.05)
            launcher.kill()
            said = launcher.communicate(timeout=HANG_TIMEOUT_S)[1]  # to the end of the last process that could write
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    for node in ("node-0", "node-1"):
        assert f"{node}: the launcher of this node has ended, so it ends too" in said
