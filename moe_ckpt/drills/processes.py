"""Finds and kills the processes of a job on this machine: a rank, or a node with all that is on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron.core.dist_checkpointing.moe.standby.slot import PROCESS_NAME
from megatron.pretrain.processes import NODE_NAME, end_processes_with, environment_of, processes_with

TOKEN = "MOE_CKPT_CHAOS"
"""Environment variable by which the processes of one job are known."""
GONE_S = 60.0


@dataclass(frozen=True)
class Running:
    """The processes of the job with this token, as they are when asked. memory: the folder of all nodes' folders."""

    token: str
    memory: Path

    def workers(self) -> dict[int, int]:
        """Process of each rank."""
        found = {pid: _rank(pid, variables) for pid, variables in processes_with({TOKEN: self.token})}
        ranks = {pid: rank for pid, rank in found.items() if rank is not None}
        parents = {pid: _parent(pid) for pid in ranks}
        # Helpers of a rank have its variables and its name too, but only the rank itself is a child of the agent.
        return {ranks[pid]: pid for pid, parent in parents.items() if parent and parent not in ranks}

    def agents(self) -> list[tuple[int, str]]:
        """Process and node of each agent, in the order of the nodes' numbers; only where there are several."""
        nodes = {
            pid: variables[NODE_NAME]
            for pid, variables in processes_with({TOKEN: self.token})
            if NODE_NAME in variables
        }
        found = [(pid, name) for pid, name in nodes.items() if (parent := _parent(pid)) and parent not in nodes]
        return sorted(found, key=lambda agent: int(agent[1].rpartition("-")[2]))

    def lose_rank(self, rank: int) -> bool:
        """Kill a rank; False if it is not there now."""
        pid = self.workers().get(rank)
        return pid is not None and _kill(pid) and _gone(pid)

    def lose_node(self, number: int) -> str:
        """Kill the agent of a node and all processes on it, and delete its memory, as a power cut does; its name, or
        nothing where there are not that many nodes now."""
        agents = self.agents()
        if number >= len(agents):
            return ""
        agent, name = agents[number]
        if _kill(agent):
            _gone(agent)  # first, so that it restarts nobody
        _end({TOKEN: self.token, NODE_NAME: name})
        shutil.rmtree(self.memory / name, ignore_errors=True)
        return name

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, if it is there now.

        Args:
            rank: Global number of the rank.
            number: The signal.
        """
        pid = self.workers().get(rank)
        if pid is not None:
            _kill(pid, number)

    def kill_all(self) -> None:
        """Kill the job whatever its state, also what a launcher started while it was being killed."""
        _end({TOKEN: self.token})


def _rank(pid: int, variables: Mapping[str, str]) -> int | None:
    """That of a process: of its start, or the one that a standby was given since."""
    if "RANK" in variables:
        return int(variables["RANK"])
    with contextlib.suppress(OSError, ValueError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return int(name.removeprefix(PROCESS_NAME)) if name.startswith(PROCESS_NAME) else None
    return None


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal now.

    Args:
        pid: Id of a process on this machine.
        number: The signal.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def _parent(pid: int) -> int:
    """0 for a process that is gone, or has ended and was only not waited for."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE and environment_of(pid):
            return int(process.ppid())
    return 0


def _gone(pid: int) -> bool:
    """Wait until a process that was killed is not there any more: the kernel takes its time."""
    deadline_s = time.monotonic() + GONE_S
    while _parent(pid):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} is still there {GONE_S:.0f} s after SIGKILL")
        time.sleep(0.005)
    return True


def _end(environment: Mapping[str, str]) -> None:
    if left := end_processes_with(environment, GONE_S):
        raise TimeoutError(f"processes {sorted(left)} are still there {GONE_S:.0f} s after SIGKILL")


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
