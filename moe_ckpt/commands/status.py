"""`moe-ckpt status`: how protected a running job is, on all its nodes."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import click

from megatron.core.dist_checkpointing.moe.errors import UsageError
from moe_ckpt.report import show

from .values import Duration

HELP = """Say how protected a running job is, on one screen: newest protected and persisted iteration, who has less than
was asked for and why, memory that is left.

PLACE is a --moe-ckpt-memory-dir on a node of the job, by default the one that jobs use by themselves, or of
the Slurm job in which this runs. From what lies
there the job's own store is found, in which all ranks say how they stand; --store names it where no rank runs.

\b
    $ moe-ckpt status                                  # on any node of the job; srun --jobid=N --overlap
    $ moe-ckpt status --store head-node:29500          # from elsewhere: the store that the ranks met at
    $ moe-ckpt status --metrics run/metrics.jsonl      # what its log says, where nothing else can be reached

Ranks write it every two seconds while they train. A store that cannot be reached, as after the loss of the node that
has it, leaves what lies on this node.

Exit codes: 0 all ranks have what was asked for; 1 some have less, are silent or cannot be asked, or nothing is found;
2 wrong usage.
"""


@click.command(help=HELP)
@click.argument("place", required=False, type=click.Path(path_type=Path))
@click.option("--store", metavar="HOST:PORT", help="At which the ranks met: MASTER_ADDR:MASTER_PORT of a worker.")
@click.option("--job", metavar="JOB", help="Its id, where several run on this node.")
@click.option(
    "--metrics", type=click.Path(path_type=Path), metavar="FILE", help="A --metrics-jsonl, in place of asking ranks."
)
@click.option(
    "--silent", "silent_s", type=Duration(), default="60s", show_default=True, metavar="TIME",
    help="A rank that said nothing for longer counts as silent.",
)  # fmt: skip
@click.option(
    "--rows", type=click.IntRange(min=0), metavar="N", default=20, show_default=True, help="Of each table; 0 for all.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.pass_context
def status(
    context: click.Context,
    place: Path | None,
    store: str | None,
    job: str | None,
    metrics: Path | None,
    silent_s: float,
    rows: int,
    as_json: bool,
) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.runs.status import JobStatus, as_report, is_well, job_status, log_status

    if metrics is not None:
        found = JobStatus((log_status(metrics),), from_store=False, why_not="by the log of the last rank", by_log=True)
    else:
        found = job_status(place or _default_place(), store, job)
    now_s = time.time()
    show(as_report(found, now_s, silent_s), as_json, rows or None)
    if not is_well(found, now_s, silent_s):
        context.exit(1)


def _default_place() -> Path:
    from megatron.core.dist_checkpointing.moe.storage.ownership import default_memory_folder

    of_job, of_user = Path("/dev/shm") / f"moe-ckpt-job-{os.environ.get('SLURM_JOB_ID')}", default_memory_folder()
    for folder in (of_job, of_user):
        if not folder.is_dir():
            continue
        found = os.lstat(folder)
        is_others = os.geteuid() not in (0, found.st_uid)
        if stat.S_ISLNK(found.st_mode) or is_others:
            raise UsageError(f"{folder} was made by another user: name the folder of the job")
        return folder
    return of_user
