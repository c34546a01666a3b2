"""Plays Slurm's controller: runs the jobs of the queue one after another, and what befalls them on the way.

`controller.py [--lose N] [--stop N] [--cancel N] ... --reports FILE` acts, in the order of the options, once training
has reported iteration N: a node that trains is lost with all that is in its memory; the job is warned that its time is
nearly up; the job is cancelled. A job that does not end then is killed. The exit code is that of the last job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cluster
from cluster import JOB, NODE

POLL_S = 0.05
KILL_WAIT_S = 30.0
POOL = 32

Event = tuple[str, int]


class Controller:
    """The cluster's nodes, and the events that are still to come."""

    def __init__(self, events: list[Event], reports: Path, tmpfs: Path) -> None:
        self._events, self._reports, self._tmpfs = events, reports, tmpfs
        self._lost: set[str] = set()

    def run_all(self) -> int:
        """Run jobs until none waits; the exit code of the last one, 1 if an event never came."""
        code = 0
        while waiting := [job for job in cluster.jobs() if job.read()["state"] == "PENDING"]:
            code = self._run(waiting[0])
        for what, iteration in self._events:
            say(f"nothing to {what}: iteration {iteration} was not reported in time")
        return code or int(bool(self._events))

    def _run(self, job: cluster.SlurmJob) -> int:
        record = job.read()
        healthy = [f"node-{n}" for n in range(POOL) if f"node-{n}" not in self._lost]
        nodes = healthy[: int(record["options"]["nodes"])]
        if len(nodes) < int(record["options"]["nodes"]):
            job.update(state="FAILED")
            say(f"job {job.number} asks for {record['options']['nodes']} nodes, and {len(nodes)} are played")
            return 1
        job.update(state="RUNNING", nodes=nodes)
        job.requeued.unlink(missing_ok=True)
        say(f"job {job.number} starts on {' '.join(nodes)}")
        batch = subprocess.Popen(
            ["bash", str(job.folder / "slurm_script"), *record["arguments"]],
            env=_environment(job, nodes),
            cwd=record["submitted_from"],
            start_new_session=True,
        )
        with _nothing_left_of(job):
            code = self._watch(job, batch)
        if job.requeued.exists():
            job.update(state=job.requeued.read_text(), restarts=record["restarts"] + 1)
            say(f"job {job.number} is requeued")
        else:
            job.update(state="COMPLETED" if code == 0 else "FAILED")
            say(f"job {job.number} has ended with exit code {code}")
        return code

    def _watch(self, job: cluster.SlurmJob, batch: subprocess.Popen[bytes]) -> int:
        deadline_s: float | None = None
        while batch.poll() is None:
            time.sleep(POLL_S)
            if job.requeued.exists() and deadline_s is None:
                batch.send_signal(signal.SIGTERM)
                deadline_s = time.monotonic() + KILL_WAIT_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                say(f"job {job.number} did not end in time")
                return 1
            if self._events and _newest(self._reports) >= self._events[0][1]:
                what = self._events[0][0]
                if what == "stop":
                    number, lead_s = _warning(job)
                    say(f"job {job.number} is told that its time is up in {lead_s:.0f} s")
                    batch.send_signal(number)
                    deadline_s = time.monotonic() + lead_s
                elif what == "cancel":
                    say(f"job {job.number} is cancelled")
                    cluster.signal_to_steps(signal.SIGTERM, str(job.number))
                    batch.send_signal(signal.SIGTERM)
                    deadline_s = time.monotonic() + KILL_WAIT_S
                elif not self._lose_a_node(job):
                    continue
                self._events.pop(0)
        return batch.returncode if batch.returncode >= 0 else 128 - batch.returncode

    def _lose_a_node(self, job: cluster.SlurmJob) -> bool:
        """Take a node away that trains, other than the one with the batch script; whether there is one just now."""
        head, *others = job.read()["nodes"]
        training = {found[NODE] for _, found in cluster.processes(**{JOB: str(job.number)}) if "RANK" in found}
        node = next((node for node in others if node in training), None)
        if node is None:
            return False
        self._lost.add(node)
        job.update(nodes=[one for one in job.read()["nodes"] if one != node])
        say(f"{node} is lost; {head} and the others continue")
        cluster.send(signal.SIGKILL, **{JOB: str(job.number), NODE: node})
        for memory in self._tmpfs.glob(f"moe-ckpt-job-{job.number}/{node}"):
            shutil.rmtree(memory)
        return True


def _environment(job: cluster.SlurmJob, nodes: list[str]) -> dict[str, str]:
    record = job.read()
    restarts = {"SLURM_RESTART_COUNT": str(record["restarts"])} if record["restarts"] else {}
    return {
        **record["environment"],
        JOB: str(job.number),
        NODE: nodes[0],
        "SLURM_JOB_NAME": record["name"],
        "SLURM_JOB_USER": "stand-in",
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_SUBMIT_DIR": record["submitted_from"],
        **restarts,
    }


def _warning(job: cluster.SlurmJob) -> tuple[int, float]:
    """Number and lead of `--signal=B:USR1@180`, in seconds."""
    match = re.fullmatch(r"B:(\w+)@(\d+)", job.read()["options"]["signal"])
    assert match, job.read()["options"]["signal"]
    return cluster.signal_number(match[1]), float(match[2])


@contextmanager
def _nothing_left_of(job: cluster.SlurmJob) -> Iterator[None]:
    """Slurm ends what a job leaves behind."""
    try:
        yield
    finally:
        while any(cluster.processes(**{JOB: str(job.number)})):
            cluster.send(signal.SIGKILL, **{JOB: str(job.number)})
            time.sleep(POLL_S)


def _newest(reports: Path) -> int:
    lines = reports.read_text().splitlines(keepends=True) if reports.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((report.get("iteration", 0) for report in whole), default=0)


def _event(what: str, iteration: str) -> Event:
    return what, int(iteration)


def say(text: str) -> None:
    print(f"slurm: {text}", flush=True)


def main() -> int:
    """Exit code of the last job."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for what in ("lose", "stop", "cancel"):
        parser.add_argument(f"--{what}", dest="events", action="append", default=[], type=partial(_event, what))
    parser.add_argument("--reports", type=Path, required=True, help="the job's --metrics-jsonl")
    options = parser.parse_args()
    return Controller(options.events, options.reports, Path(os.environ.get("MOE_CKPT_TMPFS", "/dev/shm"))).run_all()


if __name__ == "__main__":
    sys.exit(main())
