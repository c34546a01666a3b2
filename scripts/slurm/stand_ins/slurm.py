#!/usr/bin/env python3
"""Plays sbatch, srun, scontrol, scancel and squeue, by the name it has, as far as the scripts here use them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cluster
from cluster import JOB, NODE, STEP, SubmissionRefused

POLL_S = 0.05


def sbatch(given: dict[str, str], rest: list[str]) -> int:
    """Put a copy of the script into the queue."""
    if not rest or not Path(rest[0]).is_file():
        raise SubmissionRefused(f"Unable to open file {rest[:1]}")
    number = len(cluster.jobs()) + 1
    job = cluster.SlurmJob(cluster.folder() / "jobs" / str(number))
    job.folder.mkdir(parents=True)
    shutil.copy(rest[0], job.folder / "slurm_script")
    options = {"nodes": "1"} | cluster.directives(job.folder / "slurm_script") | given
    job.update(
        state="PENDING",
        restarts=0,
        nodes=[],
        name=options.get("job-name", Path(rest[0]).name),
        options=options,
        arguments=rest[1:],
        submitted_from=str(Path.cwd()),
        environment=_handed_on(options),
    )
    print(f"Submitted batch job {number}", flush=True)
    return 0


def _handed_on(options: dict[str, str]) -> dict[str, str]:
    """The environment of a batch script; where it is not all of it, srun is to keep to that as well."""
    if "export" not in options:
        return dict(os.environ)
    return {**cluster.exported(options["export"], os.environ), "SLURM_EXPORT_ENV": options["export"]}


def srun(given: dict[str, str], rest: list[str]) -> int:
    """Run a command on nodes of the job that are left, and wait for all; the worst exit code, 128 + N for signals."""
    job = cluster.job(os.environ[JOB])
    nodes = [given["nodelist"]] if "nodelist" in given else job.read()["nodes"]
    if len(nodes) != int(given["nodes"]):
        raise SubmissionRefused(f"Requested node configuration is not available: {given['nodes']} nodes of {nodes}")
    step = job.folder / f"step-{time.monotonic_ns()}"
    step.write_text("\n".join([*(f"{name}={value}" for name, value in given.items()), *rest]))
    environment = cluster.exported(given.get("export", os.environ.get("SLURM_EXPORT_ENV", "ALL")), os.environ)
    tasks = {
        node: subprocess.Popen(
            rest,
            env={**environment, STEP: step.name, NODE: node, "SLURM_PROCID": str(number)},
            cwd=given.get("container-workdir"),
            start_new_session=True,
        )
        for number, node in enumerate(nodes)
    }

    def hand_on(number: int, _frame: object) -> None:
        of_step = {JOB: os.environ[JOB], STEP: step.name}
        cluster.send(signal.SIGKILL if number == signal.SIGTERM else number, **of_step)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)
    worst = 0
    while tasks:
        for node, task in list(tasks.items()):
            code = task.poll()
            if code is None:
                continue
            del tasks[node]
            cluster.send(signal.SIGKILL, **{JOB: os.environ[JOB], STEP: step.name, NODE: node})
            if code:
                sys.stderr.write(f"srun: error: {node}: task ended with {code}\n")
            worst = max(worst, 128 - code if code < 0 else code)
        time.sleep(POLL_S)
    return worst


def scontrol(_given: dict[str, str], rest: list[str]) -> int:
    """`requeue JOB` or `requeuehold JOB`."""
    states = {"requeue": "PENDING", "requeuehold": "REQUEUE_HOLD"}
    if len(rest) != 2 or rest[0] not in states:
        raise SubmissionRefused(f"invalid keyword: {' '.join(rest)}")
    cluster.job(rest[1]).requeued.write_text(states[rest[0]])
    return 0


def scancel(given: dict[str, str], rest: list[str]) -> int:
    """A signal to the steps of a job; or the end of jobs of a name that wait in the queue."""
    if "signal" in given:
        (number,) = rest
        cluster.signal_to_steps(cluster.signal_number(given["signal"]), cluster.job(number).folder.name)
    elif given.get("state") == "PENDING" and "name" in given:
        for job in cluster.jobs():
            if job.read()["state"] == "PENDING" and job.read()["name"] == given["name"]:
                job.update(state="CANCELLED")
    else:
        raise SubmissionRefused(f"not played: {given} {rest}")
    return 0


def squeue(given: dict[str, str], _rest: list[str]) -> int:
    """The state of a job, or with `%N` the nodes that it has left."""
    record = cluster.job(given["jobs"]).read()
    print(",".join(record["nodes"]) if given.get("format") == "%N" else record["state"])
    return 0


def main() -> int:
    """Exit code of the command that is played."""
    command = Path(sys.argv[0]).name
    try:
        play = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel, "squeue": squeue}[command]
        return play(*cluster.options(command, sys.argv[1:]))
    except SubmissionRefused as error:
        sys.stderr.write(f"{command}: error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
