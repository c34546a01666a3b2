"""Processes of a job end with the one that started them, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.core.dist_checkpointing.moe.standby.slot import LAUNCHER as VARIABLE
from megatron.core.dist_checkpointing.moe.standby.slot import this_launcher
from megatron.pretrain.standby.node_agent import NodeAgent

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 60.0

RANK = """
import os, sys, threading, time
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
from megatron.core.dist_checkpointing.moe.standby.slot import end_with_launcher
end_with_launcher()
helpers = []
def fork():
    helpers.append(os.fork())
    if not helpers[-1]:
        time.sleep(600)
fork()
by_thread = threading.Thread(target=fork)
by_thread.start()
by_thread.join()
time.sleep(0.5)
alive = os.waitpid(helpers[1], os.WNOHANG) == (0, 0)
os.kill(helpers[1], 9)
print(os.getpid(), helpers[0], alive, flush=True)
time.sleep(600)
"""
LAUNCHER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(600)
"""
OUR_LAUNCHER = """
import os, subprocess, sys, time
from moe_ckpt.megatron_core import skip_megatron_core
skip_megatron_core()
from megatron.core.dist_checkpointing.moe.standby.slot import LAUNCHER, this_launcher
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, LAUNCHER: this_launcher()})
time.sleep(600)
"""
WAITS = """
import os, time
launcher = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == launcher:
    time.sleep(0.02)
"""
TRAINER = """
import time, torch
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda number: None
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.dist_checkpointing.moe.core_versions.training import ending_with_their_trainer, results_queue
results_queue().put(1)
with ending_with_their_trainer():
    print(PersistentAsyncCaller._get_process(0, "fork").pid, flush=True)
time.sleep(600)
"""


def run(*command: str, **environment: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", *command], cwd=ROOT, env=own | environment, stdout=pipe, stderr=pipe, text=True
    )


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def all_are_gone(processes: list[psutil.Process], within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while not all(map(is_gone, processes)):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("of", "launched"),
    [(LAUNCHER, True), (OUR_LAUNCHER, True), (LAUNCHER, False)],
    ids=["under torchrun", "under ours", "without one"],
)
def test_a_rank_and_what_it_has_forked_end_with_its_launcher(of: str, launched: bool) -> None:
    launcher = run(of, RANK, RANK="7", **({"TORCHELASTIC_RUN_ID": "job"} if launched else {}))
    assert launcher.stdout is not None
    rank, fork, is_alive = launcher.stdout.readline().split()
    assert is_alive == "True", "a fork of another thread does not end with that thread"
    processes = [psutil.Process(int(rank)), psutil.Process(int(fork))]
    launcher.kill()
    try:
        assert all_are_gone(processes, LONG_S if launched else 1.0) == launched
    finally:
        for process in processes:
            if not is_gone(process):
                process.kill()
    said = launcher.communicate()[1]
    assert said.count("rank 7: the launcher of this rank has ended, so it ends too") == int(launched), said


def test_a_rank_of_ours_ends_whose_launcher_was_killed_before_it_could_look() -> None:
    launcher = run(OUR_LAUNCHER, WAITS + RANK, RANK="7", TORCHELASTIC_RUN_ID="job")
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    gone = all_are_gone([rank], LONG_S)
    if not gone:
        rank.kill()
    said = launcher.communicate()[1]
    assert gone
    assert "rank 7: the launcher of this rank has ended, so it ends too" in said, said


def test_our_agents_name_themselves_to_their_ranks() -> None:
    agent, environments = object.__new__(NodeAgent), {0: dict[str, str]()}
    agent._setup_local_watchdog(environments)
    assert environments[0][VARIABLE] == this_launcher()


@pytest.mark.ci
def test_processes_in_which_core_writes_checkpoints_end_with_a_trainer_that_is_killed() -> None:
    trainer = run(TRAINER)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    children = psutil.Process(trainer.pid).children(recursive=True)
    assert worker in {child.pid for child in children}
    assert len(children) >= 2, "the worker, and the manager of the queue for results"
    trainer.send_signal(signal.SIGKILL)
    gone = all_are_gone(children, LONG_S)
    for child in children:
        if not is_gone(child):
            child.kill()
    trainer.communicate()
    assert gone
