"""Processes of a job: helpers of a trainer, such as data loaders and writers of checkpoints, and how any are found."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SHIELDED = (signal.SIGTERM, signal.SIGINT)

VERDICT_FILE = "MOE_CKPT_LAUNCH_VERDICT"
"""Environment variable with the file in which a worker leaves an exit code that restarts cannot change."""

NODE_NAME = "MOE_CKPT_NODE"
"""Environment variable that names the node where several are played on one machine; else the host's name counts."""

NODE_LEAVES = 75
"""Exit code of a launcher whose node leaves the job to a spare (EX_TEMPFAIL)."""


@contextlib.contextmanager
def starting_helpers() -> Iterator[None]:
    """Hold back signals in helpers that are forked meanwhile, until `live_and_die_with_parent` protects them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def live_and_die_with_parent(_worker_id: int = 0) -> None:
    """Tie this process to its trainer: signals do not end it, the trainer's death does, at once.

    Schedulers signal whole process groups, and a trainer that wants to save before it ends needs its helpers until
    then. A helper that outlived a killed trainer would hold its sockets open, and so hide the death from its peers.
    """
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)
    die_with_parent()


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends; takes no lock, so a `preexec_fn` may call it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    is there; which are left after `timeout_s` seconds."""
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
