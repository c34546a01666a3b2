"""`moe-ckpt gc`: what takes space in a place and is not needed any more, and on request its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from moe_ckpt.report import Columns, Fact, Report, Table, show
from moe_ckpt.report.progress import progress

from ..errors import MoECheckpointError, UnreadableCheckpoint, UsageError
from ..examine.recognition import Content, Recognized, recognized
from .megatron_core import load_megatron_core
from .training import Duration

if TYPE_CHECKING:
    from ..examine.surplus.items import Item, Limits, Surplus

HELP = """Say what in PLACE is not needed any more, and why the rest is; with --apply, free it.

\b
    $ moe-ckpt gc run/windows                       # storage: a --moe-ckpt-persist-dir, a folder or a URL
    $ moe-ckpt gc run/checkpoints --keep-last 3     # a --save folder
    $ moe-ckpt gc /dev/shm/moe-ckpt-me              # memory: a --moe-ckpt-memory-dir, on its node
    $ moe-ckpt gc run/windows --apply

Jobs tidy up after themselves. What they leave is what a killed one could not free any more:

\b
    storage   snapshots and windows that newer ones supersede; those of a way that training left when it went back to
              an older state; what was never sealed. --keep-last N states stay, by default as many as the job was told.
    --save    what a save or a conversion left unfinished, and with --keep-last N older iterations. Those that hold
              experts for a kept one stay.
    memory    jobs without a process on this node. Where snapshots are left, a restart of the job can go on from them,
              so they go only with --ended JOB.

Never freed are: anything of a running job, which is known by its processes in memory, and elsewhere by something
written less than --idle ago; the newest state that can be restored, of which every byte is read first, and what is
newer; what is of another job, or of an earlier run of the same, unless --ended names it; what a newer version wrote or
cannot be read just now, and what it may belong to; links.

Exit codes: 0 done; 1 PLACE cannot be read, or something could not be freed; 2 wrong usage.
"""

_COLUMNS: Columns = (("what", "text"), ("size", "bytes"), ("verdict", "text"), ("why", "text"))


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
@click.option("--rows", type=click.IntRange(min=0), default=40, show_default=True, help="Rows to print; 0 for all.")
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
    found = recognized(place)
    if found.content is Content.SAVES and keep_last is not None:
        load_megatron_core()  # older iterations go only where a newer one was read
    from ..examine.surplus.items import Limits

    try:
        surplus = _surplus(found, Limits(keep_last, idle_s, frozenset(ended), time.time()))
    except OSError as error:
        raise UnreadableCheckpoint(f"{error.filename or place} cannot be read: {error.strerror or error}") from error
    failures = tuple(_freed(item) if apply_ and item.remove else "" for item in surplus.items)
    show(_report(found, surplus, failures, apply_), as_json, rows or None)
    if any(failures):
        context.exit(1)


def _surplus(found: Recognized, limits: Limits) -> Surplus:
    """Raises UsageError for what cannot be tidied by itself."""
    if found.content is Content.MEMORY:
        from ..examine.surplus.memory import surplus_of_memory

        return surplus_of_memory(found.path, limits)
    if found.content not in (Content.STORAGE, Content.SAVES):
        raise UsageError(f"{found.place} is one {found.content.value}: give the folder it lies in")
    from ..examine.verification import size_bytes

    with progress("reading", size_bytes(found)) as advance:
        if found.content is Content.STORAGE:
            from ..examine.storage import open_storage
            from ..examine.surplus.storage import surplus_of_storage

            return surplus_of_storage(open_storage(found.place), found.place, limits, advance)
        from ..examine.surplus.saves import surplus_of_saves

        return surplus_of_saves(found.path, limits, advance)


def _freed(item: Item) -> str:
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


def _report(found: Recognized, surplus: Surplus, failures: Sequence[str], applied: bool) -> Report:
    judged = [*zip(surplus.items, failures, strict=True)]

    def row(item: Item, failure: str) -> tuple[str, int, str, str]:
        if item.remove is None:
            return item.what, item.nbytes, "stays", item.reason
        verdict = "not freed" if failure else "freed" if applied else "can go"
        return item.what, item.nbytes, verdict, failure or item.reason

    going_bytes = sum(item.nbytes for item, failure in judged if item.remove is not None and not failure)
    facts = (
        Fact("Holds", found.content.value),
        Fact("Newest state that stays", surplus.restores or None),
        Fact("Freed" if applied else "Can be freed", going_bytes, "bytes"),
        Fact("Stays", sum(item.nbytes for item in surplus.items) - going_bytes, "bytes"),
    )
    hint = ("Nothing was changed; --apply frees what can go.",) if surplus.freed and not applied else ()
    table = Table("Items", _COLUMNS, tuple(row(*one) for one in judged))
    return Report(found.place, facts, (table,), (*surplus.notes, *hint))
