"""`moe-ckpt gc`: what takes space in a place and is not needed any more, and on request its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from megatron.core.dist_checkpointing.moe.errors import MoECheckpointError, UnreadableCheckpoint
from moe_ckpt.report import Fact, Report, show, table
from moe_ckpt.report.progress import progress

from .values import Duration

if TYPE_CHECKING:
    from moe_ckpt.checkpoints.location import GcItem, GcPlan

HELP = """List checkpoints in PLACE that are safe to remove, and why others are not; with --apply, remove them.

\b
    $ moe-ckpt gc run/snapshots                       # storage: a --moe-ckpt-persist-dir, a folder or a URL
    $ moe-ckpt gc run/checkpoints --keep-last 3     # a --save folder
    $ moe-ckpt gc /dev/shm/moe-ckpt-$(id -un)       # memory: a --moe-ckpt-memory-dir, on its node
    $ moe-ckpt gc run/snapshots --apply

Jobs tidy up after themselves. What they leave is what a killed one could not free any more:

\b
    storage   snapshots and windows that newer ones supersede; those of a way that training left when it went back to
              an older state; what was never sealed. --keep-last N states stay, by default as many as the job was told.
    --save    what a save or a conversion left unfinished, and with --keep-last N older iterations. Those that hold
              experts for a kept one stay, the ones that --ckpt-step left, and all where the tracker names none.
    memory    jobs without a process on this node. A restart of the job needs the snapshots, and the notes of
              replays that diverged, that are left: they go only with --ended JOB.

Never freed are: anything of a running job, which is known by its processes in memory, and elsewhere by something
written less than --idle ago; the newest state that can be restored, of which every byte is read first, and what is
newer; what is of another job, or of an earlier run of the same, unless --ended names it; what a newer version wrote or
cannot be read just now, and what it may belong to; links.

Exit codes: 0 done; 1 PLACE cannot be read, or something could not be freed; 2 wrong usage.
"""


@click.command(help=HELP)
@click.argument("place")
@click.option("--apply", "apply_", is_flag=True, help="Free it; without this nothing is changed.")
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Newest states, or iterations, to keep.")
@click.option(
    "--idle", "idle_s", type=Duration(), default="1h", show_default=True, metavar="TIME",
    help="Where something was written less than this ago a job may be running: nothing is freed.",
)  # fmt: skip
@click.option("--ended", multiple=True, metavar="JOB", help="A job (its id) that will not be resumed. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.option(
    "--rows", type=click.IntRange(min=0), metavar="N", default=40, show_default=True, help="Rows to print; 0 for all.",
)  # fmt: skip
@click.pass_context
def gc(
    context: click.Context,
    place: str,
    apply_: bool,
    keep_last: int | None,
    idle_s: float,
    ended: tuple[str, ...],
    as_json: bool,
    rows: int,
) -> None:
    """See `HELP`; the option above each parameter explains it."""
    from moe_ckpt.checkpoints.location import GcLimits
    from moe_ckpt.checkpoints.places import locate

    location = locate(place)
    limits = GcLimits(keep_last, idle_s, frozenset(ended), time.time())
    try:
        with progress("reading", location.size_bytes()) as advance:
            plan = location.gc_plan(limits, advance)
    except OSError as error:
        raise UnreadableCheckpoint(f"{error.filename or place} cannot be read: {error.strerror or error}") from error
    failures = tuple(_freed(item) if apply_ and item.remove else "" for item in plan.items)
    show(_report(place, location.kind.value, plan, failures, apply_), as_json, rows or None)
    if any(failures):
        context.exit(1)


def _freed(item: GcItem) -> str:
    """Why it could not be freed; empty if it was."""
    assert item.remove is not None
    try:
        item.remove()
    except FileNotFoundError:
        return ""  # somebody else was faster
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except MoECheckpointError as error:
        return str(error)
    return ""


def _report(place: str, holds: str, plan: GcPlan, failures: Sequence[str], applied: bool) -> Report:
    judged = [*zip(plan.items, failures, strict=True)]

    def row(item: GcItem, failure: str) -> tuple[str, int, str, str]:
        if item.remove is None:
            return item.what, item.nbytes, "stays", item.reason
        verdict = "not freed" if failure else "freed" if applied else "can go"
        return item.what, item.nbytes, verdict, failure or item.reason

    going_bytes = sum(item.nbytes for item, failure in judged if item.remove is not None and not failure)
    facts = (
        Fact("Holds", holds),
        Fact("Newest state that stays", plan.restores or None),
        Fact("Freed" if applied else "Can be freed", going_bytes, "bytes"),
        Fact("Stays", sum(item.nbytes for item in plan.items) - going_bytes, "bytes"),
    )
    hint = ("Nothing was changed; --apply frees what can go.",) if plan.freed and not applied else ()
    items = table("Items", "what | size:bytes | verdict | why", (row(item, failure) for item, failure in judged))
    return Report(place, facts, (items,), (*plan.notes, *hint))
