"""Processes of a job: how any are found, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

NODE_NAME = "MOE_CKPT_NODE"
"""Environment variable that names the node where several are played on one machine; else the host's name counts."""

NODE_LEAVES = 75
"""Exit code of a launcher whose node leaves the job to a spare (EX_TEMPFAIL)."""


def node_name() -> str:
    """Of this node, as the job knows it."""
    return os.environ.get(NODE_NAME) or os.uname().nodename


def processes_with(environment: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Processes of this user that were started with these variables, and all variables of each."""
    for folder in Path("/proc").glob("[0-9]*"):
        found = environment_of(int(folder.name))
        if all(found.get(name) == value for name, value in environment.items()):
            yield int(folder.name), found


def environment_of(pid: int) -> dict[str, str]:
    """With which variables a process was started; none for processes that are gone or belong to others."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def kill_processes_with(environment: Mapping[str, str]) -> list[int]:
    """SIGKILL for all processes that `processes_with` finds, but this one; which these were."""
    killed = [pid for pid, _ in processes_with(environment) if pid != os.getpid()]
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed


def end_processes_with(environment: Mapping[str, str], timeout_s: float) -> list[int]:
    """Kill all processes that `processes_with` finds, but this one, also those that they were just starting, until none
    is there.

    Args:
        environment: Variables by which they are found.
        timeout_s: Seconds after which it gives up.

    Returns:
        Which are left.
    """
    until = time.monotonic() + timeout_s
    while (left := kill_processes_with(environment)) and time.monotonic() < until:
        time.sleep(0.005)
    return left


def started_s(pid: int) -> float:
    """When a process was started, in seconds since 1970; infinite for one that is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return float("inf")
