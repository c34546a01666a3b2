"""What the nodes of a job do when the node with its batch script is gone, where they meet: they have it requeued.

Slurm does not: with `--no-kill` it lets the job continue, and nothing is left that could decide.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

PATIENCE_S, ASK_S = 30.0, 60.0
GONE_S, AGAIN_S = 600.0, 10.0
"""How long Slurm may take to count a node that does not answer as down (SlurmdTimeout), and how often it is asked."""


def requeue_if_orphaned(endpoint: str, ran_s: float) -> bool:
    """Have the job requeued, or in a chain cancelled for the next one, where nobody answers at HOST:PORT any more and
    Slurm says that the batch node is down. Where it is not, this node alone may be cut off, and the others train on.

    Every agent that has reached it asks, and the first one gets it: the others are told that there is nothing to
    requeue. Nobody does that ran for less than MOE_CKPT_MIN_RUN_S: `job.sh` would not requeue the job either.
    """
    if _answers(endpoint, PATIENCE_S):
        return False
    job, least_s = os.environ["SLURM_JOB_ID"], float(os.environ.get("MOE_CKPT_MIN_RUN_S", "600"))
    command = (
        ["scontrol", "requeue", job] if os.environ.get("MOE_CKPT_ON_STOP", "requeue") == "requeue" else ["scancel", job]
    )
    said = f"job {job}: {endpoint} has not answered for {PATIENCE_S:g} s: "
    if ran_s < least_s:
        sys.stderr.write(f"{said}what fails within {least_s:g} s would fail again, so see why, and run scancel {job}\n")
        return False
    needed = (command[0], "squeue", "sinfo")
    if missing := [name for name in needed if shutil.which(name) is None]:
        told = f"{', '.join(missing)} not here, so if the batch node is down run {' '.join(command)}"
        sys.stderr.write(f"{said}{told}\n")
        return False
    if not _is_down(job):
        sys.stderr.write(f"{said}but Slurm does not call the batch node down, so this node leaves alone\n")
        return False
    return _ask(command, f"{said}the batch node is down: ")


def cancel_if_orphaned() -> None:
    """End a job that has nothing more to do, where Slurm says that its batch node is down: its other nodes would stay
    idle to the end of its time."""
    job = os.environ["SLURM_JOB_ID"]
    if all(map(shutil.which, ("scancel", "squeue", "sinfo"))) and _is_down(job):
        _ask(["scancel", job], f"job {job}: the batch node is down: ")


def _ask(command: Sequence[str], said: str) -> bool:
    """Ask Slurm for it, and say what came of that; whether it is done."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{said}{command[0]} did not answer within {ASK_S:g} s, so run {' '.join(command)}\n")
        return False
    result = "asked for" if not asked.returncode else f"refused ({asked.stderr.strip()[:200]})"
    sys.stderr.write(f"{said}{' '.join(command)} {result}\n")
    return not asked.returncode


def _is_down(job: str) -> bool:
    """Whether Slurm calls the node of the batch script down, or says that it does not respond, within `GONE_S`."""
    until_s = time.monotonic() + GONE_S
    while True:
        node = _asked("squeue", "--noheader", "--format=%B", f"--jobs={job}")
        state = _asked("sinfo", "--noheader", "--format=%T", f"--nodes={node}") if node else ""
        if state.startswith(("down", "fail", "powered_down", "powering_down", "unknown")) or "*" in state:
            return True
        if time.monotonic() > until_s:
            return False
        time.sleep(min(AGAIN_S, GONE_S / 10))


def _asked(*command: str) -> str:
    """The first word of the answer; empty where there is none."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        return ""
    return next(iter(answer.stdout.split()), "")


def _answers(endpoint: str, patience_s: float) -> bool:
    host, _, port = endpoint.rpartition(":")
    until_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError:
            if time.monotonic() > until_s:
                return False
            time.sleep(min(1.0, patience_s / 10))
        else:
            return True
