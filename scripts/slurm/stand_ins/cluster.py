"""A cluster that is played on one machine, as files in a folder: its jobs, their nodes and processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLUSTER, JOB, STEP, NODE = "STAND_IN_CLUSTER", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURMD_NODENAME"
"""Environment variables of all processes: the cluster's folder, and as in Slurm those of the job and its steps."""

VALUED = {
    "sbatch": {"nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "output", "open-mode", "job-name",
               "dependency", "export", "mem"},
    "srun": {"nodes", "ntasks", "ntasks-per-node", "nodelist", "kill-on-bad-exit", "wait", "cpu-bind", "export",
             "container-image", "container-workdir", "container-mounts"},
    "scancel": {"signal", "state", "name", "user"},
    "squeue": {"jobs", "states", "format"},
    "scontrol": set(),
}  # fmt: skip
PLAIN = {"sbatch": {"exclusive", "requeue", "no-requeue", "no-kill"}, "srun": {"overlap", "no-kill"},
         "squeue": {"noheader"}}  # fmt: skip
"""Options that are played; all others are refused, so that a misspelt one does not pass."""
OF_SITE = {"account", "comment", "constraint", "cpus-per-task", "error", "gres", "mail-type", "mail-user", "partition",
           "qos", "reservation"}  # fmt: skip
"""Options of sbatch that choose among what a site has; they are said to be ignored."""


class SubmissionRefused(Exception):
    """What the command that is played would not do, and why."""


@dataclass(frozen=True)
class SlurmJob:
    """One job of the cluster. Its record: state, restarts, nodes, name, options, script, arguments, environment."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "record.json").read_text())
        return record

    def update(self, **changes: Any) -> None:
        record = self.read() if (self.folder / "record.json").exists() else {}
        temporary = self.folder / f"record.{os.getpid()}"
        temporary.write_text(json.dumps(record | changes))
        temporary.replace(self.folder / "record.json")

    @property
    def requeued(self) -> Path:
        """There once the job has asked to be run again, with the state in which it waits."""
        return self.folder / "requeued"


def folder() -> Path:
    return Path(os.environ[CLUSTER])


def jobs() -> list[SlurmJob]:
    """All jobs, oldest first."""
    return sorted((SlurmJob(path) for path in (folder() / "jobs").glob("[0-9]*")), key=lambda job: job.number)


def job(number: str) -> SlurmJob:
    found = SlurmJob(folder() / "jobs" / number)
    if not number.isdecimal() or not found.folder.is_dir():
        raise SubmissionRefused("Invalid job id specified")
    return found


def options(command: str, arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of a command that come first, and the rest. Raises SubmissionRefused for unknown ones."""
    found: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return found, arguments[position:]
        name, equals, value = argument.removeprefix("--").partition("=")
        if command == "sbatch" and equals and name in OF_SITE:
            sys.stderr.write(f"{command}: not played: {argument}\n")
            continue
        if name not in (VALUED if equals else PLAIN).get(command, set()):
            raise SubmissionRefused(f"unrecognized option '{argument}', or not given as --name=value")
        found[name] = value
    return found, []


def directives(script: Path) -> dict[str, str]:
    """The options in the `#SBATCH` lines before the first command. Raises SubmissionRefused for what is none."""
    head = re.match(r"(?:#.*\n|\s*\n)*", script.read_text())
    lines = re.findall(r"^#SBATCH[ \t]+(.*)$", head.group() if head else "", re.MULTILINE)
    found, rest = options("sbatch", [word for line in lines for word in shlex.split(line, comments=True)])
    if rest:
        raise SubmissionRefused(f"'{rest[0]}' is no option: give --name=value")
    return found


def processes(**environment: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Processes of the cluster's jobs that were started with these variables, and all variables of each."""
    wanted = {CLUSTER: str(folder()), **environment}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            text = path.read_bytes().decode(errors="replace")
            found = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            if all(found.get(name) == value for name, value in wanted.items()):
                yield int(path.parent.name), found


def send(number: int, **environment: str) -> None:
    """A signal to all processes that `processes` finds, but this one."""
    for pid, _ in list(processes(**environment)):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def signal_to_steps(number: int, job_id: str) -> None:
    """A signal to the tasks of all steps of a job, which srun started, and not to what they have started themselves, as
    Slurm sends it where it tracks processes by cgroup; not to the batch script."""
    found = {pid: environment for pid, environment in processes(**{JOB: job_id})}
    outside = {pid for pid, environment in found.items() if STEP not in environment}
    for pid in found.keys() - outside:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if _parent(pid) in outside:
                os.kill(pid, number)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def exported(wish: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What `--export=ALL`, `NONE` or `A,B` lets through of an environment; Slurm's own variables always."""
    own = ("SLURM", "STAND_IN_")
    names = {"PATH", "HOME", *wish.split(",")}
    return {
        name: value for name, value in environment.items() if "ALL" in names or name in names or name.startswith(own)
    }


def signal_number(name: str) -> int:
    return int(signal.Signals[f"SIG{name.removeprefix('SIG')}"])
